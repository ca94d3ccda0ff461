"""The one way of rows to samples, from a recipe's `dataset` block to what its objective learns from.

The checks before a run, training, `tuner data` and the sample answers walk it alike; they differ in what they do about
a row that is wrong. `first_look` describes data that no recipe names yet. A library that training waits for is imported
only when it is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TextIO

from tuner import paths
from tuner.data import formats, images, mixing, sources
from tuner.data.copies import RowKey, key_of, key_of_row, place_of
from tuner.data.formats.columns import renamed
from tuner.data.formats.image_places import with_images
from tuner.data.hints import hint
from tuner.data.outcomes import Tally
from tuner.data.readers import Unreadable
from tuner.data.readers.text_files import Cursor, OnError, PlacedRow, Row, fail
from tuner.data.sample import Owner, Sample, images_of, lacks, turns_of
from tuner.data.sample_kinds import WrongKind, for_objective, learners_of, marks_without_meaning, with_columns
from tuner.errors import DataError
from tuner.recipes.schema import Dataset
from tuner.recipes.schema.objectives import facts_of
from tuner.runs.records import DataCounts

DETECT_ROWS = 8
FIRST_ROWS = 1_000
_SHAPE_ROWS = 1_000

NumberedRow = tuple[int, PlacedRow]
"""A row, its place, and the number of its data set in the mixture."""
PlacedSample = tuple[str, Sample]
"""`file:line` and what the row there became."""


class _TooMany(Exception):
    """More rows are bad than may be."""


class _ReadRow(NamedTuple):
    """What a row was read as.

    Args:
        parts: The samples that the objective learns from, with the row's columns.
        unread: The keys that nothing is made of.
        left_out_by: The column that leaves the row out, as `train` = false does; None: none does.
    """

    sample: Sample
    parts: list[Sample]
    unread: list[tuple[Owner, str]]
    left_out_by: str | None


@dataclass(frozen=True)
class Pipeline:
    """The way of the rows of `dataset` to an objective.

    Each step raises DataError if the data set is wrong, or if `on_error` raises it for a wrong row, and MachineError
    if the hub cannot be reached.
    """

    dataset: Dataset
    objective: str
    decodes_images: bool = True
    """Decode each image, to find damage. False where only some rows are shown: the preparation decodes all."""

    @cached_property
    def mixture(self) -> mixing.Mixture:
        return mixing.find(self.dataset)

    @cached_property
    def formats(self) -> tuple[str, ...]:
        """The row format of each data set: the recipe's, or the one told from its first rows."""
        return tuple(
            data_set.format
            or formats.detect(
                data_set.head(DETECT_ROWS), data_set.place, columns=data_set.columns, objective=self.objective
            )
            for data_set in self.mixture.sets
        )

    @cached_property
    def hints(self) -> tuple[str, ...]:
        """Advice for data sets whose first rows have columns of another objective, if the user names no format."""
        hints = []
        for data_set, name in zip(self.mixture.sets, self.formats, strict=True):
            if data_set.format is None:
                rows = [renamed(row, data_set.columns, data_set.place) for row in data_set.head(DETECT_ROWS)]
                hints.append(hint(rows, name, self.objective))
        return tuple(dict.fromkeys(filter(None, hints)))

    def tally(self, stream: TextIO | None = None, bad_before: int = 0) -> Tally:
        """Return a tally that leaves out as many bad rows as the block allows, and lists samples in `stream`."""
        packing = self.dataset.packing and facts_of(self.objective).packs
        counts = DataCounts(self.dataset.max_length, packing, pack_length=self.dataset.pack_tokens if packing else 0)
        return Tally(counts, self.dataset.bad_rows, stream, bad_before=bad_before)

    def samples(self, tally: Tally, on_error: OnError) -> Iterator[PlacedSample]:
        """Yield what the objective learns from; `on_error` is called for each row that it cannot learn from."""
        rows = ((data_set.number, placed) for data_set, placed in self.mixture.read(on_error, self.key_of))
        return self.samples_of(rows, tally, on_error)

    def key_of(self, data_set: mixing.WeightedSource, placed: PlacedRow) -> RowKey:
        """Return the key of a row's question, with its images, and answer; of all its columns if it is no sample."""
        name, (place, row) = self.formats[data_set.number], placed
        if ":" not in name:  # a function of the user's is called once for a row
            try:
                mapped = renamed(row, data_set.columns, place)
                return key_of(with_images(formats.FORMATS[name].read(mapped), mapped, data_set.images, place))
            except (DataError, formats.Misfit):
                pass
        return key_of_row(row)

    def rows(self, at: Cursor | None = None) -> Iterator[NumberedRow | DataError]:
        """Yield the rows in their order, and in the place of a row that cannot be read its error.

        It ends if more of these follow each other than may be left out. `at`, in the only data set, is where to begin;
        it moves on with each row.
        """
        errors: dict[str | None, DataError] = {}  # since the last row; a mixture may meet the same row again

        def keep(error: DataError) -> None:
            errors[error.where] = error
            if len(errors) > self.dataset.bad_rows:
                raise _TooMany

        try:
            rows = self.mixture.read(keep, self.key_of) if at is None else self.mixture.read_on(at, keep)
            for data_set, placed in rows:
                yield from errors.values()
                errors.clear()
                yield data_set.number, placed
        except _TooMany:
            pass
        except Unreadable as error:
            errors[error.where] = error
        yield from errors.values()

    def samples_of(self, rows: Iterable[NumberedRow], tally: Tally, on_error: OnError) -> Iterator[PlacedSample]:
        """Yield the samples of some rows that the objective learns from; `on_error` as for `samples`."""
        objective_facts = facts_of(self.objective)
        rewards_get_columns = objective_facts.rows == "prompts" and not objective_facts.has_teacher
        for number, (place, row) in rows:
            tally.read(number)
            try:
                sample, parts, unread, left_out_by = self._read(
                    number, place, row, may_leave_out=not rewards_get_columns
                )
            except DataError as error:
                if not (error.of_row or isinstance(error, WrongKind)):
                    raise
                self.refuse(error, on_error if error.of_row else fail)
                continue
            if objective_facts.rows == "prompts":
                unread += (("turn", key) for key in marks_without_meaning(sample))
            for owner, key in unread:
                if not (owner in ("column", "loss column") and rewards_get_columns):
                    tally.ignore(owner, key, place)
            if left_out_by is not None:
                tally.drop(place, f"its column {left_out_by!r} leaves it out")
                continue
            tally.row_keys.append((key_of(sample), place_of(place)))  # for warnings of copies
            for part in parts:
                if reason := lacks(part):
                    tally.drop(place, reason)
                else:
                    yield place, part

    def _read(self, number: int, place: str, row: Row, *, may_leave_out: bool) -> _ReadRow:
        """Read a row of a data set. With `may_leave_out` a column of it may say that it is not trained on."""
        data_set, name = self.mixture.sets[number], self.formats[number]
        unread: list[tuple[Owner, str]] = []
        left_out_by: list[str] = []
        sample = formats.read_sample(
            name,
            row,
            place,
            columns=data_set.columns,
            system=data_set.system,
            images=data_set.images,
            trained=self.dataset.trained_turns,
            on_unread=unread.append,
            on_left_out=left_out_by.append if may_leave_out else None,
        )
        if self.decodes_images and not isinstance(sample, str):  # damage shows only at the end of an image
            for image in images_of(turns_of(sample)):
                images.load(image, place)
        parts = for_objective(sample, self.objective, name, place)
        parts_with_columns = [with_columns(part, renamed(row, data_set.columns, place)) for part in parts]
        return _ReadRow(sample, parts_with_columns, unread, next(iter(left_out_by), None))

    def refuse(self, error: DataError, on_error: OnError) -> None:
        """Call `on_error`; if it raises and the rows have several shapes, raise that: one row's advice misleads."""
        if isinstance(error, Unreadable):  # nothing is known of the rows that follow
            raise error
        try:
            on_error(error)
        except DataError as refused:
            if not (error.of_row or isinstance(error, WrongKind)):
                raise
            raise (self._several_shapes() or refused) from error

    def _several_shapes(self) -> DataError | None:
        for data_set, name in zip(self.mixture.sets, self.formats, strict=True):
            if ":" in name:  # what a function of the user's takes, nobody knows
                continue
            rows = itertools.islice(data_set.source.read(lambda _: None), _SHAPE_ROWS)
            if shapes := formats.mixed(rows, data_set.place, columns=data_set.columns, objective=self.objective):
                return shapes
        return None


class UnknownFormat(DataError):
    """Rows with columns that do not tell their format."""


@dataclass(frozen=True)
class FirstLook:
    """The format of the first rows, their columns, and the objectives that learn from them.

    `num_rows` were read, `num_bad` of them do not fit the format; `is_all`: there are no others. `has_images`: a row
    that fits has an image.
    """

    format: str
    columns: tuple[str, ...]
    objectives: tuple[str, ...]
    num_rows: int
    num_bad: int
    is_all: bool
    has_images: bool = False


def first_look(
    path: str, split: str, row_format: str | None, columns: Mapping[str, str], image_folder: str | None = None
) -> FirstLook:
    """Read the first rows of the data at `path`.

    Args:
        row_format: None: it is told from the columns.
        columns: A format's column -> the data set's.
        image_folder: Where the paths of images begin. None: in the folder of the rows' file.

    Raises:
        UnknownFormat: the format is to be told from the columns, and cannot be.
        DataError: nothing can be read there, or no row fits the format.
        MachineError: the hub cannot be reached.
    """
    errors: list[DataError] = []
    source = sources.find(path, split=split)
    rows = list(itertools.islice(source.read(errors.append), FIRST_ROWS + 1))
    if not rows and errors:
        raise errors[0]
    is_all, rows = len(rows) <= FIRST_ROWS, rows[:FIRST_ROWS]
    first = [row for _, row in rows[:DETECT_ROWS]]
    try:
        name = row_format or formats.detect(first, source.place, columns=columns)
    except DataError as error:
        raise UnknownFormat(error.what, where=error.where, fix=error.fix) from error
    has_images = False
    samples, places = 0, formats.ImagePaths(paths.expanded(image_folder) if image_folder else None, source.files)
    for place, row in rows:
        try:
            sample = formats.read_sample(name, row, place, columns=columns, images=places)
            for image in [] if isinstance(sample, str) else images_of(turns_of(sample)):
                images.size_of(image, place)
                has_images = True
            samples += 1
        except DataError as error:
            if not error.of_row:
                raise
            errors.append(error)
    if not samples:
        raise errors[0]
    column_names = tuple(dict.fromkeys(str(column) for row in first for column in row))
    learners = learners_of(formats.named(name).kind)
    return FirstLook(name, column_names, learners, samples + len(errors), len(errors), is_all, has_images)
