"""Reads Parquet and Arrow files as rows that know their number, in bounded memory.

A struct of Arrow has the keys of all rows: those that a row does not have are null, and go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from tuner.data import limits
from tuner.data.readers.text_files import BYTES_AT_ONCE, Cursor, OnError, PlacedRow, Row, refuse_repeated, unreadable
from tuner.errors import DataError
from tuner.files import require_regular

T = TypeVar("T")

_ROWS_AT_ONCE = 1_000
_PARQUET_ROWS_AT_ONCE = 64
"""A row of a few bytes in the file may be one of megabytes."""


def rows_of_table(path: Path, on_error: OnError, at: Cursor | None = None) -> Iterator[PlacedRow]:
    """Yield the rows of a Parquet file, or of an Arrow file or stream; `on_error` is not called: none can be left out.

    From `at` on; of what lies before it, only the row group that it is in is read, up to it.

    Raises:
        DataError: the file is damaged or no such file, two columns have one name, or rows unfold to too much memory.
    """
    batches = _parquet_batches if path.suffix.lower() == ".parquet" else _arrow_batches
    at = at or Cursor()
    try:
        for batch in _bounded(batches(path, at.row)):
            batch.validate(full=True)  # Arrow trusts what a file says of its own offsets and texts
            for rows in _bounded(_lists(batch)):
                for row in rows:
                    at.row += 1
                    yield f"{path}, row {at.row}", row
    except MemoryError as error:
        limit = limits.MAX_BYTES_AT_ONCE // 1024**2
        problem = f"the next rows need more than {limit:,} MiB of memory"
        raise DataError(problem, where=f"{path}, row {at.row + 1}", fix="Split them into smaller ones.") from error
    except (
        pa.ArrowException,
        OSError,
        ValueError,
        OverflowError,
        KeyError,
    ) as error:  # dates that Python has not, keys twice
        raise unreadable(path, path.suffix.lstrip(".").capitalize(), error) from error


def _parquet_batches(path: Path, skip: int) -> Iterator[pa.RecordBatch]:
    # Mapped: read otherwise, a whole row group is held in memory, and some writers make one of the whole file.
    require_regular(path)
    file = pq.ParquetFile(path, memory_map=True)
    refuse_repeated(file.schema_arrow.names, path)
    groups = list(range(file.num_row_groups))
    while groups and skip >= (num_rows := file.metadata.row_group(groups[0]).num_rows):
        skip -= num_rows
        del groups[0]
    yield from _after(file.iter_batches(_PARQUET_ROWS_AT_ONCE, row_groups=groups), skip)


def _arrow_batches(path: Path, skip: int) -> Iterator[pa.RecordBatch]:
    # Mapped: of a batch that is skipped no page is touched.
    require_regular(path)
    mapped = pa.memory_map(str(path))
    try:
        stream = pa.ipc.open_stream(mapped)
        refuse_repeated(stream.schema.names, path)
        yield from _after(stream, skip)
    except pa.ArrowInvalid:
        mapped.seek(0)
        reader = pa.ipc.open_file(mapped)
        refuse_repeated(reader.schema.names, path)
        yield from _after((reader.get_batch(number) for number in range(reader.num_record_batches)), skip)


def _after(batches: Iterable[pa.RecordBatch], skip: int) -> Iterator[pa.RecordBatch]:
    """Yield batches less their first `skip` rows."""
    for batch in batches:
        if skip < batch.num_rows:
            yield batch.slice(skip)
        skip = max(0, skip - batch.num_rows)


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
    at_once = _ROWS_AT_ONCE if batch.nbytes < BYTES_AT_ONCE else 1
    for start in range(0, batch.num_rows, at_once):
        yield rows_of(batch.slice(start, at_once))


def rows_of(table: pa.RecordBatch | pa.Table) -> list[Row]:
    """Return the rows of a table. A column may be null; a key of a struct that is null is left out.

    Tools and their arguments differ from row to row, so Arrow gives each row the keys of the others. The null that a
    row was written with cannot be told from those; in a map or in JSON text it stays.
    """
    rows: list[Row] = table.to_pylist(maps_as_pydicts="strict")
    for field in table.schema:
        if without := _without_nulls(field.type):
            for row in rows:
                row[field.name] = without(row[field.name])
    return rows


@cache
def _without_nulls(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """Return a function that leaves the null keys out of the structs in a value; None if a value holds no struct."""
    if pa.types.is_struct(kind):
        inner = {field.name: _without_nulls(field.type) for field in kind}
        return lambda value: (
            value
            and {
                key: without(inner_value) if (without := inner[key]) else inner_value
                for key, inner_value in value.items()
                if inner_value is not None
            }
        )
    if pa.types.is_map(kind):
        of_value = _without_nulls(kind.item_type)
        return of_value and (lambda value: value and {key: of_value(inner_value) for key, inner_value in value.items()})
    if any(is_list(kind) for is_list in _LISTS):
        of_item = _without_nulls(kind.value_type)
        return of_item and (lambda value: value and [of_item(inner_value) for inner_value in value])
    return None


_LISTS = (
    pa.types.is_list,
    pa.types.is_large_list,
    pa.types.is_fixed_size_list,
    pa.types.is_list_view,
    pa.types.is_large_list_view,
)
