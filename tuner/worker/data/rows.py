"""Finds a data set's files or its hub copy and reads its rows, each with the place it came from.

It does not know what a row means.
"""

from __future__ import annotations

import csv
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from datasets.data_files import DataFilesDict, get_data_patterns
from datasets.exceptions import DatasetNotFoundError, DatasetsError

from tuner.errors import DataError, MachineError, did_you_mean
from tuner.files import sha256

Row = dict[str, Any]
PlacedRow = tuple[str, Row]
"""`file:line` (or `file, row N` where a file has no lines) and the row; both counts start at 1."""

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_SPACE = re.compile(r"[ \t\r\n]*")
_ROWS_AT_ONCE = 1_000
# What `datasets` writes beside the rows of a saved data set.
_ABOUT = {"state.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json"}


@dataclass(frozen=True)
class Source:
    """Where rows come from. `fingerprint` changes when their content does."""

    place: str
    fingerprint: str
    read: Callable[[], Iterator[PlacedRow]]


def find(path: str, name: str | None, split: str, base: Path | None) -> Source:
    """Return the source of `path`: a file, a folder of files, or an id on the Hugging Face hub.

    Raises:
        DataError: nothing is there, or what is there is no data set, or it lacks `split`.
        MachineError: the hub cannot be reached.
    """
    local = (base or Path()) / Path(path).expanduser()
    if local.is_dir():
        return _local(local, _files_of_split(local, split))
    if local.exists():
        return _local(local, [local])
    if _HUB_ID.fullmatch(path) and local.suffix.lower() not in READERS:
        return _hub(path, name, split)
    siblings = [item.name for item in local.parent.iterdir()] if local.parent.is_dir() else []
    hint = did_you_mean(local.name, siblings)
    raise DataError(f"there is no file or folder {str(local)!r}", fix=hint or "Correct the path.")


def _local(place: Path, files: list[Path]) -> Source:
    for file in files:
        if file.suffix.lower() not in READERS:
            known = ", ".join(READERS)
            raise DataError(f"{file.name!r} is of no known kind", where=file, fix=f"Known kinds: {known}.")
    digest = sha256("".join(_digest(file) + file.suffix for file in files).encode())
    return Source(str(place), digest, lambda: _chain(str(place), files))


def _digest(file: Path) -> str:
    try:
        return sha256(file)
    except OSError as error:
        what = f"the file cannot be read: {error.strerror}"
        raise DataError(what, where=file, fix="Correct the path or the file's permissions.") from error


def _chain(place: str, files: list[Path]) -> Iterator[PlacedRow]:
    rows = itertools.chain.from_iterable(READERS[file.suffix.lower()](file) for file in files)
    first = next(rows, None)
    if first is None:
        raise DataError("there is not one row in it", where=place, fix="Give a file with at least one row.")
    yield first
    yield from rows


def _files_of_split(folder: Path, split: str) -> list[Path]:
    """Return the files of `split`, told from file and folder names by the rules of `datasets`."""
    try:
        found = DataFilesDict.from_patterns(get_data_patterns(str(folder)), base_path=str(folder))
    except (DatasetsError, FileNotFoundError):
        found = {}
    splits = {str(key): _data_files(files) for key, files in found.items()}
    splits = {key: files for key, files in splits.items() if files}
    if not splits:
        raise DataError("the folder holds no data file", where=folder, fix=f"Known kinds: {', '.join(READERS)}.")
    if split not in splits:
        has = ", ".join(sorted(splits))
        raise DataError(f"the folder has no split {split!r}, only {has}", where=folder, fix="Set split to one of them.")
    return splits[split]


def _data_files(names: Iterable[str]) -> list[Path]:
    files = (Path(name) for name in names)
    return sorted(file for file in files if file.suffix.lower() in READERS and file.name not in _ABOUT)


def _hub(path: str, name: str | None, split: str) -> Source:
    try:
        dataset = datasets.load_dataset(path, name, split=split)
    except ConnectionError as error:
        what = f"{path!r} is no file or folder here, and the Hugging Face hub cannot be reached to look for it there"
        raise MachineError(what, fix="Connect to the network, or give a local file with --data.") from error
    except DatasetNotFoundError as error:
        what = f"{path!r} is no file or folder here and no data set on the Hugging Face hub that you may read"
        raise DataError(what, fix="Correct the path, or log in with `hf auth login`.") from error
    except (ValueError, DatasetsError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise DataError(f"data set {path!r} cannot be read: {reason}", fix="Correct path, name or split.") from error
    return Source(path, dataset._fingerprint, lambda: _numbered(path, dataset))


def _numbered(place: object, rows: Iterable[Any]) -> Iterator[PlacedRow]:
    for number, row in enumerate(rows, 1):
        yield f"{place}, row {number}", row


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield each line with its number, decoded alone so that a bad byte is reported with its line."""
    with path.open("rb") as stream:
        for number, raw in enumerate(stream, 1):
            try:
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                what = f"byte {error.start + 1} of the line (0x{raw[error.start]:02x}) is not UTF-8"
                raise DataError(what, where=f"{path}:{number}", fix="Save the file as UTF-8.") from error


def _read_jsonl(path: Path) -> Iterator[PlacedRow]:
    decoder = json.JSONDecoder(object_pairs_hook=_unique)
    for number, line in _lines(path):
        if text := line.rstrip():
            yield _checked(path, number, _decode(decoder.decode, text, path, number, number - 1))


def _read_json(path: Path) -> Iterator[PlacedRow]:
    """Read an array of rows; a file that starts otherwise is taken for JSON Lines, as `datasets` does."""
    start = next((text.strip() for _, text in _lines(path) if text.strip()), "")
    return _read_array(path) if start.startswith("[") else _read_jsonl(path)


def _read_array(path: Path) -> Iterator[PlacedRow]:
    # One element at a time: only so does each row know its line.
    text = "".join(line for _, line in _lines(path))
    decoder = json.JSONDecoder(object_pairs_hook=_unique)
    here, line, counted = text.index("[") + 1, 1, 0
    while (here := _after_space(text, here)) < len(text) and text[here] != "]":
        line, counted = line + text.count("\n", counted, here), here
        value, here = _decode(partial(decoder.raw_decode, idx=here), text, path, line, 0)
        yield _checked(path, line, value)
        here = _after_space(text, here)
        if text[here : here + 1] not in {",", "]"}:
            break
        here += text[here] == ","
    if text[here:].strip() != "]":
        line += text.count("\n", counted, here)
        what = "the array ends in the middle" if here >= len(text) else "',' or ']' is missing after a row"
        raise DataError(what, where=f"{path}:{line}", fix="Write the file again, or correct it.")


def _after_space(text: str, start: int) -> int:
    match = _SPACE.match(text, start)
    assert match is not None
    return match.end()


def _unique(pairs: list[tuple[str, Any]]) -> Row:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} stands twice in one object")
    return found


def _decode(decode: Callable[[str], Any], text: str, path: Path, line: int, lines_before: int) -> Any:
    """Decode the row that starts at `line` of `path`; `lines_before` lines of the file stand before `text`."""
    fix = "Correct or remove the row."
    try:
        return decode(text)
    except json.JSONDecodeError as error:
        torn = error.pos >= len(text) or error.msg.startswith("Unterminated")
        what = "the row ends in the middle" if torn else f"no valid JSON at column {error.colno}: {error.msg}"
        raise DataError(what, where=f"{path}:{line if torn else lines_before + error.lineno}", fix=fix) from error
    except RecursionError as error:
        raise DataError("the row is nested too deeply", where=f"{path}:{line}", fix=fix) from error
    except ValueError as error:
        raise DataError(str(error), where=f"{path}:{line}", fix=fix) from error


def _checked(path: Path, line: int, value: Any) -> PlacedRow:
    if not isinstance(value, dict):
        kind = "null" if value is None else f"of type {type(value).__name__}"
        fix = 'Write each row as an object such as {"text": "..."}.'
        raise DataError(f"the row is {kind}, not an object", where=f"{path}:{line}", fix=fix)
    return f"{path}:{line}", value


def _read_csv(path: Path) -> Iterator[PlacedRow]:
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader((line for _, line in _lines(path)), strict=True)
    header: list[str] | None = None
    start = 1
    try:
        for record in reader:
            if record and header is None:
                header = record
            elif record and header:
                yield _csv_row(f"{path}:{start}", header, record)
            start = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"no valid CSV: {error}", where=f"{path}:{start}", fix="Correct the row's quotes.") from error


def _csv_row(where: str, header: list[str], record: list[str]) -> PlacedRow:
    if len(record) != len(header):
        what = f"the row has {len(record)} fields where the header names {len(header)}: {', '.join(header)}"
        raise DataError(what, where=where, fix="Put quotes around fields that hold commas or line breaks.")
    return where, dict(zip(header, record, strict=True))


def _read_parquet(path: Path) -> Iterator[PlacedRow]:
    return _numbered(path, _arrow_rows(path, "Parquet", lambda: pq.ParquetFile(path).iter_batches(_ROWS_AT_ONCE)))


def _read_arrow(path: Path) -> Iterator[PlacedRow]:
    return _numbered(path, _arrow_rows(path, "Arrow", lambda: _arrow_batches(path)))


def _arrow_batches(path: Path) -> Iterator[pa.RecordBatch]:
    mapped = pa.memory_map(str(path))
    try:
        yield from pa.ipc.open_stream(mapped)
    except pa.ArrowInvalid:
        mapped.seek(0)
        reader = pa.ipc.open_file(mapped)
        yield from (reader.get_batch(number) for number in range(reader.num_record_batches))


def _arrow_rows(path: Path, kind: str, batches: Callable[[], Iterable[pa.RecordBatch]]) -> Iterator[Row]:
    try:
        for batch in batches():
            for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                yield from batch.slice(start, _ROWS_AT_ONCE).to_pylist()
    except (pa.ArrowException, OSError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise DataError(f"no readable {kind} file: {reason}", where=path, fix="Write the file again.") from error


READERS: dict[str, Callable[[Path], Iterator[PlacedRow]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
