"""Answers that were judged, as rows: whole conversations as tokens, with loss on the judged turns alone.

It reads no rows, and forms no batches of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa

from tuner.data import masks, packing
from tuner.data.reading import Encoder, Labelled, Tally
from tuner.data.sample import EQUAL, Chat, Feedback, Pair

Judged = Pair | Feedback
Row = dict[str, Any]


@dataclass(frozen=True)
class Layout:
    """The rows of an objective: columns `{side}_ids` and `{side}_labels` for each side, `is_good` for feedback.

    `cuts`: a sequence that is too long is cut at its end; else its sample is dropped.
    """

    noun: str
    sides: tuple[str, ...]
    cuts: bool = True

    @property
    def schema(self) -> pa.Schema:
        tokens = pa.list_(pa.int32())
        columns = [(f"{side}_{what}", tokens) for side in self.sides for what in ("ids", "labels")]
        return pa.schema(columns if len(self.sides) > 1 else [*columns, ("is_good", pa.bool_())])


_PAIRS = Layout("pairs, each side", ("chosen", "rejected"))
LAYOUTS = {
    "dpo": _PAIRS,
    "orpo": _PAIRS,
    # The score is read at the last token, so a cut answer would be judged without its end.
    "reward": Layout(_PAIRS.noun, _PAIRS.sides, cuts=False),
    "kto": Layout("judged answers", ("answer",)),
}


def conversations(sample: Judged) -> list[Chat]:
    """Return the conversation of each side; the turns of the prompt carry no loss."""
    prompt = [{**turn, "weight": 0} if turn["role"] == "assistant" else turn for turn in sample.prompt]
    answers = (sample.chosen, sample.rejected) if isinstance(sample, Pair) else (sample.completion,)
    return [Chat([*prompt, *answer], sample.tools) for answer in answers]


def encoded(
    layout: Layout, batches: Iterable[Sequence[tuple[str, Any]]], encoder: Encoder, max_length: int, tally: Tally
) -> Iterator[list[Row]]:
    """Yield the rows of each batch of places and samples."""
    for batch in batches:
        good, sides = encoder.encode_good(batch, conversations, tally)
        width = len(layout.sides)
        grouped = (sides[at : at + width] for at in range(0, len(sides), width))
        rows = (fit(layout, *one, both, max_length, tally) for one, both in zip(good, grouped, strict=True))
        yield [row for row in rows if row]


def fit(
    layout: Layout, place: str, sample: Judged, sides: Sequence[Labelled], max_length: int, tally: Tally
) -> Row | None:
    """Return a sample's row, cut to `max_length` tokens a side; None, counted, where nothing can be learned from it.

    That is: a side without a trained token in that length, two sides that are equal in it, or one too long for a
    layout that does not cut.
    """
    cut = [(ids[:max_length], packing.ignore_starts(labels[:max_length], None)) for ids, labels in sides]
    if reason := _teaches_nothing(layout, sides, cut, max_length):
        tally.drop(place, reason, sides)
        return None
    tally.keep(place, sides, cut, max_length)
    row: Row = {"is_good": sample.label} if isinstance(sample, Feedback) else {}
    for side, (ids, labels) in zip(layout.sides, cut, strict=True):
        row |= {f"{side}_ids": ids, f"{side}_labels": labels}
    return row


def _teaches_nothing(layout: Layout, sides: Sequence[Labelled], cut: Sequence[Labelled], max_length: int) -> str | None:
    if not layout.cuts and any(len(ids) > max_length for ids, _ in sides):
        return f"longer than max_length = {max_length}, and an answer that is cut cannot be scored"
    for whole, short in zip(sides, cut, strict=True):
        if reason := masks.untrained(whole, short, max_length):
            return reason
    if len(cut) > 1 and np.array_equal(cut[0][0], cut[1][0]):
        return f"{EQUAL} within max_length = {max_length}"
    return None


def write_rows(path: Path, batches: Iterable[Sequence[Row]], layout: Layout) -> datasets.Dataset:
    """Write batches of rows to `path` and return them memory-mapped."""
    with pa.OSFile(str(path), "wb") as stream, pa.ipc.new_stream(stream, layout.schema) as writer:
        for batch in batches:
            columns = {name: [row[name] for row in batch] for name in layout.schema.names}
            writer.write_batch(pa.RecordBatch.from_pydict(columns, schema=layout.schema))
    return datasets.Dataset.from_file(str(path))
