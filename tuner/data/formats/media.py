"""Rows that mean pictures, films or sound: told apart from text that only speaks of them, and refused.

It knows no format; what a row holds of text is in its sample already.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

from tuner.data.formats.cells import Row
from tuner.data.sample import Chat, Message, Sample
from tuner.errors import DataError

_COLUMN = re.compile(r"(?:image|video|audio|sound|pixel_value)(?:s|_?(?:path|url|file|bytes)s?)?", re.IGNORECASE)
"""The columns that data sets of vision and speech hold their media in."""
_PLACEHOLDER = re.compile(r"^[ \t]*<(image|video|audio)>|<(image|video|audio)>[ \t]*$", re.MULTILINE)
"""LLaVA's and LLaMA-Factory's stand at an edge of a line; HTML's element in running text does not."""
_FIX = "Remove the row, or use text-only data: images, video and sound are not supported."


def refuse(row: Row, sample: Sample, read: Collection[str], place: str) -> None:
    """Refuse a row that holds media beside its text, or whose text has a place for it.

    Args:
        row: Its columns, after they were renamed.
        sample: What was read of it. In a plain text a placeholder is a word like others.
        read: The columns that its format reads.
        place: `file:line`.

    Raises:
        DataError: it does.
    """
    column = next((name for name, value in row.items() if _is_media(name) and name not in read and _holds(value)), None)
    if column is not None:
        what = f"the column {column!r} holds something that is not text and would be ignored"
        raise DataError(what, where=place, of_row=True, fix=_FIX)
    for number, text in _questions(sample):
        placeholder = _PLACEHOLDER.search(text)
        kind = placeholder and (placeholder[1] or placeholder[2])
        # A pair of tags is the markup that the question is about.
        if kind and f"</{kind}>" not in text:
            what = f"turn {number} has the placeholder '<{kind}>', which would be trained on as plain text"
            raise DataError(what, where=place, of_row=True, fix=_FIX)


def _is_media(name: Any) -> bool:
    return isinstance(name, str) and _COLUMN.fullmatch(name) is not None


def _holds(value: Any) -> bool:
    """Say whether a value has content: Parquet gives every row the columns of all rows, with nulls."""
    if isinstance(value, dict):
        return any(map(_holds, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds, value))
    return value.strip() != "" if isinstance(value, str) else value is not None and value is not False


def _questions(sample: Sample) -> Iterator[tuple[int, str]]:
    if isinstance(sample, str):
        return
    turns: list[Message] = sample.messages if isinstance(sample, Chat) else sample.prompt
    for number, turn in enumerate(turns, 1):
        if turn["role"] == "user":
            yield number, turn["content"]
