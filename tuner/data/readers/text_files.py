"""Reads the lines of a file of text, packed or not, and plain text and CSV of them; what every reader of a file shares.

Never more of a file is in memory than a row and a chunk.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

from tuner.errors import DataError
from tuner.files import open_regular, require_regular

Row = dict[str, Any]
PlacedRow = tuple[str, Row]
"""`file:line` and the row; `file, row N` where a file has no lines, `file:line, row N` behind the first row of a line.

Both counts start at 1.
"""
OnError = Callable[[DataError], object]
"""Called with what is wrong with a row, which is then left out; it may raise to end the reading."""

PACKED = (".gz", ".zst", ".bz2")
MAX_ROW_BYTES = 32 * 1024**2
"""Of one row of text: far above any sample, and what keeps a packed file of a few kilobytes from filling the memory."""
BYTES_AT_ONCE = 1 << 20
_MAGIC = {
    b"\x1f\x8b": ("compressed with gzip", "Rename it to '{}.gz'."),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", "Rename it to '{}.zst'."),
    b"BZh": ("compressed with bzip2", "Rename it to '{}.bz2'."),
    b"PK\x03\x04": ("a zip archive", "Unpack it."),
    b"PAR1": ("a Parquet file", "Rename it to '{}.parquet'."),
}
"""What no text begins with: what such a file is, and what to do with it."""
_OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}
"""In the only name of a header such a character is no part of the name, but what stands between columns."""


@dataclass
class Cursor:
    """Where reading goes on, and has come to: it moves with each row.

    Of file number `file`, `row` lines of text (blank ones too) or rows of a table lie behind, `offset` bytes of text;
    `taken`: rows that were yielded since the first file's first.
    """

    file: int = 0
    row: int = 0
    offset: int = 0
    taken: int = 0


def fail(error: DataError) -> NoReturn:
    """Raise the error: the `OnError` of those who want every row or none."""
    raise error


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading its bytes, unpacked.

    Raises:
        DataError: it cannot be read, or it is packed or a table and its name does not say so.
    """
    try:
        with _stream(path) as stream:
            start = stream.peek(4)
            name, fix = next(
                (name_and_fix for magic, name_and_fix in _MAGIC.items() if start.startswith(magic)), ("", "")
            )
            if name:
                problem = f"the file is {name}, but its name ends in {path.suffix!r}"
                raise DataError(problem, where=path, fix=fix.format(path.name))
            yield cast(BinaryIO, stream)
    except OSError as error:
        raise unreadable(path, path.suffix.lstrip("."), error) from error


def _stream(path: Path) -> io.BufferedReader:
    if path.suffix.lower() not in PACKED:
        return open_regular(path)
    import pyarrow  # 0.3 s; it unpacks four times as fast as Python's gzip does, and it has zstd

    require_regular(path)
    return io.BufferedReader(pyarrow.input_stream(str(path)))


def lines(path: Path, on_error: OnError, at: Cursor | None = None) -> Iterator[tuple[int, str]]:
    """Yield each line from `at` on, with its number, decoded alone so that a bad byte is reported with its line."""
    at = at or Cursor()
    with opened(path) as stream:
        if at.offset:  # what is packed cannot be sought in
            stream.seek(at.offset)
        while raw := stream.readline(MAX_ROW_BYTES + 1):
            at.row, at.offset = at.row + 1, at.offset + len(raw)
            number = at.row
            if len(raw) > MAX_ROW_BYTES:
                on_error(too_long(path, number))
                while raw and not raw.endswith(b"\n"):
                    raw = stream.readline(BYTES_AT_ONCE)
                    at.offset += len(raw)
                continue
            try:
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                problem = f"byte {error.start + 1} of the line (0x{raw[error.start]:02x}) is not UTF-8"
                on_error(DataError(problem, where=f"{path}:{number}", fix="Save the file as UTF-8."))


def read_txt(path: Path, on_error: OnError, at: Cursor | None = None) -> Iterator[PlacedRow]:
    """Yield each line that is not blank as a row with the column `text`."""
    for number, line in lines(path, on_error, at):
        if text := line.rstrip():
            yield f"{path}:{number}", {"text": text}


def read_csv(path: Path, on_error: OnError) -> Iterator[PlacedRow]:
    """Yield the rows of a CSV file without those with a wrong number of fields; after wrong quotes no row follows."""
    csv.field_size_limit(MAX_ROW_BYTES)
    start, length = 1, 0

    def counted() -> Iterator[str]:
        nonlocal length
        # A line that is left out would shift the numbers of those after it, and may be half of a row.
        for _, line in lines(path, fail):
            length += len(line)
            if length > MAX_ROW_BYTES:
                raise too_long(path, start)
            yield line

    reader = csv.reader(counted(), strict=True)
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
        raise DataError(f"invalid CSV: {error}", where=f"{path}:{start}", fix="Correct the row's quotes.") from error


def _checked_header(where: str, names: list[str]) -> list[str]:
    other = next((mark for mark in _OTHER_SEPARATORS if len(names) == 1 and mark in names[0]), None)
    if other:
        problem = f"the columns are separated by {_OTHER_SEPARATORS[other]}: {names[0]}"
        raise DataError(problem, where=where, fix="Save the file with commas between the columns.")
    refuse_repeated(names, where)
    return names


def _other_width(where: str, header: list[str], record: list[str]) -> DataError:
    problem = f"the row has {len(record)} fields and the header has {len(header)}: {', '.join(header)}"
    return DataError(problem, where=where, fix="Put quotes around fields that contain commas or line breaks.")


def too_long(path: Path, line: int) -> DataError:
    """Return the error of a row that is longer than `MAX_ROW_BYTES`."""
    problem = f"the row is longer than {MAX_ROW_BYTES // 1024**2} MiB"
    return DataError(problem, where=f"{path}:{line}", fix="Split it into several rows.")


def unreadable(path: Path, kind: str, error: Exception) -> DataError:
    """Return the error of a file that is not what its name says, or that the operating system does not give."""
    reason = str(error).strip().splitlines()[0].rstrip(".")
    return DataError(
        f"cannot read the {kind} file: {reason}", where=path, fix="Correct the path, or create the file again."
    )


def refuse_repeated(columns: Sequence[str], where: object) -> None:
    """Check that no column has the name of another: one of them would be lost.

    Raises:
        DataError: two have one name; that of columns without a name, in which spreadsheets end lines, does not count.
    """
    repeated = [name for name, count in Counter(columns).items() if name and count > 1]
    if repeated:
        problem = f"the file has more than one column of the same name: {', '.join(repeated)}"
        raise DataError(problem, where=where, fix="Rename or remove all but one of them.")
