"""Finds a data set's files or its hub copy, and gives its rows, each with the place it came from.

Rows that a program holds (dicts, a Dataset, a DataFrame) become a file first: `file_of_rows`.

It does not know how a file is read or what a row means.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

from tuner import assets, paths
from tuner.data import readers
from tuner.data.compat import fingerprint_of
from tuner.data.formats.image_places import data_uri
from tuner.data.readers.text_files import PACKED, Cursor, OnError, PlacedRow, fail
from tuner.errors import DataError, Key, MachineError, Option, brief_repr, did_you_mean
from tuner.files import disk_errors, load_json, make_folder, read_named_text, scratch_folder, sha256, write_text
from tuner.progress import shown

# What `datasets` writes beside the rows of a saved data set.
_ABOUT = {"state.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json"}
_SAVE_AGAIN = "Save the data set again with save_to_disk, or remove this file if another program wrote it."
_MAX_ABOUT_BYTES = 4_000_000
"""Of a list of files: 80,000 shards."""
# What `datasets` calls its reader of each kind, where that is not the kind itself.
_BUILDERS = {".jsonl": "json", ".txt": "text"}
_ROWS_AT_ONCE = 64
"""As for Parquet: a row of a few bytes in the file may be one of megabytes."""
_HASH_DIGITS = 16
_CACHE_FIX = "Set TUNER_CACHE to a writable folder with free space."


@dataclass(frozen=True)
class Source:
    """Where rows come from. `fingerprint()` changes when their content does; of files here it reads every byte.

    `read(on_error, at)` yields every row from `at` on, which moves along, if each of `files` can be sought in;
    `on_error`, `fail` by default, is called for those that cannot be read. `files`: those here, in their order; none
    where rows come from the hub.
    """

    place: str
    fingerprint: Callable[[], str]
    read: Callable[..., Iterator[PlacedRow]]
    files: tuple[Path, ...] = ()


def find(path: str, name: str | None = None, split: str = "train") -> Source:
    """Return the source of `path`: a file, a folder of files, a pattern such as data/*.jsonl, or an id on the hub.

    Args:
        path: Also files of a hub data set: hf://datasets/OWNER/NAME/FOLDER/*.parquet.
        split: Of a folder or a hub data set; a file is one split. A part of it is written as `datasets` does:
            train[:1000], train[10%:20%].

    Raises:
        DataError: nothing is there, or what is there is no data set, or it lacks `split`.
        MachineError: the hub cannot be reached.
    """
    if path.startswith(paths.URL):
        return _files_of_url(path)
    local = paths.expanded(assets.asset(path))
    split_name, bracket, _ = split.partition("[")
    files = _files_of_split(local, split_name) if os.path.isdir(local) else paths.matching(local)  # noqa: PTH112 (no error for a name too long)
    if files:
        source = _local(local, files)
        return _part(source, split_name, split) if bracket else source
    if paths.local(path) is None:
        return _loaded(path, path, name, split=split)
    siblings = [item.name for item in local.parent.iterdir()] if local.parent.is_dir() else []
    hint = did_you_mean(local.name, siblings)
    raise DataError(f"there is no file or folder {str(local)!r}", fix=hint or "Correct the path.")


def check_stream(place: str, files: Sequence[Path]) -> None:
    """Check that the rows of a data set can be read from any of them on, without those before it.

    Raises:
        DataError: they are on the hub, or in a file that is read from its beginning alone.
    """
    if not files:
        problem = f"{place!r} is on the hub, and a stream reads files here"
        fix = (
            f"Download them, `hf download --repo-type dataset --local-dir FOLDER OWNER/NAME`, and "
            f"give {Option('data', 'FOLDER')}."
        )
        raise DataError(problem, where="train_dataloader.dataset.streaming", fix=fix)
    for file in files:
        if not readers.can_seek(file):
            problem = f"{file.name!r} cannot be streamed: a run that goes on would read it from its beginning"
            packed = file.suffix.lower() in PACKED
            fix = "Unpack it" if packed else "Save its rows as .jsonl or .parquet"
            without_stream = Key("train_dataloader.dataset.streaming", False)
            raise DataError(problem, where=file, fix=f"{fix}, or prepare it whole: {without_stream}.")


def _local(place: Path, files: list[Path]) -> Source:
    for file in files:
        if readers.kind(file) is None:
            raise DataError(f"{file.name!r} has an unsupported file type", where=file, fix=readers.SUPPORTED)
    return Source(str(place), partial(_digest_of_all, files), partial(_rows_of_all, place, files), tuple(files))


def _part(source: Source, split: str, part_spec: str) -> Source:
    """Return the source of a part of a split, `part_spec` = 'train[:10%]'."""
    from datasets import ReadInstruction  # 1 s; of no use to whole splits

    try:
        part = ReadInstruction.from_spec(part_spec)
    except (AssertionError, ValueError) as error:
        fix = "Write it as `datasets` does: train[:1000], train[10%:20%]."
        raise DataError(f"split = {part_spec!r} is not a part of a split", where=source.place, fix=fix) from error

    def rows(on_error: OnError = fail, at: Cursor | None = None) -> Iterator[PlacedRow]:
        if at is not None:
            fix = "Write the rows into a file of their own, or stream the whole file."
            raise DataError(f"{part_spec!r} is a part of a split, which is not streamed", where=source.place, fix=fix)
        num_rows = sum(1 for _ in source.read(lambda _: None))
        try:
            spans = [(span.from_, span.to) for span in part.to_absolute({split: num_rows})]
        except ValueError as error:
            raise DataError(f"{part_spec!r}: {error}", where=source.place, fix=f"It has {num_rows} rows.") from error
        if not any(start < end for start, end in spans):
            raise DataError(f"{part_spec!r} has no rows", where=source.place, fix=f"It has {num_rows} rows.")
        for start, end in spans:
            yield from islice(source.read(on_error), start, end)

    return Source(source.place, lambda: sha256(f"{source.fingerprint()}{part_spec}".encode()), rows, source.files)


def _digest_of_all(files: list[Path]) -> str:
    return sha256("".join(f"{_digest(file)}{readers.kind(file)}" for file in files).encode())


def _digest(file: Path) -> str:
    try:
        return sha256(file)
    except OSError as error:
        problem = f"the file cannot be read: {error.strerror}"
        raise DataError(problem, where=file, fix="Correct the path or the file's permissions.") from error


def _rows_of_all(
    place: Path, files: list[Path], on_error: OnError = fail, at: Cursor | None = None
) -> Iterator[PlacedRow]:
    is_empty = not (at and (at.file or at.row))

    def tell(error: DataError) -> None:
        nonlocal is_empty
        is_empty = False
        on_error(error)

    for number in range(at.file if at else 0, len(files)):
        for row in readers.rows_of_file(files[number], tell, at):
            is_empty = False
            yield row
        if at:
            at.file, at.row, at.offset = number + 1, 0, 0
    if is_empty:
        raise DataError("it has no rows", where=place, fix="Give a file with at least one row.")


def _saved_files(folder: Path, split: str) -> list[Path] | None:
    """Return the files of a folder that `save_to_disk` of `datasets` wrote, or None for another folder.

    Its own list decides: a `map` after `load_from_disk` leaves cache-*.arrow beside the rows. A data set that was
    saved alone is the training's, whatever split it was cut from.
    """
    about = folder / "dataset_dict.json"
    splits = _list_at("splits", _saved_json(about), about)
    if splits is not None:
        names = [_plain_name(about, name) for name in splits]
        if split not in names:
            raise _no_split(folder, split, names)
        folder /= split
    about = folder / "state.json"
    state = _saved_json(about)
    files = _list_at("_data_files", state, about)
    if files is None:
        return None
    saved_from = str(state.get("_split") or "train")
    if splits is None and split not in ("train", saved_from):
        raise _no_split(folder, split, [saved_from])
    return [folder / _plain_name(about, file.get("filename") if isinstance(file, dict) else file) for file in files]


def _list_at(key: str, values: Mapping[str, Any], about: Path) -> list[Any] | None:
    value = values.get(key)
    if value is not None and not isinstance(value, list):
        raise _malformed(about, f"{key} = {brief_repr(value)} is not a list")
    return value


def _saved_json(about: Path) -> dict[str, Any]:
    """Return the object in a file of `save_to_disk`; an empty one without the file."""
    if not about.is_file():
        return {}
    text = read_named_text(about, DataError, max_bytes=_MAX_ABOUT_BYTES, fix=_SAVE_AGAIN, name=str(about))
    try:
        saved = load_json(text)
    except ValueError as error:
        raise _malformed(about, f"not valid JSON: {error}") from None
    return saved if isinstance(saved, dict) else {}


def _plain_name(about: Path, name: object) -> str:
    """Return a file or folder beside `about`: a list that came with the data must not lead elsewhere."""
    if not isinstance(name, str) or name in ("", ".", "..") or set(name) & {"/", "\\", "\0"}:
        raise _malformed(about, f"{brief_repr(name)} is not the name of a file in this folder")
    return name


def _malformed(about: Path, problem: str) -> DataError:
    return DataError(problem, where=about, fix=_SAVE_AGAIN)


def _no_split(folder: Path, split: str, splits: Iterable[str]) -> DataError:
    problem = f"the folder has no split {split!r}, only {', '.join(sorted(splits))}"
    return DataError(problem, where=folder, fix="Set split to one of them.")


def _files_of_split(folder: Path, split: str) -> list[Path]:
    """Return the files of `split`, told from file and folder names by the rules of `datasets`."""
    if (saved := _saved_files(folder, split)) is not None:
        return saved
    from datasets.data_files import DataFilesDict, get_data_patterns  # 1 s; of no use to files
    from datasets.exceptions import DatasetsError

    try:
        patterns = DataFilesDict.from_patterns(get_data_patterns(str(folder)), base_path=str(folder))
    except (DatasetsError, FileNotFoundError):
        patterns = {}
    splits = {str(key): files for key, names in patterns.items() if (files := _data_files(names))}
    if not splits:
        raise DataError("the folder has no data files", where=folder, fix=readers.SUPPORTED)
    if split not in splits:
        raise _no_split(folder, split, splits)
    return splits[split]


def _data_files(names: Iterable[str]) -> list[Path]:
    files = (Path(name) for name in names)
    return sorted(file for file in files if readers.kind(file) and file.name not in _ABOUT)


def _files_of_url(url: str) -> Source:
    """Return the rows of files on the hub or elsewhere: hf://datasets/OWNER/NAME/FOLDER/*.parquet."""
    kind = readers.kind(Path(url))
    if kind is None:
        raise DataError(f"the files of {url!r} have an unsupported file type", fix=readers.SUPPORTED)
    return _loaded(url, _BUILDERS.get(kind, kind.lstrip(".")), data_files=url, split="train")


def _loaded(place: str, *names: str | None, **settings: str) -> Source:
    import datasets  # 1 s; of no use to files
    from datasets.exceptions import DatasetNotFoundError, DatasetsError
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

    try:
        with shown(f"loading {place}"):
            dataset = datasets.load_dataset(*names, **settings)
    except (ConnectionError, httpx.TransportError) as error:
        problem = f"{place!r} is not a local file or folder, and the Hugging Face hub cannot be reached to look for it"
        raise MachineError(
            problem, fix=f"Connect to the network, or give a local file with {Option('data')}."
        ) from error
    except DatasetNotFoundError as error:
        problem = (
            f"{place!r} is not a local file or folder, nor a data set on the Hugging Face hub that you have access to"
        )
        raise DataError(problem, fix="Correct the path, or log in with `hf auth login`.") from error
    except (ValueError, DatasetsError, FileNotFoundError, HfHubHTTPError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise DataError(f"data set {place!r} cannot be read: {reason}", fix="Correct path, name or split.") from error
    except RuntimeError as error:
        if "scripts are no longer supported" not in str(error):
            raise
        problem = f"data set {place!r} is a loading script, which `datasets` no longer runs"
        raise DataError(problem, fix=f"Give its files instead: hf://datasets/{place}/FOLDER/*.json.") from error
    return Source(place, lambda: fingerprint_of(dataset), lambda *_: _stored(place, dataset))


def _stored(place: str, dataset: Any) -> Iterator[PlacedRow]:
    """Yield the rows of a Dataset as files store them: images as their bytes, and no key that a row did not have."""
    from tuner.data.readers import tables  # pyarrow, which `datasets` has loaded

    numbers = count(1)
    for table in dataset.with_format("arrow").iter(_ROWS_AT_ONCE):
        yield from ((f"{place}, row {next(numbers)}", row) for row in tables.rows_of(table))


def file_of_rows(rows: Any, argument: str, folder: Path) -> Path | None:
    """Return the file that holds these rows, written if it is not there; None if they are no rows: a path, a name.

    The file is named by its content: a later run with the same rows, and a run that resumes, finds it. No row is
    changed.

    Args:
        rows: A list of dicts, a Dataset of `datasets`, or a DataFrame of pandas.
        argument: What messages call them.

    Raises:
        DataError: there are no rows, or one holds a value that JSON has no form for and that is not an image.
        DiskError: the file cannot be written.
    """
    if isinstance(rows, str | os.PathLike | None):
        return None
    if _is_of("datasets", "Dataset", rows):
        return _kept_table(rows, argument, folder)
    if _is_of("pandas", "DataFrame", rows):
        if rows.empty:
            raise _no_rows(argument)
        # Its own writer: a missing value becomes null, a date ISO 8601.
        text = rows.to_json(orient="records", lines=True, force_ascii=False, date_format="iso", double_precision=15)
        return _kept_text(_without_nulls(text) if _is_from_arrow(rows) else text, folder)
    if _is_of("datasets", "DatasetDict", rows) or _is_of("datasets", "IterableDatasetDict", rows):
        names = ", ".join(map(repr, rows))
        raise DataError(f"{argument} is a DatasetDict of {names}", fix=f"Pass one of them: {argument}=rows['train'].")
    if _is_of("datasets", "IterableDataset", rows):
        fix = f"Save it as files and pass their folder, or make a Dataset of it: Dataset.from_list(list({argument}))."
        raise DataError(f"{argument} is an IterableDataset, which has no end that is known", fix=fix)
    if not isinstance(rows, list | tuple) or (rows and all(isinstance(row, str | os.PathLike) for row in rows)):
        return None
    return _kept_text("".join(_lines(rows, argument)), folder)


def _is_of(module: str, name: str, value: object) -> bool:
    """Return whether a value is of a library's class; a library that is not imported has no values."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name))


def _is_from_arrow(frame: Any) -> bool:
    """Return whether pandas has read a DataFrame from Arrow or Parquet: lists are arrays of numpy then."""
    numpy = sys.modules["numpy"]  # pandas has loaded it
    return any(
        hasattr(frame[name].dtype, "pyarrow_dtype") or isinstance(value, numpy.ndarray)
        for name in frame.columns
        for value in frame[name].head(_ROWS_AT_ONCE)
    )


def _without_nulls(text: str) -> str:
    """Return rows of JSON lines without the null keys of their objects, which Arrow gives each row; columns stay."""

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without(inner) for key, inner in value.items() if inner is not None}
        return [without(inner) for inner in value] if isinstance(value, list) else value

    rows = (json.loads(line) for line in text.split("\n") if line)
    bare = ({name: without(value) for name, value in row.items()} for row in rows)
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in bare)


def _no_rows(argument: str) -> DataError:
    return DataError(f"{argument} has no rows", fix='Give rows such as {"messages": [...]}, or a path.')


def _lines(rows: Sequence[Any], argument: str) -> list[str]:
    if not rows:
        raise _no_rows(argument)
    lines = []
    for number, row in enumerate(rows):
        where = f"{argument}[{number}]"
        if not isinstance(row, Mapping):
            raise DataError(f"{brief_repr(row)} is not a dict", where=where, fix="Give a dict for each row.")
        try:
            lines.append(json.dumps(dict(row), ensure_ascii=False, allow_nan=False, default=data_uri) + "\n")
        except (TypeError, ValueError, RecursionError, OSError) as error:
            problem = f"JSON has no form for this row: {error}"
            fix = "Use strings, numbers, lists, dicts and images of PIL."
            raise DataError(problem, where=where, fix=fix) from error
    return lines


def _kept_text(text: str, folder: Path) -> Path:
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        problem = f"a row holds half a character: {text[error.start]!r}"
        raise DataError(problem, fix="Remove lone surrogates from the texts.") from error
    path = folder / f"{sha256(content)[:_HASH_DIGITS]}.jsonl"
    if not (path.is_file() and path.stat().st_size == len(content) and sha256(path) == sha256(content)):
        make_folder(folder)
        write_text(path, text)
    return path


def _kept_table(rows: Any, argument: str, folder: Path) -> Path:
    """Write a Dataset as Parquet, which keeps its types; its size may be that of the disk, so it goes there first."""
    if not len(rows):
        raise _no_rows(argument)
    make_folder(folder)
    with disk_errors(folder, _CACHE_FIX), scratch_folder(folder, ".making-") as scratch:
        file = scratch / "rows.parquet"
        rows.to_parquet(str(file))
        path = folder / f"{sha256(file)[:_HASH_DIGITS]}.parquet"
        file.replace(path)
    return path
