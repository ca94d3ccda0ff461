"""From a recipe's `dataset` block to the rows of its data sets in one order: weights, `max_rows`, what is held out.

It does not know what a row means.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import TypeVar

from tuner import paths
from tuner.data import sources
from tuner.data.copies import RowKey, key_of_row
from tuner.data.formats.image_places import ImagePaths
from tuner.data.holdout import Holdout, Sides, is_drawn
from tuner.data.readers.text_files import Cursor, OnError, PlacedRow, Row, fail
from tuner.errors import DataError
from tuner.recipes.schema import Dataset, MixtureEntry, Rows

T = TypeVar("T")


@dataclass(frozen=True)
class WeightedSource:
    """One data set of a mixture; `number` is its place in it, from 0. `format` None: to be detected from `head`.

    `first` is the place of the first one with the same rows: they are held out together. Of its rows only the first
    `max_rows` count; None: all.
    """

    number: int
    source: sources.Source
    format: str | None
    columns: dict[str, str] | None
    system: str | None
    images: ImagePaths
    weight: float
    first: int
    max_rows: int | None = None

    @property
    def place(self) -> str:
        return self.source.place

    def head(self, count: int) -> list[Row]:
        """Return the first `count` rows, or all where there are fewer; at least one."""
        rows: list[Row] = []
        with suppress(DataError):  # rows that cannot be read tell nothing of the others; who reads on meets them
            for _, row in itertools.islice(self.source.read(lambda _: None), count):
                rows.append(row)
        return rows or [row for _, row in itertools.islice(self.source.read(), 1)]

    def read(self, on_error: OnError = fail) -> Iterator[tuple[int, PlacedRow]]:
        """Yield every row as often as the whole part of `weight`, then its fraction of the rows, spread evenly.

        Each comes with its number in the data set, from 0; a row that cannot be read has none.
        """
        # The decimal that was written: in floats 100 x 0.07 is more than 7.
        weight = Fraction(str(self.weight))
        for _ in range(int(weight)):
            yield from enumerate(self._first_rows(on_error))
        if fraction := weight % 1:
            for number, placed in enumerate(self._first_rows(on_error)):
                if is_drawn(number, fraction):
                    yield number, placed

    def _first_rows(self, on_error: OnError) -> Iterator[PlacedRow]:
        return itertools.islice(self.source.read(on_error), self.max_rows)


KeyOfRow = Callable[[WeightedSource, PlacedRow], RowKey]


@dataclass(frozen=True)
class Mixture:
    """The data sets of a `dataset` block, at most `max_rows` rows of them, less those that are the other loader's."""

    sets: tuple[WeightedSource, ...]
    max_rows: int | None
    holdout: Holdout | None = None

    @property
    def place(self) -> str:
        return ", ".join(data_set.place for data_set in self.sets)

    def fingerprint(self) -> str:
        """Return a hash that changes when rows, their order or how they are read does; it reads every local file.

        Raises:
            DataError: one of them cannot be read.
        """
        inputs = [
            [
                data_set.source.fingerprint(),
                data_set.format,
                data_set.columns,
                data_set.system,
                data_set.weight,
                str(data_set.images.folder),
                data_set.max_rows,
            ]
            for data_set in self.sets
        ]
        return hashlib.sha256(
            json.dumps([inputs, self.max_rows, self.holdout and asdict(self.holdout)]).encode()
        ).hexdigest()

    def read(
        self, on_error: OnError = fail, key_of: KeyOfRow | None = None
    ) -> Iterator[tuple[WeightedSource, PlacedRow]]:
        """Yield all rows, each set's evenly among the others' in proportion to the weights, at most `max_rows`.

        Of these, a held-out part is taken out, or alone is left.

        Args:
            on_error: Called for each row that cannot be read, which is then left out. Such a row is counted with the
                rows of training alone: one row is not bad twice.
            key_of: Returns the key of a row's question and answer. None: all columns are compared.
        """
        holdout = self.holdout
        leave_out = (lambda _: None) if holdout and holdout.taken else on_error
        sides = Sides(holdout) if holdout and holdout.keeps_copies_together else None
        rows = in_turns([(data_set.weight, data_set.read(leave_out)) for data_set in self.sets])
        for number, (row, placed) in itertools.islice(rows, self.max_rows):
            of = self.sets[number]
            if sides:
                is_read = sides.keeps(number, key_of(of, placed) if key_of else key_of_row(placed[1]))
            else:
                is_read = holdout is None or holdout.keeps(of.first, row)
            if is_read:
                yield of, placed

    def read_on(self, at: Cursor, on_error: OnError) -> Iterator[tuple[WeightedSource, PlacedRow]]:
        """Yield the rows of the only data set from a place on, which moves along; `on_error` as for `read`."""
        (data_set,) = self.sets
        rows_left = None if self.max_rows is None else self.max_rows - at.taken
        for placed in itertools.islice(data_set.source.read(on_error, at), rows_left):
            at.taken += 1
            yield data_set, placed


def find(dataset: Dataset) -> Mixture:
    """Find the data set of a block, or those of its mixture. Errors as for `sources.find`."""
    sets = tuple(
        _weighted(number, data_set, dataset.first_alike(number)) for number, data_set in enumerate(dataset.data_sets)
    )
    return Mixture(sets, dataset.max_rows, Holdout.of(dataset))


def _weighted(number: int, data_set: Rows, first: int) -> WeightedSource:
    assert data_set.path is not None, "checked before a run starts"
    source = sources.find(data_set.path, data_set.name, data_set.split)
    weight, max_rows = (data_set.weight, data_set.max_rows) if isinstance(data_set, MixtureEntry) else (1.0, None)
    folder = paths.expanded(data_set.image_folder) if data_set.image_folder else None
    images = ImagePaths(folder, source.files)
    return WeightedSource(
        number=number,
        source=source,
        format=data_set.format,
        columns=data_set.columns,
        system=data_set.system,
        images=images,
        weight=weight,
        first=first,
        max_rows=max_rows,
    )


def in_turns(sets: Sequence[tuple[float, Iterable[T]]]) -> Iterator[tuple[int, T]]:
    """Yield the rows of several sets, each with its weight, in one order, each row with the number of its set, from 0.

    A set of weight 2 has two rows where others have one.
    """

    def timed(number: int, weight: float, rows: Iterable[T]) -> Iterator[tuple[tuple[float, int], T]]:
        for count, row in enumerate(rows):
            yield (count / weight, number), row

    by_time = heapq.merge(
        *(timed(number, *weighted) for number, weighted in enumerate(sets)), key=lambda timed_row: timed_row[0]
    )
    for (_, number), row in by_time:
        yield number, row
