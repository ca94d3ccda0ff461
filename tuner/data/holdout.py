"""Which rows of a data set are held out for validation, and which rows a fractional weight draws.

Both look at the place of a row in the order alone, so every rank decides the same.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from tuner.data.copies import RowKey
from tuner.errors import DataError, Option
from tuner.recipes.schema import Dataset


@dataclass(frozen=True)
class Holdout:
    """A part of the rows, between 0 and 1, and the seed that chooses them; `taken`: these are read, not the others.

    One at random of each 1 / part rows is held out. It looks at places in the order alone, so it says the same on every
    rank. With `keeps_copies_together` only a row with a new question and answer has a place in the order, and its
    copies are where it is (`Sides`).
    """

    part: float
    seed: int
    taken: bool
    keeps_copies_together: bool = False

    @classmethod
    def of(cls, dataset: Dataset) -> Holdout | None:
        """Return what a `dataset` block says of held-out rows, or None where nothing is held out."""
        if dataset.val_split is None:
            return None
        assert dataset.val_split != "auto", "settled by launch.validation_rows before anybody asks"
        return cls(dataset.val_split, dataset.val_seed or 0, dataset.held_out, dataset.val_copies == "together")

    def holds(self, number: int, row: int) -> bool:
        """Return whether row `row` of data set `number` of a mixture, both from 0, is held out."""
        above, below = self._ratio
        return row == self._held(number, row * above // below)

    @cached_property
    def _ratio(self) -> tuple[int, int]:
        """The part as a fraction of the decimal that was written, so that windows have whole ends where they should."""
        return Fraction(str(self.part)).as_integer_ratio()

    def _held(self, number: int, window: int) -> int:
        """Return the row of a window that is held out; window 0 begins at row 0 and has about 1 / part rows."""
        above, below = self._ratio
        start, end = -(-window * below // above), -(-(window + 1) * below // above)
        text = f"{self.seed}-{number}-{window}".encode()
        return start + int.from_bytes(hashlib.sha256(text).digest()[:8], "big") % (end - start)

    def rows_with(self, num_held: int) -> int:
        """Return how many first rows of one data set hold `num_held` held-out rows: as many windows."""
        above, below = self._ratio
        return -(-num_held * below // above)

    def keeps(self, number: int, row: int) -> bool:
        return self.holds(number, row) is self.taken

    def count(self, number: int, rows: int, weight: float = 1.0) -> int:
        """Return how many of the first `rows` rows of a data set are read, each as often as `WeightedSource` has it."""
        above, below = self._ratio
        windows = range(-(-rows * above // below))
        held_out = [row for window in windows if (row := self._held(number, window)) < rows]
        num_passes, fraction = divmod(Fraction(str(weight)), 1)
        num_held = int(num_passes) * len(held_out) + sum(is_drawn(row, fraction) for row in held_out if fraction)
        return num_held if self.taken else int(num_passes) * rows + math.ceil(fraction * rows) - num_held


def no_rows(dataset: Dataset, split: str, where: object, why: str = "") -> DataError:
    """Return the error of a data set of which no row is left for a split: "training" or "validation"."""
    return DataError(
        f"val_split = {dataset.val_split} leaves no rows for {split}{why}",
        where=where,
        fix=f"Use another share, validation data of its own ({Option('val', 'FILE')}), or none "
        f"({Option('val_split', 0)}).",
    )


class Sides:
    """The side of a split that each row is on, asked in the order of reading: copies are on one side."""

    def __init__(self, holdout: Holdout) -> None:
        self._holdout = holdout
        self._is_held: dict[RowKey, bool] = {}
        self._num_new: Counter[int] = Counter()

    def keeps(self, number: int, key: RowKey) -> bool:
        """Return whether a row of data set `number` of a mixture is read."""
        if key not in self._is_held:
            self._is_held[key] = self._holdout.holds(number, self._num_new[number])
            self._num_new[number] += 1
        return self._is_held[key] is self._holdout.taken


def is_drawn(row: int, share: Fraction) -> bool:
    """Return whether a share of a data set has a row: ceil(count x share) of the first `count` rows, whatever count."""
    return -row * share.numerator % share.denominator < share.numerator
