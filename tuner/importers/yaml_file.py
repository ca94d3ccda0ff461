"""YAML and JSON as data with line numbers: no tag builds an object, no alias explodes, `1e-5` is a number.

It knows no tool.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from tuner.errors import RecipeError
from tuner.files import read_named_text
from tuner.importers.document import MAX_BYTES, MAX_DEPTH, MAX_VALUES, Document, Keys

_FIX = "Name a config of another tool."
_STANDARD = "tag:yaml.org,2002:"
# YAML 1.1, which PyYAML reads, takes a number without a point before its exponent for text: 1e-5, 5e8, 1.0e9.
_FLOAT = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+")


def read(path: Path, name: str | None = None, *, may_be_empty: bool = False) -> Document:
    """Read a YAML or a JSON file that holds one mapping.

    Raises:
        RecipeError: it cannot be read, is no mapping, builds objects, or grows beyond what a config holds.
    """
    shown = name or str(path)
    text = read_named_text(path, RecipeError, max_bytes=MAX_BYTES, fix=_FIX, name=shown)
    return parse("{}" if may_be_empty and not _node(text, shown) else text, shown, path.parent)


def parse(text: str, name: str, folder: Path = Path()) -> Document:
    """Return the mapping that a text holds; raises as `read` does."""
    lines: dict[Keys, int] = {}
    values = _Reader(name, lines).value(_node(text, name), (), 0)
    if not isinstance(values, dict):
        raise RecipeError("the file holds no `key: value`", where=f"{name}:1", fix=_FIX)
    return Document(values, name, lines, folder)


def _node(text: str, name: str) -> yaml.Node | None:
    try:
        # JSON may be indented by tabs, which YAML forbids; inside its texts they are written \t.
        return yaml.compose(text.replace("\t", "    ") if name.endswith(".json") else text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error).split("\n")[0]
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise RecipeError(f"not valid YAML: {problem}", where=where) from None
    except RecursionError:
        raise RecipeError("not valid YAML: nested too deep", where=name) from None


class _Reader:
    """Values out of nodes; an alias is the same node again, so each is counted as often as it is used."""

    def __init__(self, name: str, lines: dict[Keys, int]) -> None:
        self.name, self.lines, self.count = name, lines, 0
        self.scalars = yaml.constructor.SafeConstructor()

    def wrong(self, what: str, node: yaml.Node, fix: str | None = None) -> RecipeError:
        return RecipeError(what, where=f"{self.name}:{node.start_mark.line + 1}", fix=fix)

    def value(self, node: yaml.Node | None, keys: Keys, depth: int) -> Any:
        if node is None:
            raise RecipeError("the file is empty", where=self.name, fix=_FIX)
        self.count += 1
        if self.count > MAX_VALUES or depth > MAX_DEPTH:
            what = f"more than {MAX_VALUES:,} values, or nested deeper than {MAX_DEPTH}: no config is"
            raise self.wrong(what, node, "Is there an alias (*name) inside of what it names?")
        if not node.tag.startswith(_STANDARD) or node.tag.startswith(f"{_STANDARD}python/"):
            raise self.wrong(f"the tag {node.tag} builds an object", node, "Write plain values; nothing was run.")
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, keys, depth)
        if isinstance(node, yaml.SequenceNode):
            for number, inner in enumerate(node.value):
                self.lines[(*keys, str(number))] = inner.start_mark.line + 1
            return [self.value(inner, (*keys, str(number)), depth + 1) for number, inner in enumerate(node.value)]
        return self.scalar(node)

    def mapping(self, node: yaml.MappingNode, keys: Keys, depth: int) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == f"{_STANDARD}merge":
                below = self.value(value_node, keys, depth + 1)
                for one in below if isinstance(below, list) else [below]:
                    if not isinstance(one, dict):
                        raise self.wrong("<< takes a mapping, or a list of them", key_node)
                    merged |= {key: value for key, value in one.items() if key not in merged}
                continue
            key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else None
            if key is None:
                raise self.wrong("a key that is no text", key_node)
            if key in own:
                raise self.wrong(f"the key {key!r} stands twice", key_node, "Keep one of the two.")
            self.lines[(*keys, key)] = key_node.start_mark.line + 1
            own[key] = self.value(value_node, (*keys, key), depth + 1)
        return merged | own

    def scalar(self, node: yaml.ScalarNode) -> Any:
        if node.tag == f"{_STANDARD}str":
            return float(node.value) if node.style is None and _FLOAT.fullmatch(node.value) else node.value
        if node.tag in (f"{_STANDARD}timestamp", f"{_STANDARD}binary"):
            return node.value
        try:
            return self.scalars.construct_object(node)
        except (ValueError, yaml.YAMLError) as error:
            raise self.wrong(f"{node.value[:40]!r} is no value: {error}", node) from None
