"""Rows that a program holds (dicts, a Dataset, a DataFrame), written once as a file that is named by its content.

The same rows are the same file, so a later run, and a run that resumes, finds them; no row is changed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tuner.errors import DataError, brief_repr
from tuner.files import disk_errors, make_folder, sha256, write_text

_DIGITS = 16
"""Of the hash, in a file's name."""
_FIX = "Set TUNER_CACHE to a writable folder with free space."


def file_of(rows: Any, argument: str, folder: Path) -> Path | None:
    """Return the file that holds these rows, written if it is not there; None if they are no rows: a path, a name.

    Args:
        rows: A list of dicts, a Dataset of `datasets`, or a DataFrame of pandas.
        argument: What messages call them.
        folder: Where such files are kept.

    Raises:
        DataError: there are no rows, or one holds a value that JSON has no form for.
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
        return _kept_text(
            rows.to_json(orient="records", lines=True, force_ascii=False, date_format="iso", double_precision=15),
            folder,
        )
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
            lines.append(json.dumps(dict(row), ensure_ascii=False, allow_nan=False) + "\n")
        except (TypeError, ValueError, RecursionError) as error:
            problem = f"JSON has no form for this row: {error}"
            raise DataError(problem, where=where, fix="Use strings, numbers, lists and dicts.") from error
    return lines


def _kept_text(text: str, folder: Path) -> Path:
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        problem = f"a row holds half a character: {text[error.start]!r}"
        raise DataError(problem, fix="Remove lone surrogates from the texts.") from error
    path = folder / f"{sha256(content)[:_DIGITS]}.jsonl"
    if not _is_there(path, content):
        make_folder(folder)
        write_text(path, text)
    return path


def _is_there(path: Path, content: bytes) -> bool:
    return path.is_file() and path.stat().st_size == len(content) and sha256(path) == sha256(content)


def _kept_table(rows: Any, argument: str, folder: Path) -> Path:
    """Write a Dataset as Parquet, which keeps its types; its size may be that of the disk, so it goes there first."""
    if not len(rows):
        raise _no_rows(argument)
    make_folder(folder)
    scratch = folder / f".{os.urandom(4).hex()}.tmp"
    try:
        with disk_errors(folder, _FIX):
            rows.to_parquet(str(scratch))
            path = folder / f"{sha256(scratch)[:_DIGITS]}.parquet"
            scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
    return path
