"""Which rows of a data set are held out for validation: one at random of each 1 / part rows, by a seed.

It looks at places in the order alone, so it says the same on every rank, whatever a row holds.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from fractions import Fraction

from tuner.recipes.schema import Dataset


@dataclass(frozen=True)
class Holdout:
    """A part of the rows, between 0 and 1, and the seed that chooses them; `taken`: these are read, not the others."""

    part: float
    seed: int
    taken: bool

    @classmethod
    def of(cls, dataset: Dataset) -> Holdout | None:
        """Return what a `dataset` block says of held-out rows, or None where nothing is held out."""
        if dataset.val_split is None:
            return None
        return cls(dataset.val_split, dataset.val_seed or 0, dataset.held_out)

    def holds(self, number: int, row: int) -> bool:
        """Return whether row `row` of data set `number` of a mixture, both from 0, is held out."""
        # The decimal that was written, so that windows have whole ends where they should.
        part = Fraction(str(self.part))
        window = math.floor(row * part)
        start, end = math.ceil(window / part), math.ceil((window + 1) / part)
        text = f"{self.seed}-{number}-{window}".encode()
        chosen = int.from_bytes(hashlib.sha256(text).digest()[:8], "big") % (end - start)
        return row == start + chosen

    def keeps(self, number: int, row: int) -> bool:
        """Return whether a row is read."""
        return self.holds(number, row) is self.taken

    def count(self, number: int, rows: int) -> int:
        """Return how many of the first `rows` rows of a data set are read."""
        return sum(self.keeps(number, row) for row in range(rows))
