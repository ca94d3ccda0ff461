"""Reads CSV: a header, and rows with the line that each starts on."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from tuner.data.readers import text_files
from tuner.data.readers.text_files import OnError, PlacedRow
from tuner.errors import DataError

_OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}
"""In the only name of a header such a character is no part of the name, but what stands between columns."""


def read(path: Path, on_error: OnError) -> Iterator[PlacedRow]:
    """Yield the rows of a CSV file; one whose number of fields is wrong is left out, nothing follows wrong quotes."""
    csv.field_size_limit(text_files.MAX_ROW_BYTES)
    start, length = 1, 0

    def lines() -> Iterator[str]:
        nonlocal length
        # A line that is left out would shift the numbers of those after it, and may be half of a row.
        for _, line in text_files.lines(path, text_files.fail):
            length += len(line)
            if length > text_files.MAX_ROW_BYTES:
                raise text_files.too_long(path, start)
            yield line

    reader = csv.reader(lines(), strict=True)
    header: list[str] | None = None
    try:
        for record in reader:
            where = f"{path}:{start}"
            if record and header is None:
                header = _checked_header(where, record)
            elif record and header and len(record) != len(header):
                on_error(_other_width(where, header, record))
            elif record and header:
                yield where, dict(zip(header, record, strict=True))
            start, length = reader.line_num + 1, 0
    except csv.Error as error:
        raise DataError(f"no valid CSV: {error}", where=f"{path}:{start}", fix="Correct the row's quotes.") from error


def _checked_header(where: str, names: list[str]) -> list[str]:
    """Return the names of the columns.

    Raises:
        DataError: a name stands twice, or something else than a comma stands between them.
    """
    other = next((mark for mark in _OTHER_SEPARATORS if len(names) == 1 and mark in names[0]), None)
    if other:
        what = f"the columns are separated by {_OTHER_SEPARATORS[other]}: {names[0]}"
        raise DataError(what, where=where, fix="Write the file again with commas between the columns.")
    text_files.refuse_repeated(names, where)
    return names


def _other_width(where: str, header: list[str], record: list[str]) -> DataError:
    what = f"the row has {len(record)} fields where the header names {len(header)}: {', '.join(header)}"
    return DataError(what, where=where, fix="Put quotes around fields that hold commas or line breaks.")
