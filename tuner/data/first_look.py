"""What the first rows of a data set are: their columns, their format, who learns from them, how many are bad.

It reads rows as training does, and loads no tokenizer.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from tuner import paths
from tuner.data import formats, sources
from tuner.data.images import size_of
from tuner.data.pipeline import DETECT_ROWS
from tuner.data.readers.text_files import Row
from tuner.data.sample import images_of, turns_of
from tuner.data.sample_kinds import kinds_of
from tuner.errors import DataError
from tuner.recipes.schema.objectives import OBJECTIVES

MAX_ROWS = 1_000


class UnknownFormat(DataError):
    """Rows with columns that do not tell their format."""


@dataclass(frozen=True)
class FirstLook:
    """`num_rows` were read, `num_bad` of them do not fit the format; `is_all`: there are no others.

    `has_images`: a row that fits has an image.
    """

    format: str
    columns: tuple[str, ...]
    objectives: tuple[str, ...]
    num_rows: int
    num_bad: int
    is_all: bool
    has_images: bool = False


def look(
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
    rows = list(itertools.islice(source.read(errors.append), MAX_ROWS + 1))
    if not rows and errors:
        raise errors[0]
    is_all, rows = len(rows) <= MAX_ROWS, rows[:MAX_ROWS]
    first = [row for _, row in rows[:DETECT_ROWS]]
    name = row_format or _detected(first, source.place, columns)
    has_images = False
    samples, images = 0, formats.ImagePaths(paths.expanded(image_folder) if image_folder else None, source.files)
    for place, row in rows:
        try:
            sample = formats.read(name, row, place, columns=columns, images=images)
            for image in [] if isinstance(sample, str) else images_of(turns_of(sample)):
                size_of(image, place)
                has_images = True
            samples += 1
        except DataError as error:
            if not error.of_row:
                raise
            errors.append(error)
    if not samples:
        raise errors[0]
    there = tuple(dict.fromkeys(str(column) for row in first for column in row))
    kind = formats.named(name).kind
    objectives = tuple(objective for objective in OBJECTIVES if kind in kinds_of(objective))
    return FirstLook(name, there, objectives, samples + len(errors), len(errors), is_all, has_images)


def _detected(rows: list[Row], place: str, columns: Mapping[str, str]) -> str:
    try:
        return formats.detect(rows, place, columns=columns)
    except DataError as error:
        raise UnknownFormat(error.what, where=error.where, fix=error.fix) from error
