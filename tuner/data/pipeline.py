"""The one way of rows to samples, from a recipe's `dataset` block to what its objective learns from.

The checks before a run, training, `tuner data` and the sample answers walk it alike; they differ in what they do about
a row that is wrong. No library that training waits for is imported before one is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TextIO

from tuner.data import formats, mixing
from tuner.data.mixing import WeightedSource
from tuner.data.outcomes import Counts, Tally
from tuner.data.readers.text_files import OnError, fail
from tuner.data.sample import JUDGED, Sample, WrongKind, for_objective, lacks
from tuner.errors import DataError
from tuner.recipes.schema import Dataset

_DETECT_ROWS = 8
_SHAPE_ROWS = 1_000

PlacedSample = tuple[str, Sample]
"""`file:line` and what the row there became."""


@dataclass(frozen=True)
class Pipeline:
    """The way of the rows of `dataset` to an objective.

    Each step raises DataError where the data set, or more rows of it than `on_error` bears, are wrong, and
    MachineError where the hub cannot be reached.
    """

    dataset: Dataset
    objective: str

    @cached_property
    def mixture(self) -> mixing.Mixture:
        """The data sets of the block."""
        return mixing.open(self.dataset)

    @cached_property
    def formats(self) -> tuple[str, ...]:
        """The row format of each data set: the recipe's, or the one told from its first rows."""
        return tuple(
            one.format
            or formats.detect(one.head(_DETECT_ROWS), one.place, columns=one.columns, objective=self.objective)
            for one in self.mixture.sets
        )

    def tally(self, stream: TextIO | None = None) -> Tally:
        """Return a tally that leaves out as many bad rows as the block allows, and lists samples in `stream`."""
        packing = self.dataset.packing and self.objective not in JUDGED
        return Tally(Counts(self.dataset.max_length, packing), self.dataset.bad_rows, stream)

    def samples(self, tally: Tally, on_error: OnError) -> Iterator[PlacedSample]:
        """Yield what the objective learns from; `on_error` is called for each row that it cannot learn from."""
        for one, (place, row) in self.mixture.read(on_error):
            tally.read(one.number)
            name = self.formats[one.number]
            try:
                sample = formats.read(name, row, place, columns=one.columns, system=one.system)
                parts = for_objective(sample, self.objective, name, place)
            except DataError as error:
                if not (error.of_row or isinstance(error, WrongKind)):
                    raise
                self._refuse(error, one, on_error if error.of_row else fail)
                continue
            for part in parts:
                if reason := lacks(part):
                    tally.drop(place, reason)
                else:
                    yield place, part

    def _refuse(self, error: DataError, one: WeightedSource, on_error: OnError) -> None:
        """Call `on_error`; where it raises, and the rows have several shapes, raise that: one row's advice misleads."""
        try:
            on_error(error)
        except DataError as refused:
            if ":" in self.formats[one.number]:  # what a function of the user's takes, nobody knows
                raise
            rows = itertools.islice(one.source.read(lambda _: None), _SHAPE_ROWS)
            shapes = formats.mixed(rows, one.place, columns=one.columns, objective=self.objective)
            raise (shapes or refused) from error
