"""The rows that each objective's trainer takes: their columns, and samples cut to fit into them.

A sample of several answers is whole conversations, with loss on the judged turns alone.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tuner.data import images
from tuner.data.encoder import Encoded, Labelled, Row, Tokens
from tuner.data.outcomes import Tally
from tuner.data.sample import EQUAL, IGNORED, Chat, Feedback, Prompt, images_of
from tuner.recipes.schema.objectives import RowKind, facts_of

_TOKENS = pa.list_(pa.int32())
IMAGES = "image_files"
"""The column of a row's images in the order of their tokens. TRL would treat a column `images` as its own."""
WEIGHTS = "token_weights"
"""The column of how much the loss of each token weighs, of samples; a table without it weighs each of them as 1."""
_WEIGHTS = pa.field(WEIGHTS, pa.list_(pa.float32()))
_IMAGE = pa.struct([("path", pa.string()), ("data", pa.binary()), ("width", pa.int32()), ("height", pa.int32())])


@dataclass(frozen=True)
class Layout:
    """The columns of a row: ids and labels of each side of a sample, and one column more, with its type.

    `cuts`: a sequence that is too long is cut at its end; else its sample is dropped. `image_id`: the token of images;
    rows then have a column of them. None: rows have no images.
    """

    noun: str
    sides: dict[str, tuple[str, str]]
    other: tuple[str, pa.DataType] | None = None
    cuts: bool = True
    image_id: int | None = None

    @property
    def schema(self) -> pa.Schema:
        tokens = [(name, _TOKENS) for names in self.sides.values() for name in names]
        columns = [*tokens, self.other] if self.other else tokens
        return pa.schema(columns if self.image_id is None else [*columns, (IMAGES, pa.list_(_IMAGE))])


def _side(name: str) -> tuple[str, str]:
    return f"{name}_ids", f"{name}_labels"


_PAIRS = Layout("pair", {"chosen": _side("chosen"), "rejected": _side("rejected")})
_SAMPLES = Layout("sample", {"samples": ("input_ids", "labels")}, ("seq_lengths", _TOKENS))
_LAYOUTS: dict[RowKind, Layout] = {
    "conversations": _SAMPLES,
    "texts": _SAMPLES,
    "pairs": _PAIRS,
    "prompts": Layout("prompt", {"prompt": ("prompt_ids", "prompt_labels")}, ("row", pa.string())),
    "judged": Layout("judged answer", {"answer": _side("answer")}, ("is_good", pa.bool_())),
}


def of(objective: str, image_id: int | None = None) -> Layout:
    """Return the layout of an objective's rows; `image_id` is the token of images, None without images."""
    objective_facts = facts_of(objective)
    return replace(_LAYOUTS[objective_facts.rows], cuts=objective_facts.cuts, image_id=image_id)


def fit(layout: Layout, encoded: Encoded, tally: Tally) -> Row | None:
    """Return a sample's row, cut unless it will be packed; None, counted, where nothing can be learned from it.

    That is: a side without a trained token in `max_length`, two sides that are equal in it, or one too long for a
    layout that does not cut.
    """
    max_length = tally.counts.max_length
    shown = images_of(encoded.sample.messages) if isinstance(encoded.sample, Chat) else []
    short = cut(encoded.sides, max_length, splits=tally.counts.packing and not shown)
    if reason := _teaches_nothing(layout, encoded.sides, short, max_length):
        tally.drop(encoded.place, reason, encoded.sides)
        return None
    tally.keep(encoded.place, encoded.sides, short)
    row: Row = {"is_good": encoded.sample.label} if isinstance(encoded.sample, Feedback) else {}
    if isinstance(encoded.sample, Prompt):
        prompt = encoded.sample.prompt if encoded.sample.text is None else encoded.sample.text
        columns, template_keys = encoded.sample.columns, ("tools", "chat_template_kwargs")
        as_taken = {name: getattr(encoded.sample, name) for name in template_keys}  # by the chat template
        as_taken = {name: value for name, value in as_taken.items() if value or name in columns}
        row["row"] = json.dumps({**columns, **as_taken, "prompt": prompt}, default=str)
    row["seq_lengths"] = [len(ids) for ids, _ in short]
    if layout.image_id is not None:
        sizes = map(images.size_of, shown)
        row[IMAGES] = [
            {"path": image.path, "data": image.data, "width": width, "height": height}
            for image, (width, height) in zip(shown, sizes, strict=True)
        ]
    for names, side in zip(layout.sides.values(), short, strict=True):
        row |= zip(names, side, strict=True)
    if encoded.weights is not None:
        row[WEIGHTS] = encoded.weights[: len(short[0][0])]
    return row


def cut(sides: Sequence[Labelled], max_length: int, *, splits: bool = False) -> list[Labelled]:
    """Return sequences cut to `max_length` tokens, or whole where packing `splits` them into parts of that length.

    The first token of a sequence, and of each part, carries no loss: nothing precedes it, so nothing predicts it; done
    here, counts of trained tokens are what the loss sees.
    """
    length = None if splits else max_length
    return [(ids[:length], _ignore_starts(labels[:length], max_length)) for ids, labels in sides]


def _ignore_starts(labels: Tokens, max_length: int) -> Tokens:
    labels[::max_length] = IGNORED
    return labels


def _teaches_nothing(
    layout: Layout, sides: Sequence[Labelled], short: Sequence[Labelled], max_length: int
) -> str | None:
    if not layout.cuts and any(len(ids) > max_length for ids, _ in sides):
        why = "prompt is another question" if "prompt" in layout.sides else "answer cannot be scored"
        return f"longer than max_length = {max_length}, and a truncated {why}"
    if "prompt" in layout.sides:
        return None
    for uncut_side, cut_side in zip(sides, short, strict=True):
        if layout.image_id is not None and (uncut_side[0][len(cut_side[0]) :] == layout.image_id).any():
            num = int((uncut_side[0] == layout.image_id).sum())
            return f"its {num:,} tokens of images do not fit into max_length = {max_length}"
        if reason := _untrained(uncut_side, cut_side, max_length):
            return reason
    if len(short) > 1 and np.array_equal(short[0][0], short[1][0]):
        return f"{EQUAL} within max_length = {max_length}"
    return None


def _untrained(uncut_side: Labelled, cut_side: Labelled, max_length: int) -> str | None:
    """Return why no token of a sequence carries loss once it is cut; None if one does."""
    if (cut_side[1] != IGNORED).any():
        return None
    if (uncut_side[1][len(cut_side[1]) :] != IGNORED).any():
        return f"the answer begins beyond max_length = {max_length}"
    return "no token of it carries loss"


def table(rows: Sequence[Row], layout: Layout) -> pa.RecordBatch:
    schema = layout.schema
    columns = {name: [row[name] for row in rows] for name in schema.names}
    if any(WEIGHTS in row for row in rows):
        schema = schema.append(_WEIGHTS)
        columns[WEIGHTS] = [row.get(WEIGHTS, np.ones(len(row["input_ids"]), np.float32)) for row in rows]
    return pa.RecordBatch.from_pydict(columns, schema=schema)


def write_rows(path: Path, tables: Iterable[pa.RecordBatch], layout: Layout) -> datasets.Dataset:
    """Write rows to `path` and return them memory-mapped: with a column of weights if a table has one."""
    tables = iter(tables)
    weighed = _write(path, tables, layout.schema)
    if weighed is not None:
        before = path.with_name(f"before-{path.name}")
        path.rename(before)
        with pa.memory_map(str(before)) as source:
            written = pa.ipc.open_stream(source)
            all_tables = itertools.chain(written, [weighed], tables)
            _write(path, map(_with_weights, all_tables), layout.schema.append(_WEIGHTS))
        before.unlink()
    return datasets.Dataset.from_file(str(path))


def _write(path: Path, tables: Iterable[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch | None:
    """Write tables to `path`; return the first that has another schema, and write none from there on."""
    with pa.OSFile(str(path), "wb") as stream, pa.ipc.new_stream(stream, schema) as writer:
        for batch in tables:
            if batch.schema.names != schema.names:
                return batch
            writer.write_batch(batch)
    return None


def _with_weights(batch: pa.RecordBatch) -> pa.RecordBatch:
    if WEIGHTS in batch.schema.names:
        return batch
    ids = batch.column("input_ids")
    ones = pa.array(np.ones(len(ids.flatten()), np.float32))
    return batch.append_column(_WEIGHTS, pa.ListArray.from_arrays(_offsets(ids), ones))


def _offsets(lists: pa.ListArray) -> pa.Array:
    lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False)
    return pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
