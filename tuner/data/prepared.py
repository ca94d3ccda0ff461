"""A data set as `prepare` leaves it: the trainer's rows, and what was counted on their way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import dataclasses

from tuner.data import copies, layouts
from tuner.data.copies import Seen
from tuner.errors import DataError, RunDirectoryError
from tuner.files import load_json, raw_lines, read_text
from tuner.runs.records import COUNTED, DataCounts, SplitData, Versioned

ROWS_FILE, COUNTS_FILE, OUTCOMES_FILE, KEYS_FILE = "rows.arrow", "counts.json", "changes.jsonl", "keys.npy"


@dataclasses.dataclass(frozen=True, config=COUNTED)
class SetCounts:
    """What was read of one data set of a mixture, or of the only one."""

    place: str
    format: str
    detected: bool
    read: int


class Written(Versioned):
    """counts.json: what is known of prepared rows, beside them."""

    sets: list[SetCounts]
    data: SplitData
    sha256: str
    hints: list[str]


@dataclass(frozen=True)
class Prepared:
    """Rows for the trainer of an objective, and how they came about.

    Columns: `input_ids`, `labels` and `seq_lengths` (the lengths of the samples in the row), or those of `layouts`, and
    `token_weights` if a token's weight is neither 0 nor 1.
    """

    dataset: datasets.Dataset
    sets: tuple[SetCounts, ...]
    objective: str
    sha256: str
    """Of the rows' values, in their order."""
    data: SplitData
    hints: tuple[str, ...]
    """What the columns say that the objective does not learn from; see `data.hints`."""
    outcomes_file: Path
    """The samples of `data.changes`, one a line, as a `Tally` writes them."""

    @classmethod
    def load(cls, folder: Path, objective: str) -> Prepared:
        """Return what `prepare` wrote.

        Raises:
            DataError: its counts are damaged.
        """
        file = folder / COUNTS_FILE
        try:
            content = load_json(read_text(file))
            written = Written.of(content if isinstance(content, dict) else {}, file)
        except (RunDirectoryError, ValueError) as error:
            reason = error.what if isinstance(error, RunDirectoryError) else f"{file.name} is not JSON"
            fix = "Remove the folder: its rows are prepared again."
            raise DataError(f"prepared rows are damaged: {reason}", where=folder, fix=fix) from error
        rows = datasets.Dataset.from_file(str(folder / ROWS_FILE))
        hints, sets = tuple(written.hints), tuple(written.sets)
        return cls(rows, sets, objective, written.sha256, written.data, hints, folder / OUTCOMES_FILE)

    @property
    def counts(self) -> DataCounts:
        return self.data.counts

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
