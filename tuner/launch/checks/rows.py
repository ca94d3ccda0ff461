"""The first rows of local data: readable, of the format, and what the objective learns from; and if there are enough.

It reads a few rows through the worker's own readers; data on the hub is the worker's to fetch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from tuner.data import readers
from tuner.data.readers.text import OnError, fail
from tuner.errors import DataError
from tuner.launch import steps
from tuner.launch.checks import Finding
from tuner.launch.resolve import ResolvedRun
from tuner.recipes import paths
from tuner.recipes.schema import Rows

_NUM_ROWS = 8


def first_rows(run: ResolvedRun) -> Iterator[Finding]:
    """Find data whose first rows cannot be read or do not fit; raises the error of the first such row."""
    config = run.recipe.config
    for loader in (config.train_dataloader, config.val_dataloader):
        if not loader:
            continue
        shares: tuple[Rows, ...] = loader.dataset.mixture or (loader.dataset,)
        for rows in shares:
            _read(rows, config.objective.type, tolerant=loader.dataset.bad_rows > 0)
    yield from ()


def few_steps(run: ResolvedRun) -> Iterator[Finding]:
    """Find a run of too few optimizer steps."""
    if warning := steps.too_few(run.recipe.config, run.batch, run.steps):
        yield warning


def _read(rows: Rows, objective: str, *, tolerant: bool) -> None:
    """Read the first rows as training will; `tolerant`: bad ones may be left out, and are counted there.

    Raises:
        DataError: there is no such format, or a row cannot be read or is not what the objective learns from.
    """
    # A row function of the user's is run in the ranks alone: it may do anything, and import torch.
    if ":" in (rows.format or ""):
        return
    from tuner.data import formats  # a plan does not need it
    from tuner.data.sample import for_objective

    if rows.format:
        formats.named(rows.format)
    file = _first_file(rows)
    if file is None or readers.kind(file) is None:
        return
    on_error: OnError = (lambda _: None) if tolerant else fail
    placed = list(itertools.islice(readers.read(file, on_error), _NUM_ROWS))
    if not placed:
        return
    place, columns = str(file), rows.columns
    name = rows.format or formats.detect([row for _, row in placed], place, columns=columns, objective=objective)
    for where, row in placed:
        try:
            sample = formats.read(name, row, where, columns=columns, system=rows.system)
            for_objective(sample, objective, name, where)
        except DataError as error:
            if not (tolerant and error.of_row):
                raise (formats.mixed(placed, place, columns=columns, objective=objective) or error) from error


def _first_file(rows: Rows) -> Path | None:
    """Return the first file of local data; which files of a folder are a split's, `datasets` alone can tell."""
    place = paths.local(rows.path) if rows.path else None
    files = paths.matching(place) if place else []
    return files[0] if files and files[0].is_file() else None
