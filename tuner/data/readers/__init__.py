"""Reads one file of any known kind as rows that know their line: which kinds there are, and who reads each.

It does not know where files are found or what a row means. Whoever imports it waits for no library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from tuner.data.readers import json_rows, text_files
from tuner.data.readers.text_files import PACKED, Cursor, OnError, PlacedRow, fail
from tuner.errors import DataError

_TEXT = {
    ".jsonl": json_rows.read_jsonl,
    ".json": json_rows.read_json,
    ".csv": text_files.read_csv,
    ".txt": text_files.read_txt,
}
_TABLES = (".parquet", ".arrow")
ENDINGS = (*_TEXT, *_TABLES)
_CAN_SEEK = (".jsonl", ".txt", *_TABLES)
SUPPORTED = f"Supported: {', '.join(ENDINGS)}, and text compressed as {', '.join(PACKED)}."


class Unreadable(DataError):
    """A file that cannot be read from some row on, so that nothing is known of those that follow."""


def kind(path: Path) -> str | None:
    """Return the kind of a file, such as '.jsonl' (for x.jsonl.gz too), or None where no reader knows it."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = suffixes[-1:] and suffixes[-1] in PACKED
    last = suffixes[-2:-1] if packed else suffixes[-1:]
    return last[0] if last and last[0] in (_TEXT if packed else ENDINGS) else None


def can_seek(path: Path) -> bool:
    """Return whether a file can be read from any row on without what lies before it."""
    return kind(path) in _CAN_SEEK and path.suffix.lower() not in PACKED


def rows_of_file(path: Path, on_error: OnError = fail, at: Cursor | None = None) -> Iterator[PlacedRow]:
    """Yield the rows of a file of a known kind; `on_error` is called for each that is left out.

    Args:
        at: Where to begin, in a file that `can_seek`; it moves along.

    Raises:
        Unreadable: the file cannot be read from some point on, or `on_error` raises; with the line.
    """
    name = kind(path) or ""
    if name in _TABLES:
        from tuner.data.readers import tables  # pyarrow: 0.3 s
    reader: Callable[..., Iterator[PlacedRow]] = tables.rows_of_table if name in _TABLES else _TEXT[name]
    try:
        yield from reader(path, on_error, *(() if at is None else (at,)))
    except DataError as error:
        raise Unreadable(error.what, where=error.where, fix=error.fix) from error
