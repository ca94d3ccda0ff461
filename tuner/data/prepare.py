"""From a recipe's `dataset` block and an encoder to the rows that the trainer takes, kept in a cache by content.

It does not set up the trainer, and it prints nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import logging
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tuner.data import encoding, formats, layouts, limits, packing, processes
from tuner.data.fast_tokens import Differs
from tuner.data.holdout import no_rows
from tuner.data.layouts import Layout
from tuner.data.outcomes import Tally, unread_text
from tuner.data.pipeline import NumberedRow, Pipeline
from tuner.data.prepared import COUNTS_FILE, KEYS_FILE, OUTCOMES_FILE, ROWS_FILE, Prepared, SetCounts, Written
from tuner.data.sample import NO_ANSWER
from tuner.data.text_encoder import TextEncoder
from tuner.errors import DataError
from tuner.files import disk_errors, make_folder, read_text, scratch_folder, sha256, write_json
from tuner.machine.libraries import version_of
from tuner.progress import shown
from tuner.recipes.schema import Dataset
from tuner.recipes.schema.objectives import facts_of
from tuner.runs import records
from tuner.runs.records import SplitData

_LOG = logging.getLogger(__name__)

_BATCH_ROWS = 512
_MAX_REASONS = 10
_IMAGES_FILE = "images.sha256"
DONE = "done"
"""The folder of `build` that `Prepared.load` reads."""


def prepare(
    dataset: Dataset,
    encoder: TextEncoder,
    *,
    objective: str,
    tick: Callable[[], None] = lambda: None,
    num_rows: int | None = None,
) -> Prepared:
    """Read, tokenize, mask, and pack or cut a data set; the same input gives the same rows everywhere.

    Args:
        dataset: The recipe's block; `max_length` counts tokens.
        objective: Decides what kind of rows there may be, and which tokens carry loss.
        num_rows: About how many rows there are, where that is known; shown beside those that are done.

    Raises:
        DataError: the data set, a row, or the chat template is wrong, or no row is left to train on.
        MachineError: the hub cannot be reached.
        DiskError: the cache cannot be written.
    """
    pipeline, cache = Pipeline(dataset, objective), _cache()
    uses_fastokens = dataset.tokenizer_backend == "auto" and trusts_fastokens(encoder)
    folder = cache / _key(pipeline, encoder, uses_fastokens=uses_fastokens)
    with disk_errors(cache, "Set HF_HOME to a writable folder with free space."):
        if _images_changed(folder):
            shutil.rmtree(folder, ignore_errors=True)
        if not (folder / COUNTS_FILE).is_file():
            make_folder(cache)
            try:
                _make(folder, pipeline, encoder, tick, num_rows, uses_fastokens=uses_fastokens)
            except Differs:
                _LOG.warning("fastokens gives other tokens than tokenizers for a row, so tokenizers encodes all rows.")
                _mark_of(encoder).touch()  # `trusts_fastokens` is False from now on
                return prepare(dataset, encoder, objective=objective, tick=tick, num_rows=num_rows)
    return Prepared.load(folder, objective)


def trusts_fastokens(encoder: TextEncoder) -> bool:
    """Return whether fastokens never gave other tokens than this encoder, so that the rows it encoded are valid."""
    return not _mark_of(encoder).exists()


def _mark_of(encoder: TextEncoder) -> Path:
    """Return the file that stands in the cache once fastokens has given other tokens than this encoder."""
    rules = hashlib.sha256(encoder.rules().encode()).hexdigest()[:32]
    return _cache() / f"fastokens-{version_of('fastokens')}-differs-{rules}"


def _cache() -> Path:
    return Path(datasets.config.HF_DATASETS_CACHE) / "tuner"


def _make(
    folder: Path,
    pipeline: Pipeline,
    encoder: TextEncoder,
    tick: Callable[[], None],
    num_rows: int | None,
    *,
    uses_fastokens: bool,
) -> None:
    with scratch_folder(folder.parent, "making-") as scratch, shown("tokenizing", "rows", num_rows) as progress:
        tally = build(
            scratch, pipeline, encoder, progress.counted(pipeline.rows()), tick, uses_fastokens=uses_fastokens
        )
        require_rows(pipeline, tally)
        done = scratch / DONE
        if encoder.image_id is not None:
            (done / _IMAGES_FILE).write_text(_state_of_images(done), encoding="utf-8")
        try:
            done.replace(folder)
        except OSError:
            # Another process has written the same rows meanwhile.
            if not (folder / COUNTS_FILE).is_file():
                raise


def build(
    scratch: Path,
    pipeline: Pipeline,
    encoder: TextEncoder,
    rows: Iterable[NumberedRow | DataError],
    tick: Callable[[], None],
    *,
    num_proc: int | Literal["auto"] | None = None,
    bad_before: int = 0,
    uses_fastokens: bool = False,
) -> Tally:
    """Make the trainer's rows of some rows of a pipeline, in the folder `DONE` of an empty one; return the counts.

    Args:
        rows: As `Pipeline.rows` yields them.
        num_proc: Processes that make tokens; None: as the data set says.
        bad_before: Bad rows that were left out already.
        uses_fastokens: It encodes many rows, where it can.

    Raises:
        DataError: more rows are bad than may be left out, or the chat template is wrong.
        Differs: fastokens gives other tokens than the encoder.
    """
    done = scratch / DONE
    done.mkdir()
    with (done / OUTCOMES_FILE).open("w", encoding="utf-8") as stream:
        tally = pipeline.tally(stream, bad_before)
        layout = layouts.of(pipeline.objective, encoder.image_id)
        work = _Work(pipeline, encoding.SampleEncoder.of(pipeline, encoder), layout, uses_fastokens)
        written = _write(scratch, work, tally, rows, tick, num_proc or pipeline.dataset.num_proc)
    tally.counts.packed_rows = len(written)
    sets = [
        SetCounts(data_set.place, name, data_set.format is None, tally.read_of_set[data_set.number])
        for data_set, name in zip(pipeline.mixture.sets, pipeline.formats, strict=True)
    ]
    changes = [*tally.copied(), *tally.totals()]
    written_counts = Written(
        sets=sets,
        data=SplitData(counts=tally.counts, changes=changes, unread=tally.unread()),
        sha256=_sha256_of(written),
        hints=list(pipeline.hints),
    )
    np.save(done / KEYS_FILE, np.array(tally.row_keys, dtype=np.int64).reshape(-1, 2))
    write_json(done / COUNTS_FILE, written_counts.to_json())
    return tally


def _write(
    scratch: Path,
    work: _Work,
    tally: Tally,
    rows: Iterable[NumberedRow | DataError],
    tick: Callable[[], None],
    num_proc: int | Literal["auto"],
) -> datasets.Dataset:
    layout, is_packed = work.layout, tally.counts.packing

    def tables() -> Generator[pa.RecordBatch, None, None]:
        refuse = partial(work.pipeline.refuse, on_error=tally.refuse)
        batches = limits.batches(rows, encoding.BATCH_ROWS)
        for table, part in processes.in_order(work, batches, num_proc):
            tally.add(part, refuse)
            tick()
            yield table

    done = scratch / DONE / ROWS_FILE
    with contextlib.closing(tables()) as batches:  # which ends its processes
        samples = layouts.write_rows(scratch / ROWS_FILE if is_packed else done, batches, layout)
    if not (is_packed and tally.counts.kept):
        return samples
    return packing.pack(samples, tally.counts.max_length, done, tally.counts.pack_length)


@dataclass
class _Work:
    """Turns a batch of rows as they were read into the trainer's rows and their tally, here or in a fork.

    With `loads_fast`, fastokens is loaded in the forks, and here after `processes.ALONE` batches: few rows are not
    worth it.
    """

    pipeline: Pipeline
    encoder: encoding.SampleEncoder
    layout: Layout
    loads_fast: bool
    num_batches: int = 0
    process: int = field(default_factory=os.getpid)

    def __call__(self, batch: Sequence[NumberedRow | DataError]) -> tuple[pa.RecordBatch, Tally]:
        self.num_batches += 1
        if self.loads_fast and (self.num_batches > processes.ALONE or os.getpid() != self.process):
            self.loads_fast, self.encoder.fast = False, self.encoder.encoder.fast_tokens()
        tally = self.pipeline.tally().part()  # it keeps the bad rows until it is added to the tally of all
        samples = self.pipeline.samples_of(_readable(batch, tally), tally, tally.refuse)
        rows = [
            row
            for batch_of_samples in limits.batches(samples, encoding.BATCH_ROWS)
            for encoded in self.encoder.encode(batch_of_samples, tally, tally.refuse)
            if (row := layouts.fit(self.layout, encoded, tally))
        ]
        return layouts.table(rows, self.layout), tally


def _readable(batch: Sequence[NumberedRow | DataError], tally: Tally) -> Iterator[NumberedRow]:
    for row in batch:
        if isinstance(row, DataError):
            tally.refuse(row)
        else:
            yield row


def require_rows(pipeline: Pipeline, tally: Tally) -> None:
    """Check that a row is left to train on. Raises DataError: no row is left."""
    dataset, counts, place = pipeline.dataset, tally.counts, pipeline.mixture.place
    if pipeline.mixture.holdout and not counts.read:
        raise no_rows(dataset, "validation" if dataset.held_out else "training", place)
    if not counts.kept:
        reasons = {total.reason for total in tally.totals()}
        if reasons == {NO_ANSWER}:
            problem = f"none of the {counts.read} rows has an assistant message, so there is nothing to train on"
            hints = " ".join(hint[:1].upper() + hint[1:] for hint in pipeline.hints)
            fix = f"End each conversation with an assistant turn. {hints}".strip()
            raise DataError(problem, where=place, fix=fix)
        is_about_length = any("max_length" in reason for reason in reasons)
        within = f" within max_length={dataset.max_length}" if is_about_length else ""
        counted = "; ".join(map(str, tally.totals()[:_MAX_REASONS]))
        raise DataError(
            f"none of the {counts.read} rows has a token to train on{within}: {counted}",
            where=place,
            fix="Raise dataset.max_length, or check the rows." if is_about_length else "Correct the rows.",
        )


def _key(pipeline: Pipeline, encoder: TextEncoder, *, uses_fastokens: bool) -> str:
    """Return what the result depends on, hashed: content, settings, encoder, code."""
    dataset = pipeline.dataset
    parts = [
        pipeline.mixture.fingerprint(),
        [
            dataset.max_length,
            dataset.packing,
            dataset.pack_tokens,
            dataset.bad_rows,
            dataset.thinking,
            dataset.special_tokens,
            dataset.trained_turns,
            pipeline.objective,
        ],
        [uses_fastokens, version_of("fastokens")],
        [_code_of_user(data_set.format) for data_set in pipeline.mixture.sets],
        encoder.content(),
        # Rows of images name their files.
        [str(Path(data_set.path).absolute()) for data_set in dataset.data_sets if data_set.path]
        if encoder.image_id
        else None,
        [sha256(file) for file in (*sorted(Path(__file__).parent.rglob("*.py")), Path(records.__file__))],
        [version(library) for library in ("transformers", "tokenizers", "trl", "datasets", "pyarrow")],
    ]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:32]


def _code_of_user(name: str | None) -> str | None:
    """Return the hash of the file that holds a user's row function: changed code means other rows."""
    if name is None or ":" not in name:
        return None
    file = inspect.getsourcefile(formats.user_function(name))
    return sha256(Path(file)) if file else None


def _images_changed(folder: Path) -> bool:
    """Return whether an image file of prepared rows is another one now."""
    file = folder / _IMAGES_FILE
    return file.is_file() and read_text(file) != _state_of_images(folder)


def _state_of_images(folder: Path) -> str:
    """Return a hash of the times and sizes of the image files; looking at 100,000 files takes less than a second."""
    column = datasets.Dataset.from_file(str(folder / ROWS_FILE)).data.column(layouts.IMAGES).combine_chunks()
    digest = hashlib.sha256()
    for path in pc.unique(pc.struct_field(pc.list_flatten(column), "path")).to_pylist():
        if path is not None:
            file = Path(path)
            status = file.stat() if file.is_file() else None
            digest.update(f"{path}\0{status and (status.st_mtime_ns, status.st_size)}\n".encode())
    return digest.hexdigest()


def _sha256_of(rows: datasets.Dataset) -> str:
    """Return a hash of the values alone: libraries of other versions write the same rows into other files."""
    hashes = {name: hashlib.sha256() for name in rows.column_names}
    for table in rows.with_format("arrow").iter(_BATCH_ROWS):
        for name, column in zip(table.column_names, table.columns, strict=True):
            for values in _values(column.combine_chunks()):
                hashes[name].update(values)
    return hashlib.sha256(
        json.dumps({name: digest.hexdigest() for name, digest in hashes.items()}).encode()
    ).hexdigest()


def _values(column: pa.Array) -> Iterator[bytes]:
    """Yield the bytes of a column's values, and of the lengths of lists and texts."""
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        yield pc.list_value_length(column).to_numpy(zero_copy_only=False).tobytes()
        yield from _values(pc.list_flatten(column))
    elif pa.types.is_struct(column.type):
        for part in column.flatten():
            yield from _values(part)
    elif pa.types.is_string(column.type) or pa.types.is_binary(column.type):
        yield json.dumps([None if value is None else len(value) for value in column.to_pylist()]).encode()
        yield from (value.encode() if isinstance(value, str) else value for value in column.to_pylist() if value)
    else:
        yield column.to_numpy(zero_copy_only=False).tobytes()


def describe(prepared: Prepared, name: str = "train") -> str:
    """Return what was read and what it became: one line, and one more for each data set of a mixture and each reason.

    A reason is why samples are not trained on as they are.
    """
    counts, sets = prepared.counts, prepared.sets
    rows = _rows_of(sets[0]) if len(sets) == 1 else f"{counts.read:,} rows of {len(sets)} data sets"
    generates = facts_of(prepared.objective).generates
    tokens = "" if generates else f"{counts.trained_tokens:,} of {counts.tokens:,} tokens trained, "
    num_images = prepared.num_images
    images = "" if num_images is None else f"{_number(num_images, 'image')}, "
    head = (
        f"{name}: {rows} -> {_shape(prepared)}, {images}{tokens}"
        f"{counts.truncated:,} truncated, {f'{counts.split:,} split, ' if counts.split else ''}"
        f"{counts.dropped:,} dropped"
        f"{f', {counts.bad:,} bad rows left out' if counts.bad else ''}"
    )
    parts = [f"  {of_set.place}: {_rows_of(of_set)}" for of_set in sets if len(sets) > 1]
    reasons = [f"  {total}" for total in prepared.data.changes[:_MAX_REASONS]]
    num_more = len(prepared.data.changes) - _MAX_REASONS
    unread = [f"  not read: {unread_text(prepared.data.unread)}"] if prepared.data.unread else []
    return "\n".join([head, *parts, *reasons, *([f"  and {num_more:,} more reasons"] if num_more > 0 else []), *unread])


def _number(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _rows_of(counts: SetCounts) -> str:
    return f"{_number(counts.read, 'row')} of format {counts.format!r}{' (detected)' if counts.detected else ''}"


def _shape(prepared: Prepared) -> str:
    counts = prepared.counts
    if facts_of(prepared.objective).is_judged:
        layout = layouts.of(prepared.objective)
        per_side = ", each side" * (len(layout.sides) > 1)
        kept = _number(counts.kept, layout.noun)
        return f"{kept}{per_side} of at most {counts.max_length:,} tokens (packing does not apply)"
    if facts_of(prepared.objective).generates:
        return f"{_number(counts.kept, 'prompt')} of at most {counts.max_length:,} tokens"
    if counts.packing:
        rows = _number(counts.packed_rows, "packed row")
        longest = int(prepared.packed_lengths().max())
        longer = f" to {longest:,}" if longest > counts.pack_length else ""
        return f"{rows} of {counts.pack_length:,}{longer} tokens, {prepared.efficiency():.1%} full"
    return f"{_number(counts.packed_rows, 'sample')} of at most {counts.max_length:,} tokens"
