"""A data set as `prepare` leaves it: the trainer's rows, and what was counted on their way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tuner.data import copies, layouts
from tuner.data.copies import Seen
from tuner.data.outcomes import Counts, Total, Unread
from tuner.files import load_json, raw_lines, read_text

ROWS_FILE, COUNTS_FILE, OUTCOMES_FILE, KEYS_FILE = "rows.arrow", "counts.json", "changes.jsonl", "keys.npy"


@dataclass(frozen=True)
class SetCounts:
    """What was read of one data set of a mixture, or of the only one."""

    place: str
    format: str
    detected: bool
    read: int


@dataclass(frozen=True)
class Prepared:
    """Rows for the trainer of an objective, and how they came about.

    Columns: `input_ids`, `labels` and `seq_lengths` (the lengths of the samples in the row), or those of `layouts`, and
    `token_weights` if a token's weight is neither 0 nor 1.
    """

    dataset: datasets.Dataset
    counts: Counts
    sets: tuple[SetCounts, ...]
    objective: str
    sha256: str
    """Of the rows' values, in their order."""
    totals: tuple[Total, ...]
    """How many samples are bad, dropped, truncated, split or changed, by reason."""
    unread: tuple[Unread, ...]
    """The keys of rows that nothing is made of."""
    hints: tuple[str, ...]
    """What the columns say that the objective does not learn from; see `data.hints`."""
    outcomes_file: Path
    """Those samples, one a line, as a `Tally` writes them."""

    @classmethod
    def load(cls, folder: Path, objective: str) -> Prepared:
        written = load_json(read_text(folder / COUNTS_FILE))
        sets = tuple(SetCounts(**count) for count in written["sets"])
        rows = datasets.Dataset.from_file(str(folder / ROWS_FILE))
        totals = tuple(Total(**count) for count in written["changes"])
        unread = tuple(Unread(**count) for count in written["unread"])
        counts = Counts(**written["counts"])
        facts_of_rows = (written["sha256"], totals, unread, tuple(written["hints"]))
        return cls(rows, counts, sets, objective, *facts_of_rows, folder / OUTCOMES_FILE)

    def packed_lengths(self) -> npt.NDArray[np.int64]:
        """Return the tokens of each packed row; those of one sample may be more than `pack_length`."""
        lengths: npt.NDArray[np.int64] = pc.list_value_length(self.dataset.data.column("input_ids")).to_numpy()
        return lengths

    def efficiency(self) -> float:
        """Return the part, 0 to 1, of packed rows that holds tokens; a row longer than `pack_length` is full."""
        return self.counts.tokens / int(np.maximum(self.packed_lengths(), self.counts.pack_length).sum())

    @property
    def num_images(self) -> int | None:
        """The images of all rows; None if the model reads text alone."""
        if layouts.IMAGES not in self.dataset.column_names:
            return None
        return int(pc.sum(pc.list_value_length(self.dataset.data.column(layouts.IMAGES))).as_py() or 0)

    def facts(self) -> dict[str, Any]:
        """Return the counts, by reason too, as plain values."""
        changes, unread = ([asdict(count) for count in counts] for counts in (self.totals, self.unread))
        return {"counts": asdict(self.counts), "changes": changes, "unread": unread}

    def in_training(self, training: Prepared) -> int:
        """Return how many of these rows, which a run validates on, have the question and answer of a training row."""
        return copies.shared(self.seen(), training.seen())

    def seen(self) -> list[Seen]:
        """Return the key of each row that is a sample, and the hash of its place, in the order of reading."""
        return [(key, place) for key, place in np.load(self.outcomes_file.with_name(KEYS_FILE)).tolist()]

    def changed(self) -> Iterator[dict[str, Any]]:
        """Yield where, what, reason, tokens_before and tokens_after of each of them, `MAX_LISTED` of a reason."""
        return map(load_json, raw_lines(self.outcomes_file))


def in_arrays(rows: datasets.Dataset) -> datasets.Dataset:
    """Return rows that give ids, labels, weights and lengths as numpy arrays: lists take ten times as long."""
    lists = [field.name for field in rows.features.arrow_schema if _holds_numbers(field.type)]
    return rows.with_format("numpy", columns=lists, output_all_columns=True)


def _holds_numbers(kind: pa.DataType) -> bool:
    is_list = pa.types.is_list(kind)
    return bool(is_list and (pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type)))
