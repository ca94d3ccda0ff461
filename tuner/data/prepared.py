"""A data set as `prepare` leaves it: the trainer's rows, and what was counted on their way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets

from tuner.data import outcomes
from tuner.data.outcomes import Counts, Total


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

    Columns: `input_ids`, `labels` and `seq_lengths` (the lengths of the samples in the row), or those of `layouts`.
    """

    dataset: datasets.Dataset
    counts: Counts
    sets: tuple[SetCounts, ...]
    objective: str
    sha256: str
    """Of the rows' values, in their order."""
    totals: tuple[Total, ...]
    """How many samples are bad, dropped, truncated, split or changed, by reason."""
    outcomes_file: Path
    """Those samples, one a line, as a `Tally` writes them."""

    def facts(self) -> dict[str, Any]:
        """Return the counts, by reason too, as plain values."""
        return {"counts": asdict(self.counts), "changes": [asdict(total) for total in self.totals]}

    def changed(self) -> Iterator[dict[str, Any]]:
        """Yield where, what, reason, tokens_before and tokens_after of each of them, `MAX_LISTED` of a reason."""
        return outcomes.read_list(self.outcomes_file)
