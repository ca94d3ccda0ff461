"""The user's names for a format's columns: a row laid out under the names that its format knows.

Text in a row is data: braces in it stand for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import accumulate

from tuner.data import limits
from tuner.data.formats.cells import Misfit, Row, names, text
from tuner.errors import DataError, did_you_mean

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
    made, used = {}, set()
    for name, source in columns.items():
        parts = _sources(source, row)
        for part in parts:
            _check(part, row, name, place)
        made[name] = row[source] if source in row else _filled(source, row, place)
        used |= parts
    return {name: value for name, value in row.items() if name not in used} | made


def check_names(columns: Columns | None, known: Iterable[str], whose: str) -> None:
    """Check that a format (`whose` columns are `known`) has the columns that are to be filled.

    Raises:
        DataError: it has no such column.
    """
    known = sorted(set(known))
    for name in columns or ():
        if name not in known:
            what = f"there is no column {name!r} in {whose}, only {', '.join(known)}"
            raise DataError(what, where="dataset.columns", fix=did_you_mean(name, known) or "Choose one of them.")


def _sources(source: str, row: Row) -> set[str]:
    if source in row or "{" not in source:
        return {source}
    return {match[1] for match in _PLACE.finditer(source) if match[1] is not None}


def _check(source: str, row: Row, name: str, place: str) -> None:
    if source not in row:
        what = f"dataset.columns maps {source!r} to {name!r}, and the row has no such column, only {names(row)}"
        raise DataError(what, where=place, of_row=True, fix=did_you_mean(source, map(str, row)) or "Use one of them.")


def _filled(source: str, row: Row, place: str) -> str:
    def part(match: re.Match[str]) -> str:
        return match[0][0] if match[1] is None else _as_text(row[match[1]], match[1])

    try:
        # Counted first: the same column may be named any number of times.
        lengths = accumulate(len(part(match)) for match in _PLACE.finditer(source))
        if any(so_far > limits.MAX_SAMPLE_BYTES for so_far in lengths):
            raise limits.too_long(f"the text of dataset.columns {source!r}", place)
        return _PLACE.sub(part, source)
    except Misfit as misfit:
        fix = f"Use text columns for {source!r}, or correct the row."
        raise DataError(
            f"dataset.columns cannot turn it into text: {misfit}", where=place, of_row=True, fix=fix
        ) from misfit


def _as_text(value: object, name: str) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return "" if value is None else text(value, f"column {name!r}")
