"""From a recipe's `dataset` block and a tokenizer to the rows that the trainer takes, kept in a cache by content.

It does not set up the trainer, and it prints nothing.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import datasets

from tuner.errors import DataError
from tuner.files import disk_errors, sha256, write_json
from tuner.worker.data import formats, masks, packing, rows

_DETECT_ROWS = 8
_BATCH_ROWS = 512
_ROWS_FILE, _COUNTS_FILE = "rows.arrow", "counts.json"


class DatasetSettings(Protocol):
    """A recipe's `train_dataloader.dataset` block. `max_length` counts tokens."""

    @property
    def path(self) -> str: ...
    @property
    def name(self) -> str | None: ...
    @property
    def split(self) -> str: ...
    @property
    def format(self) -> str | None: ...
    @property
    def max_length(self) -> int: ...
    @property
    def packing(self) -> bool: ...


@dataclass(frozen=True)
class Counts:
    """What became of the rows. `tokens` are those that are left; `trained_tokens` those of them that carry loss.

    `packed_rows` are the rows of the result: as many as samples when not packing.
    """

    read: int
    kept: int
    dropped: int
    truncated: int
    tokens: int
    trained_tokens: int
    truncated_tokens: int
    packed_rows: int
    max_length: int
    packing: bool

    @property
    def efficiency(self) -> float:
        """The part, 0 to 1, of `packed_rows` rows of `max_length` tokens that holds tokens."""
        return self.tokens / (self.packed_rows * self.max_length)


@dataclass(frozen=True)
class Prepared:
    """Rows with columns `input_ids`, `labels` and `seq_lengths` (the lengths of the samples in the row)."""

    dataset: datasets.Dataset
    counts: Counts
    format: str
    detected: bool


def prepare(dataset: DatasetSettings, tokenizer: Any, *, objective: str = "sft", base: Path | None = None) -> Prepared:
    """Read, tokenize, mask, and pack or cut a data set; the same input gives the same rows everywhere.

    Args:
        objective: 'pretrain' puts loss on every token, anything else on the assistant's turns.
        base: The folder that a relative `dataset.path` starts from.

    Raises:
        DataError: the data set, a row, or the chat template is wrong, or no row is left to train on.
        MachineError: the hub cannot be reached.
        DiskError: the cache cannot be written.
    """
    source = rows.find(dataset.path, dataset.name, dataset.split, base)
    cache = Path(datasets.config.HF_DATASETS_CACHE) / "tuner"
    folder = cache / _key(source, dataset, tokenizer, objective)
    if not (folder / _COUNTS_FILE).is_file():
        with disk_errors(cache, "Free space, or set HF_HOME to a folder that has some."):
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                _build(Path(scratch), source, dataset, tokenizer, objective)
                _move(Path(scratch) / "done", folder)
    return _load(folder, dataset)


def describe(prepared: Prepared, name: str = "train") -> str:
    """Return one line that says what was read and what it became."""
    counts = prepared.counts
    told = " (detected)" if prepared.detected else ""
    shape = (
        f"{counts.packed_rows:,} packed rows of {counts.max_length:,} tokens, {counts.efficiency:.1%} full"
        if counts.packing
        else f"{counts.packed_rows:,} samples of at most {counts.max_length:,} tokens"
    )
    return (
        f"{name}: {counts.read:,} rows of format {prepared.format!r}{told} -> {shape}, "
        f"{counts.trained_tokens:,} of {counts.tokens:,} tokens trained, "
        f"{counts.truncated:,} truncated, {counts.dropped:,} dropped"
    )


def _key(source: rows.Source, dataset: DatasetSettings, tokenizer: Any, objective: str) -> str:
    """Return what the result depends on, hashed: content, settings, tokenizer, code."""
    parts = [
        source.fingerprint,
        [dataset.format, dataset.max_length, dataset.packing, objective],
        _code_of_user(dataset.format),
        tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(tokenizer),
        [tokenizer.chat_template, tokenizer.special_tokens_map],
        [sha256(file) for file in sorted(Path(__file__).parent.glob("*.py"))],
        [version(library) for library in ("transformers", "tokenizers", "trl", "datasets", "pyarrow")],
    ]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:32]


def _code_of_user(name: str | None) -> str | None:
    """Return the hash of the file that holds a user's row function: changed code means other rows."""
    if name is None or ":" not in name:
        return None
    file = inspect.getsourcefile(formats.user_function(name))
    return sha256(Path(file)) if file else None


def _move(done: Path, folder: Path) -> None:
    try:
        done.replace(folder)
    except OSError:
        # Another process has written the same rows meanwhile.
        if not (folder / _COUNTS_FILE).is_file():
            raise


def _load(folder: Path, dataset: DatasetSettings) -> Prepared:
    facts = json.loads((folder / _COUNTS_FILE).read_text(encoding="utf-8"))
    prepared = datasets.Dataset.from_file(str(folder / _ROWS_FILE))
    return Prepared(prepared, Counts(**facts["counts"]), facts["format"], dataset.format is None)


@dataclass
class _Tally:
    """Counts while rows go by."""

    read: int = 0
    kept: int = 0
    dropped: int = 0
    truncated: int = 0
    truncated_tokens: int = 0
    format: str = field(default="")


def _build(scratch: Path, source: rows.Source, dataset: DatasetSettings, tokenizer: Any, objective: str) -> None:
    done = scratch / "done"
    done.mkdir()
    tally = _Tally()
    batches = _batches(tally, source, dataset, tokenizer, objective)
    samples = packing.write_rows((scratch if dataset.packing else done) / _ROWS_FILE, batches)
    if not tally.kept:
        what = f"none of the {tally.read} rows has a token to train on within max_length={dataset.max_length}"
        raise DataError(what, where=source.place, fix="Raise dataset.max_length, or check the rows.")
    final = packing.pack(samples, dataset.max_length, done / _ROWS_FILE) if dataset.packing else samples
    write_json(done / _COUNTS_FILE, {"format": tally.format, "counts": asdict(_counts(tally, final, dataset))})


def _counts(tally: _Tally, final: datasets.Dataset, dataset: DatasetSettings) -> Counts:
    return Counts(
        read=tally.read,
        kept=tally.kept,
        dropped=tally.dropped,
        truncated=tally.truncated,
        tokens=packing.num_tokens(final),
        trained_tokens=packing.num_trained_tokens(final),
        truncated_tokens=tally.truncated_tokens,
        packed_rows=len(final),
        max_length=dataset.max_length,
        packing=dataset.packing,
    )


_Pairs = list[tuple[masks.Tokens, masks.Tokens]]


def _batches(
    tally: _Tally, source: rows.Source, dataset: DatasetSettings, tokenizer: Any, objective: str
) -> Iterator[_Pairs]:
    stream = source.read()
    head = list(itertools.islice(stream, _DETECT_ROWS))
    tally.format = dataset.format or formats.detect([row for _, row in head], source.place)
    samples: Iterator[tuple[str, formats.Sample]]
    samples = ((place, formats.read(tally.format, row, place)) for place, row in itertools.chain(head, stream))
    first = next(samples)
    template = None if isinstance(first[1], str) else masks.choose_template(tokenizer)
    samples = _alike(itertools.chain([first], samples), type(first[1]))
    while batch := list(itertools.islice(samples, _BATCH_ROWS)):
        pairs = masks.encode(template, tokenizer, batch, train_all=objective == "pretrain")
        tally.read += len(pairs)
        yield list(_fitting(tally, pairs, dataset))


def _alike(samples: Iterable[tuple[str, formats.Sample]], kind: type) -> Iterator[tuple[str, formats.Sample]]:
    for place, sample in samples:
        if not isinstance(sample, kind):
            what = "texts and conversations are mixed in one data set"
            raise DataError(what, where=place, fix="Return one kind from the function that dataset.format names.")
        yield place, sample


def _fitting(tally: _Tally, pairs: Iterable[tuple[masks.Tokens, masks.Tokens]], dataset: DatasetSettings) -> _Pairs:
    """Return the samples that have something to train on, cut to `max_length` unless they will be packed."""
    fitting = []
    for ids, labels in pairs:
        length = len(ids) if dataset.packing else dataset.max_length
        labels = packing.ignore_starts(labels[:length], dataset.max_length)
        if not (labels != masks.IGNORED).any():
            tally.dropped += 1
            continue
        tally.kept += 1
        tally.truncated += len(ids) > length
        tally.truncated_tokens += max(0, len(ids) - length)
        fitting.append((ids[:length], labels))
    return fitting
