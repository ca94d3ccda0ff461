"""From a recipe's `dataset` block and a tokenizer to the rows that the trainer takes, kept in a cache by content.

It does not set up the trainer, and it prints nothing.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.compute as pc

from tuner.data import changes, formats, limits, masks, mixture, packing, preferences
from tuner.data.changes import Total
from tuner.data.reading import Encoder, Labelled, Tally, formats_of, samples
from tuner.errors import DataError
from tuner.files import disk_errors, make_folder, sha256, write_json
from tuner.recipes.schema import Dataset

_BATCH_ROWS = 512
_MAX_REASONS = 10
_ROWS_FILE, _COUNTS_FILE, _CHANGES_FILE = "rows.arrow", "counts.json", "changes.jsonl"


@dataclass(frozen=True)
class SetCounts:
    """What was read of one data set of a mixture, or of the only one."""

    place: str
    format: str
    detected: bool
    read: int


@dataclass(frozen=True)
class Counts:
    """What became of the rows. `tokens` are those that are left; `trained_tokens` those of them that carry loss.

    `read` counts rows; `kept`, `dropped`, `truncated` and `split` count samples: to kto a row with two answers is two.
    `packed_rows` are the rows of the result: as many as samples when not packing. `bad` rows were left out.
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
    bad: int = 0
    split: int = 0

    @property
    def efficiency(self) -> float:
        """The part, 0 to 1, of `packed_rows` rows of `max_length` tokens that holds tokens."""
        return self.tokens / (self.packed_rows * self.max_length)


@dataclass(frozen=True)
class Prepared:
    """Rows for the trainer of an objective, and how they came about.

    Columns: `input_ids`, `labels` and `seq_lengths` (the lengths of the samples in the row), or those of `preferences`.
    """

    dataset: datasets.Dataset
    counts: Counts
    sets: tuple[SetCounts, ...]
    objective: str
    sha256: str
    """Of the rows' values, in their order."""
    totals: tuple[Total, ...]
    """How many samples are bad, dropped, truncated, split or changed, by reason."""
    changes_file: Path
    """Those samples, one a line, as `changes` writes them."""

    def facts(self) -> dict[str, Any]:
        """Return the counts, by reason too, as plain values."""
        return {"counts": asdict(self.counts), "changes": [asdict(total) for total in self.totals]}

    def changed(self) -> Iterator[dict[str, Any]]:
        """Yield where, what, reason, tokens_before and tokens_after of each of them, `MAX_LISTED` of a reason."""
        return changes.read(self.changes_file)


def prepare(
    dataset: Dataset,
    tokenizer: Any,
    *,
    objective: str = "sft",
    base: Path | None = None,
    tick: Callable[[], None] = lambda: None,
) -> Prepared:
    """Read, tokenize, mask, and pack or cut a data set; the same input gives the same rows everywhere.

    Args:
        dataset: The recipe's block; `max_length` counts tokens.
        tokenizer: With the chat template that the run uses.
        objective: Decides what kind of rows there may be, and which tokens carry loss.
        base: The folder that a relative path starts from.
        tick: Called now and then while rows are made.

    Raises:
        DataError: the data set, a row, or the chat template is wrong, or no row is left to train on.
        MachineError: the hub cannot be reached.
        DiskError: the cache cannot be written.
    """
    opened = mixture.open(dataset, base)
    cache = Path(datasets.config.HF_DATASETS_CACHE) / "tuner"
    folder = cache / _key(opened, dataset, tokenizer, objective)
    with disk_errors(cache, "Set HF_HOME to a folder that you may write and that has room."):
        if not (folder / _COUNTS_FILE).is_file():
            make_folder(cache)
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                _build(Path(scratch), opened, dataset, tokenizer, objective, tick)
                _move(Path(scratch) / "done", folder)
    return _load(folder, objective)


def describe(prepared: Prepared, name: str = "train") -> str:
    """Return what was read and what it became: one line, and one more for each data set of a mixture and each reason.

    A reason is why samples are not trained on as they are.
    """
    counts, sets = prepared.counts, prepared.sets
    told = _told(sets[0]) if len(sets) == 1 else f"{counts.read:,} rows of {len(sets)} data sets"
    head = (
        f"{name}: {told} -> {_shape(prepared)}, "
        f"{counts.trained_tokens:,} of {counts.tokens:,} tokens trained, "
        f"{counts.truncated:,} truncated, {f'{counts.split:,} split, ' if counts.split else ''}"
        f"{counts.dropped:,} dropped"
        f"{f', {counts.bad:,} bad rows left out' if counts.bad else ''}"
    )
    parts = [f"  {one.place}: {_told(one)}" for one in sets if len(sets) > 1]
    reasons = [f"  {total}" for total in prepared.totals[:_MAX_REASONS]]
    more = len(prepared.totals) - _MAX_REASONS
    return "\n".join([head, *parts, *reasons, *([f"  and {more:,} more reasons"] if more > 0 else [])])


def _told(one: SetCounts) -> str:
    return f"{one.read:,} rows of format {one.format!r}{' (detected)' if one.detected else ''}"


def _shape(prepared: Prepared) -> str:
    counts = prepared.counts
    if prepared.objective in preferences.LAYOUTS:
        noun = preferences.LAYOUTS[prepared.objective].noun
        return f"{counts.kept:,} {noun} of at most {counts.max_length:,} tokens (packing does not apply)"
    if counts.packing:
        return f"{counts.packed_rows:,} packed rows of {counts.max_length:,} tokens, {counts.efficiency:.1%} full"
    return f"{counts.packed_rows:,} samples of at most {counts.max_length:,} tokens"


def _key(opened: mixture.Opened, dataset: Dataset, tokenizer: Any, objective: str) -> str:
    """Return what the result depends on, hashed: content, settings, tokenizer, code."""
    parts = [
        opened.fingerprint(),
        [dataset.max_length, dataset.packing, dataset.bad_rows, dataset.thinking, objective],
        [_code_of_user(one.format) for one in opened.sets],
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


def _load(folder: Path, objective: str) -> Prepared:
    facts = json.loads((folder / _COUNTS_FILE).read_text(encoding="utf-8"))
    sets = tuple(SetCounts(**one) for one in facts["sets"])
    rows = datasets.Dataset.from_file(str(folder / _ROWS_FILE))
    totals = tuple(Total(**one) for one in facts["changes"])
    counts = Counts(**facts["counts"])
    return Prepared(rows, counts, sets, objective, facts["sha256"], totals, folder / _CHANGES_FILE)


def _build(
    scratch: Path,
    opened: mixture.Opened,
    dataset: Dataset,
    tokenizer: Any,
    objective: str,
    tick: Callable[[], None],
) -> None:
    done = scratch / "done"
    done.mkdir()
    names = formats_of(opened, objective)
    with (done / _CHANGES_FILE).open("w", encoding="utf-8") as listed:
        tally = Tally.of(opened, dataset.bad_rows, listed)
        batches = _batches(samples(opened, names, objective, tally), tick)
        encoder = Encoder(tokenizer, objective == "pretrain", dataset.thinking)
        if layout := preferences.LAYOUTS.get(objective):
            judged = preferences.encoded(layout, batches, encoder, dataset.max_length, tally)
            rows = preferences.write_rows(done / _ROWS_FILE, judged, layout)
        else:
            rows = _write_packed(scratch, batches, encoder, dataset, tally)
    if opened.holdout and not sum(tally.read):
        whose = "validation" if dataset.held_out else "training"
        what = f"val_split = {dataset.val_split:g} leaves {whose} no row"
        raise DataError(what, where=opened.place, fix="Take another part, or name validation data: --val FILE.")
    if not tally.kept:
        what = f"none of the {sum(tally.read)} rows has a token to train on within max_length={dataset.max_length}"
        reasons = "; ".join(map(str, tally.changes.totals()[:_MAX_REASONS]))
        raise DataError(f"{what}: {reasons}", where=opened.place, fix="Raise dataset.max_length, or check the rows.")
    told = [
        SetCounts(one.place, name, one.format is None, read)
        for one, name, read in zip(opened.sets, names, tally.read, strict=True)
    ]
    facts = {
        "sets": [asdict(one) for one in told],
        "counts": asdict(_counts(tally, len(rows), dataset, objective)),
        "sha256": _sha256_of(rows),
        "changes": [asdict(total) for total in tally.changes.totals()],
    }
    write_json(done / _COUNTS_FILE, facts)


def _sha256_of(rows: datasets.Dataset) -> str:
    """Return a hash of the values alone: libraries of other versions write the same rows into other files."""
    hashes = {name: hashlib.sha256() for name in rows.column_names}
    for table in rows.with_format("arrow").iter(_BATCH_ROWS):
        for name, column in zip(table.column_names, table.columns, strict=True):
            is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
            parts = (pc.list_value_length(column), pc.list_flatten(column)) if is_list else (column,)
            for part in parts:
                hashes[name].update(part.to_numpy().tobytes())
    return hashlib.sha256(json.dumps({name: one.hexdigest() for name, one in hashes.items()}).encode()).hexdigest()


def _batches(stream: Iterator[Any], tick: Callable[[], None]) -> Iterator[list[Any]]:
    for batch in limits.batches(stream, _BATCH_ROWS):
        tick()
        yield batch


def _counts(tally: Tally, num_rows: int, dataset: Dataset, objective: str) -> Counts:
    return Counts(
        read=sum(tally.read),
        kept=tally.kept,
        dropped=tally.dropped,
        truncated=tally.truncated,
        tokens=tally.tokens,
        trained_tokens=tally.trained_tokens,
        truncated_tokens=tally.truncated_tokens,
        packed_rows=num_rows,
        max_length=dataset.max_length,
        packing=dataset.packing and objective not in preferences.LAYOUTS,
        bad=len(tally.bad),
        split=tally.split,
    )


def _write_packed(
    scratch: Path, batches: Iterable[Any], encoder: Encoder, dataset: Dataset, tally: Tally
) -> datasets.Dataset:
    folder = scratch if dataset.packing else scratch / "done"
    good = (encoder.encode_good(batch, lambda sample: [sample], tally) for batch in batches)
    fitting = (_fitting([place for place, _ in placed], encoded, dataset, tally) for placed, encoded in good)
    rows = packing.write_rows(folder / _ROWS_FILE, fitting)
    if not (dataset.packing and tally.kept):
        return rows
    return packing.pack(rows, dataset.max_length, scratch / "done" / _ROWS_FILE)


def _fitting(places: Iterable[str], encoded: Iterable[Labelled], dataset: Dataset, tally: Tally) -> list[Labelled]:
    """Return the samples that have something to train on, cut to `max_length` unless they will be packed."""
    fitting = []
    for place, (ids, labels) in zip(places, encoded, strict=True):
        length = len(ids) if dataset.packing else dataset.max_length
        cut = ids[:length], packing.ignore_starts(labels[:length], dataset.max_length)
        if reason := masks.untrained((ids, labels), cut, dataset.max_length):
            tally.drop(place, reason, [(ids, labels)])
        else:
            tally.keep(place, [(ids, labels)], [cut], dataset.max_length)
            fitting.append(cut)
    return fitting
