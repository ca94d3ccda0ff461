"""What happens to a row before and after its format reads it: its columns get the user's names, and media are refused.

Text in a row is data: braces in it stand for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from tuner.data import limits
from tuner.data.formats import cells
from tuner.data.formats.cells import Misfit, Row, names, text
from tuner.data.formats.image_places import is_image
from tuner.data.sample import Sample, text_of, turns_of
from tuner.errors import DataError, did_you_mean, nearest

Columns = Mapping[str, str]
"""A format's column -> this data set's, or a text of several such as '{context}\\n{question}'."""

_PLACE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")


def renamed(row: Row, columns: Columns | None, place: str) -> Row:
    """Return the row with the columns that `columns` asks for, in place of those that they are made of.

    Raises:
        DataError: the row lacks one of them, or a text is to be made of something that is no text.
    """
    if not columns:
        return row
    values, used = {}, set()
    for name, template in columns.items():
        parts = _sources(template, row)
        for column in sorted(parts - row.keys()):
            problem = f"dataset.columns maps {column!r} to {name!r}, and the row has no such column, only {names(row)}"
            fix = did_you_mean(column, map(str, row)) or "Use one of them."
            raise DataError(problem, where=place, of_row=True, fix=fix)
        values[name] = row[template] if template in row else _filled(template, row, place)
        used |= parts
    return {name: value for name, value in row.items() if name not in used} | values


def check_names(columns: Columns | None, known: Iterable[str], owner: str) -> None:
    """Check that a format has the columns that are to be filled; `owner` names it, and `known` are its columns.

    Raises:
        DataError: it has no such column.
    """
    known = sorted(set(known))
    for name in columns or ():
        if name not in known:
            problem = f"there is no column {name!r} in {owner}, only {', '.join(known)}"
            raise DataError(problem, where="dataset.columns", fix=did_you_mean(name, known) or "Choose one of them.")


def _sources(template: str, row: Row) -> set[str]:
    if template in row or "{" not in template:
        return {template}
    return {match[1] for match in _PLACE.finditer(template) if match[1] is not None}


def _filled(template: str, row: Row, place: str) -> str:
    def part(match: re.Match[str]) -> str:
        return match[0][0] if match[1] is None else _as_text(row[match[1]], match[1])

    try:
        # Counted first: the same column may be named any number of times.
        lengths = accumulate(len(part(match)) for match in _PLACE.finditer(template))
        if any(so_far > limits.MAX_SAMPLE_BYTES for so_far in lengths):
            raise limits.too_long(f"the text of dataset.columns {template!r}", place)
        return _PLACE.sub(part, template)
    except Misfit as misfit:
        fix = f"Use text columns for {template!r}, or correct the row."
        raise DataError(
            f"dataset.columns cannot turn it into text: {misfit}", where=place, of_row=True, fix=fix
        ) from misfit


def _as_text(value: object, name: str) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return "" if value is None else text(value, f"column {name!r}")


_COLUMN = re.compile(r"(image|video|audio|sound|pixel_value)(?:s|_?(?:path|url|file|bytes)s?)?", re.IGNORECASE)
"""The columns that data sets of vision and speech hold their media in; the group is the kind."""
_OF_IMAGES = ("image", "images", "img", "picture", "photo")
"""Columns with names like these hold images if their values are images."""
_PLACEHOLDER = re.compile(r"^[ \t]*<(image|video|audio)>|<(image|video|audio)>[ \t]*$", re.MULTILINE)
"""LLaVA's and LLaMA-Factory's stand at an edge of a line; HTML's element in running text does not."""
_NO_IMAGE = "Give the row its image in a column 'images', or remove the placeholder."
_FIX = "Remove the row: video and sound are not supported. Images belong in a column 'images' beside a conversation."
_NOT_HERE = "Only conversations (objective sft) may hold images: use a format such as 'messages', or remove the column."


def refuse_media(row: Row, sample: Sample, read: Collection[str], place: str) -> None:
    """Refuse a row that holds media beside its text, or a text with a place for media.

    Args:
        row: Its columns, after they were renamed.
        sample: What was read of it. In a plain text a placeholder is a word like others.
        read: The columns that its format reads.

    Raises:
        DataError: it does.
    """
    column = next((name for name, value in row.items() if name not in read and _is_media(name, value)), None)
    if column is not None:
        problem = f"the column {column!r} holds media, which would be ignored"
        raise DataError(problem, where=place, of_row=True, fix=_fix_of(column, read))
    for number, key in _keys_of_turns(row, read):
        problem = f"turn {number} has the key {key!r}, which would be ignored"
        fix = "Write the images of all turns into a column 'images' of the row, and <image> where each belongs."
        raise DataError(problem, where=place, of_row=True, fix=fix if _is_of_images(key) else _FIX)
    for number, turn in enumerate(() if isinstance(sample, str) else turns_of(sample), 1):
        question = text_of(turn["content"]) if turn["role"] == "user" else ""
        placeholder = _PLACEHOLDER.search(question)
        kind = placeholder and (placeholder[1] or placeholder[2])
        # A pair of tags is the markup that the question is about.
        if kind and f"</{kind}>" not in question:
            problem = f"turn {number} has the placeholder '<{kind}>', which would be trained on as plain text"
            raise DataError(problem, where=place, of_row=True, fix=_NO_IMAGE if kind == "image" else _FIX)


def _is_media(name: Any, value: Any) -> bool:
    """Say whether a column, or a key of a turn, holds media: by its name, or by a name like one and its value."""
    if not isinstance(name, str) or not _holds(value):
        return False
    return _COLUMN.fullmatch(name) is not None or (is_image(value) and nearest(name, _OF_IMAGES) is not None)


def _is_of_images(name: str) -> bool:
    match = _COLUMN.fullmatch(name)
    return match is None or match[1].lower() == "image"


def _fix_of(column: str, read: Collection[str]) -> str:
    if not _is_of_images(column):
        return _FIX
    if "images" not in read:
        return _NOT_HERE
    return f"Name it 'images', or set dataset.columns.images to {column!r}, or remove it."


def _keys_of_turns(row: Row, read: Collection[str]) -> Iterator[tuple[int, str]]:
    """Yield the keys of media in the turns of a row, each with the number of its turn."""
    for name in read:
        turns = cells.listed(row.get(name))
        for number, turn in enumerate(turns if isinstance(turns, list | tuple) else (), 1):
            if isinstance(turn, dict):
                yield from ((number, key) for key, value in turn.items() if _is_media(key, value))


def _holds(value: Any) -> bool:
    """Say whether a value has content: Parquet gives every row the columns of all rows, with nulls."""
    if isinstance(value, dict):
        return any(map(_holds, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds, value))
    return value.strip() != "" if isinstance(value, str) else value is not None and value is not False
