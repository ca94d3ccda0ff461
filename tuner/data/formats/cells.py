"""Values of a row, checked while they are taken out: texts, lists of turns, roles, tools.

It does not know which columns a format has.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tuner.data import limits
from tuner.data.sample import Owner
from tuner.data.unique_keys import RepeatedKey, unique_keys
from tuner.errors import nearest

Row = Mapping[str, Any]
SURROGATE = re.compile("[\ud800-\udfff]")
_MAX_LITERAL = 1_000_000
"""Characters of a list as Python writes it: its syntax tree takes a hundred times as much memory."""


class TrackedRow(dict[str, Any]):
    """A row, or an object in it, that knows which of its keys were read. `in` and iteration read nothing."""

    def __init__(self, values: Row, owner: Owner = "column") -> None:
        super().__init__(values)
        self._owner: Owner = owner
        self._read: set[str] = set()
        self._parts: list[TrackedRow] = []
        self._left_out: list[str] = []

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, which is read now."""
        self._read.add(key)
        return super().get(key, default)

    def part(self, values: Row, owner: Owner) -> TrackedRow:
        """Return an object in this row as one that is tracked with it."""
        self._parts.append(TrackedRow(values, owner))
        return self._parts[-1]

    def parts(self, owner: Owner) -> Iterator[TrackedRow]:
        """Yield the objects in this row that are tracked as those of `owner`."""
        return (part for part in self._parts if part._owner == owner)

    def leave_out(self, turns: str) -> None:
        """Note that nothing is made of some turns."""
        self._left_out.append(turns)

    def unread(self) -> Iterator[tuple[Owner, str]]:
        """Yield the owner and name of each key that has content and was not read, and the turns that were left out.

        One may come more than once.
        """
        yield from (("conversation", turns) for turns in self._left_out)
        for key, value in self.items():
            has_content = value is not None and value == value and value not in ("", [], {})  # NaN: pandas has no value
            if key not in self._read and has_content:
                yield self._owner, key
        for part in self._parts:
            yield from part.unread()


def part_of(row: Row, values: Row, owner: Owner) -> Row:
    """Return an object in a row, tracked if the row is."""
    return row.part(values, owner) if isinstance(row, TrackedRow) else values


def leave_out(row: Row, turns: str) -> None:
    """Note that nothing is made of some turns of a row, if the row is tracked."""
    if isinstance(row, TrackedRow):
        row.leave_out(turns)


class Misfit(ValueError):
    """A row that does not have its format's shape; the text says what is missing or wrong."""


def names(row: Row) -> str:
    """Return the names of a row's columns as one text."""
    return ", ".join(map(str, row)) or "(none)"


def column(row: Row, name: str) -> Any:
    """Return a column's value. Raises Misfit: there is no such column."""
    if name not in row:
        close = nearest(name, map(str, row))
        raise Misfit(f"it has no column {name!r}" + (f" (did you mean {close!r}?)" if close else ""))
    return row[name]


def first_of(row: Row, *candidates: str) -> str:
    """Return the first of some columns that the row has; the first of them all where it has none."""
    return next((name for name in candidates if name in row), candidates[0])


def text(value: Any, name: str) -> str:
    """Return a text, or the joined texts of a list of OpenAI's text parts.

    Raises:
        Misfit: it is something else, or no tokenizer could take it.
    """
    if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
        other = next((part.get("type") for part in value if part.get("type") != "text"), None)
        if other is None:
            return "".join(text(part.get("text"), name) for part in value)
        raise Misfit(f"{name} has a part of type {other!r}, and only 'text' is supported there")
    if not isinstance(value, str):
        raise Misfit(f"{name} is {kind(value)}, not text")
    # json reads "\ud83d" alone without complaint; the tokenizer would fail on it, far from the row.
    if SURROGATE.search(value):
        raise Misfit(f"{name} holds half of a surrogate pair")
    return value


def content(value: Any, name: str) -> str | list[dict[str, Any]]:
    """Return a text, or parts of text and images in the words of chat templates if one of the parts is an image.

    The part of an image has what the row says of it: `image_places` makes it an image. None: it is a place for one.

    Raises:
        Misfit: as for `text`, or a part is neither text nor an image.
    """
    parts = value if isinstance(value, list) and all(isinstance(part, dict) for part in value) else []
    if all(part.get("type") == "text" for part in parts):
        return text(value, name)
    return _joined([_part(part, name) for part in parts])


def _joined(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return parts without texts beside each other: a special token could be spelled half in one, half in the next."""
    joined: list[dict[str, Any]] = []
    for part in parts:
        if joined and part["type"] == joined[-1]["type"] == "text":
            joined[-1] = {"type": "text", "text": joined[-1]["text"] + part["text"]}
        else:
            joined.append(part)
    return joined


def _part(part: Mapping[str, Any], name: str) -> dict[str, Any]:
    kind_of_part = part.get("type")
    if kind_of_part == "text":
        return {"type": "text", "text": text(part.get("text"), name)}
    if not isinstance(kind_of_part, str) or kind_of_part not in _IMAGE_KEYS:
        raise Misfit(f"{name} has a part of type {kind_of_part!r}, and only {_TYPES} are supported")
    # Parquet gives every part the keys of all parts, with nulls.
    image = next((part[key] for key in _IMAGE_KEYS[kind_of_part] if part.get(key) is not None), None)
    if image is None and kind_of_part != "image":
        raise Misfit(f"{name} has a part of type {kind_of_part!r} without an image")
    return {"type": "image", "image": image}


_IMAGE_KEYS = {"image": ("bytes", "image", "url", "path"), "image_url": ("image_url",)}
"""The types of parts that are images -> the keys that hold one, the first of them wins."""
_TYPES = "'text', 'image' and 'image_url'"


def text_of(row: Row, name: str) -> str:
    """Return the text of a column. Raises Misfit: there is no such column, or it holds no text."""
    return text(column(row, name), name)


def text_if_any(row: Row, name: str, where: str | None = None) -> str:
    """Return the text of a column, or of the key of a turn, that a row may be without; empty if it is.

    Raises:
        Misfit: it holds no text: 0 and false are no text, and they are something.
    """
    value = row.get(name)
    return "" if value is None or value in ("", [], {}) else text(value, where or name)


def kind(value: Any) -> str:
    """Return what a value is, for a message."""
    return "null" if value is None else f"of type {type(value).__name__}"


def listed(value: Any, *, allows_repeated_keys: bool = False) -> Any:
    """Return the list that a text such as a CSV cell spells as JSON or as Python writes it, anything else as it is.

    Raises:
        Misfit: an object in the list has a key twice, of which one value would be lost.
    """
    if not (isinstance(value, str) and value.lstrip().startswith("[")):
        return value
    try:
        values = json.loads(value, object_pairs_hook=None if allows_repeated_keys else unique_keys)
    except RecursionError:
        return value
    except RepeatedKey as error:
        raise Misfit(str(error)) from error
    except ValueError:
        if len(value) > _MAX_LITERAL:
            return value
        try:
            tree = ast.parse(value.strip(), mode="eval")
            values = ast.literal_eval(tree)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return value
        if not allows_repeated_keys:
            _refuse_repeated_keys(tree)
    return values if isinstance(values, list) and not limits.too_deep(values) else value


def _refuse_repeated_keys(literal: ast.Expression) -> None:
    for node in ast.walk(literal):
        if isinstance(node, ast.Dict):
            keys = [ast.unparse(key) for key in node.keys if key]
            if repeated := next((key for key in keys if keys.count(key) > 1), None):
                raise Misfit(f"key {repeated} appears twice in one object")


def truth(value: Any) -> bool | None:
    """Return the truth of true, false, 1 or 0, also as the text of a CSV cell; None if it is something else."""
    if isinstance(value, str):
        return _TRUTHS.get(value.strip().lower())
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else None


_TRUTHS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


def turns(row: Row, name: str) -> Sequence[Row]:
    """Return a column's turns: objects, perhaps none at all.

    Raises:
        Misfit: the column is missing or holds something else.
    """
    items = listed(column(row, name))
    if not isinstance(items, list | tuple):
        raise Misfit(f"{name!r} is {kind(items)}, not a list")
    for number, turn in enumerate(items, 1):
        if not isinstance(turn, dict):
            raise Misfit(f"turn {number} is {kind(turn)}, not an object")
    return [part_of(row, turn, "turn") for turn in items]


def first_turn(row: Row, columns: Iterable[str]) -> Row:
    """Return what the first turn of the first of these columns that holds turns has, without nulls; or nothing."""
    for name in columns:
        items = listed(row.get(name), allows_repeated_keys=True)  # the format's reader refuses them
        if isinstance(items, list | tuple) and items and isinstance(items[0], dict):
            return {key: value for key, value in items[0].items() if value is not None}
    return {}


def value(turn: Row, keys: Sequence[str], number: int) -> Any:
    """Return what a turn has under the first of `keys` that it has. Raises Misfit: it has no such key."""
    # Parquet gives every turn the keys of all turns, with null for those that it had not.
    present = next((key for key in keys if turn.get(key) is not None), next((key for key in keys if key in turn), None))
    if present is None:
        raise Misfit(f"turn {number} has no {keys[0]!r}, only {names(turn)}")
    return turn[present]


def role(name: Any, known: Mapping[str, str], number: int) -> str:
    """Return the chat template's word for a role. Raises Misfit: the role is not in `known`."""
    if not isinstance(name, str) or name not in known:
        close = nearest(name, known) if isinstance(name, str) else None
        hint = f"did you mean {close!r}?" if close else f"known: {', '.join(known)}"
        raise Misfit(f"turn {number} has the unknown role {name!r} ({hint})")
    return known[name]
