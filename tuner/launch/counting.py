"""How many rows local files hold, counted in milliseconds and without the libraries that training reads them with.

What is a row here is one to `data.readers`; what takes longer, or other libraries, it leaves to the worker.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from tuner.errors import DataError
from tuner.launch.steps import Source
from tuner.recipes import paths
from tuner.recipes.schema import Dataset, RecipeConfig, Rows, Share

_MIB = 1024**2
_MAX_FIELD = 32 * _MIB
"""Characters; `csv` refuses more than 128 KiB unasked."""
_HEAD = 8
_OTHER_SEPARATOR = re.compile(r"[;\t|]")
"""In the only name of a header it is no part of the name, but what stands between columns."""


def sources(config: RecipeConfig) -> tuple[Source, ...]:
    """Return the training data set, or those of the mixture, as far as it can be counted here."""
    dataset = config.train_dataloader.dataset
    shares: tuple[Rows, ...] = dataset.mixture or (dataset,)
    is_kto = config.objective.type == "kto"
    return tuple(
        replace(
            _less_held_out(_counted(share), number, dataset),
            weight=share.weight if isinstance(share, Share) else 1.0,
            samples_a_row=_answers_a_row(share) if is_kto else 1,
        )
        for number, share in enumerate(shares)
    )


def _less_held_out(counted: Source, number: int, dataset: Dataset) -> Source:
    """Return the rows that are left where some are held out; which of a mixture's those are, reading alone tells."""
    if dataset.val_split is None or counted.rows is None:
        return counted
    if dataset.mixture:
        return Source(None, "some rows of a mixture are held out")
    from tuner.data.holdout import Holdout  # of no use to a run that holds nothing out

    rows = min(counted.rows, dataset.max_rows or counted.rows)
    return Source(Holdout(dataset.val_split, dataset.val_seed or 0, taken=False).count(number, rows))


def _counted(rows: Rows) -> Source:
    found = _files(rows)
    if isinstance(found, str):
        return Source(None, found)
    try:
        return Source(sum(1 for _ in _raw_rows(found)))
    except (OSError, ValueError, RecursionError, csv.Error):
        return Source(None, f"{rows.path} is not readable as it stands")


def _head(rows: Rows) -> list[dict[str, Any]] | None:
    """Return the first rows of a data set that is counted; None for others, and where one of them is no object."""
    found = _files(rows)
    if isinstance(found, str):
        return None
    try:
        told = [json.loads(raw) if isinstance(raw, str) else raw for raw in islice(_raw_rows(found), _HEAD)]
    except (OSError, ValueError, RecursionError, csv.Error):
        return None
    return told if told and all(isinstance(row, dict) for row in told) else None


def _answers_a_row(rows: Rows) -> int | None:
    """Return how many judged answers a row holds: 2 of preference data, 1 of feedback; None where it is not known."""
    from tuner.data import formats  # of no use to objectives other than kto
    from tuner.data.sample import Pair

    name = rows.format
    if name is None and (told := _head(rows)):
        try:
            name = formats.detect(told, str(rows.path), columns=rows.columns, objective="kto")
        except DataError:
            return None
    # What a function of the user's makes of a row is seen in the ranks alone.
    known = formats.FORMATS.get(name or "")
    return None if known is None else 1 + (known.kind is Pair)


def _files(rows: Rows) -> list[Path] | str:
    """Return the files of a data set, or why they are not counted."""
    place = paths.local(rows.path) if rows.path else None
    if place is None:
        return f"{rows.path} is on the hub"
    files = paths.matching(place)
    if not all(file.is_file() for file in files):
        return f"{rows.path} is a folder"
    if other := next((file for file in files if file.suffix.lower() not in _READERS), None):
        return f"{other.name} is not plain text"
    most = min(_MAX_BYTES[file.suffix.lower()] for file in files)
    if sum(file.stat().st_size for file in files) > most:
        return f"{rows.path} is larger than {most // _MIB} MiB"
    return files


def _raw_rows(files: list[Path]) -> Iterator[Any]:
    """Yield each row: its line, or its values where they had to be read to tell rows apart."""
    return chain.from_iterable(_READERS[file.suffix.lower()](file) for file in files)


def _lines(file: Path) -> Iterator[str]:
    # Whatever is wrong with a line, it is a row; only \n ends one.
    with file.open(encoding="utf-8-sig", errors="replace", newline="\n") as stream:
        yield from (line for line in stream if line.rstrip())


def _json(file: Path) -> Iterator[Any]:
    text = file.read_text(encoding="utf-8-sig")
    return iter(json.loads(text)) if text.lstrip().startswith("[") else _lines(file)


def _csv(file: Path) -> Iterator[dict[str, str]]:
    csv.field_size_limit(_MAX_FIELD)
    with file.open(encoding="utf-8-sig", newline="\n") as stream:
        records = filter(None, csv.reader(stream, strict=True))
        header = next(records, [])
        names = [name for name in header if name]
        if len(set(names)) < len(names) or (len(header) == 1 and _OTHER_SEPARATOR.search(header[0])):
            raise csv.Error("training refuses the columns")
        yield from (dict(zip(header, record, strict=False)) for record in records)


_READERS: dict[str, Callable[[Path], Iterator[Any]]] = {
    ".jsonl": _lines,
    ".txt": _lines,
    ".json": _json,
    ".csv": _csv,
}
_MAX_BYTES = {".jsonl": 64 * _MIB, ".txt": 64 * _MIB, ".json": 16 * _MIB, ".csv": 16 * _MIB}
"""What takes about a tenth of a second."""
