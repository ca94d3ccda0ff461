"""Reads Parquet and Arrow files as rows that know their number, in bounded memory; what all readers of files share.

It does not know where files are found or what a row means.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from tuner.data import limits
from tuner.errors import DataError

Row = dict[str, Any]
PlacedRow = tuple[str, Row]
"""`file:line` (or `file, row N` where a file has no lines) and the row; both counts start at 1."""
Broken = Callable[[DataError], None]
"""Told of each row that cannot be read, which is then left out. Without one, the first of them is raised."""

T = TypeVar("T")

_ROWS_AT_ONCE = 1_000
_PARQUET_ROWS_AT_ONCE = 64
"""A row of a few bytes in the file may be one of megabytes."""
_BYTES_AT_ONCE = 1 << 20


def unreadable(path: Path, name: str, error: Exception) -> DataError:
    """Return the error of a file that is not what its name says, or that the operating system does not give."""
    reason = str(error).strip().splitlines()[0].rstrip(".")
    return DataError(f"no readable {name} file: {reason}", where=path, fix="Correct the path, or write the file again.")


def refuse_twice(names: Sequence[str], where: str) -> None:
    """Check that no column has the name of another: one of them would be lost.

    Raises:
        DataError: two have one name.
    """
    twice = [
        name for name, count in Counter(names).items() if name and count > 1
    ]  # spreadsheets end lines in empty ones
    if twice:
        what = f"the file has more than one column of the same name: {', '.join(twice)}"
        raise DataError(what, where=where, fix="Rename or remove all but one of them.")


def numbered(place: object, rows: Iterable[Any]) -> Iterator[PlacedRow]:
    """Yield rows that have no lines with their numbers."""
    for number, row in enumerate(rows, 1):
        yield f"{place}, row {number}", row


def read_parquet(path: Path, broken: Broken | None) -> Iterator[PlacedRow]:
    """Yield the rows of a Parquet file; none can be left out, so `broken` is told of none."""
    return _arrow_rows(path, "Parquet", lambda: _parquet_batches(path))


def _parquet_batches(path: Path) -> Iterator[pa.RecordBatch]:
    # Mapped: read otherwise, a whole row group is held in memory, and some writers make one of the whole file.
    file = pq.ParquetFile(path, memory_map=True)
    refuse_twice(file.schema_arrow.names, str(path))
    yield from file.iter_batches(_PARQUET_ROWS_AT_ONCE)


def read_arrow(path: Path, broken: Broken | None) -> Iterator[PlacedRow]:
    """Yield the rows of an Arrow file or stream, as `read_parquet` does."""
    return _arrow_rows(path, "Arrow", lambda: _arrow_batches(path))


def _arrow_batches(path: Path) -> Iterator[pa.RecordBatch]:
    mapped = pa.memory_map(str(path))
    try:
        stream = pa.ipc.open_stream(mapped)
        refuse_twice(stream.schema.names, str(path))
        yield from stream
    except pa.ArrowInvalid:
        mapped.seek(0)
        reader = pa.ipc.open_file(mapped)
        refuse_twice(reader.schema.names, str(path))
        yield from (reader.get_batch(number) for number in range(reader.num_record_batches))


def _arrow_rows(path: Path, name: str, batches: Callable[[], Iterable[pa.RecordBatch]]) -> Iterator[PlacedRow]:
    number = 0
    try:
        for batch in _bounded(batches()):
            batch.validate(full=True)  # Arrow trusts what a file says of its own offsets and texts
            for rows in _bounded(_lists(batch)):
                for row in rows:
                    number += 1
                    yield f"{path}, row {number}", row
    except MemoryError as error:
        limit = limits.MAX_BYTES_AT_ONCE // 1024**2
        what = f"the rows from here on unfold to more than {limit:,} MiB of memory"
        raise DataError(what, where=f"{path}, row {number + 1}", fix="Split them into smaller ones.") from error
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:  # dates that Python has not
        raise unreadable(path, name, error) from error


def _bounded(values: Iterable[T]) -> Iterator[T]:
    """Yield values, each of which may take no more than a certain memory to make."""
    steps = iter(values)
    while True:
        with limits.memory():
            try:
                value = next(steps)
            except StopIteration:
                return
        yield value


def _lists(batch: pa.RecordBatch) -> Iterator[list[Row]]:
    """Yield the rows of a batch, few at once where they are long, or may be by standing for the same text."""
    at_once = _ROWS_AT_ONCE if batch.nbytes < _BYTES_AT_ONCE else 1
    for start in range(0, batch.num_rows, at_once):
        yield batch.slice(start, at_once).to_pylist()
