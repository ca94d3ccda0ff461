"""The first rows of local data: readable, of the format, and what the objective learns from; and if there are enough.

It reads a few rows through the worker's own readers; data on the hub is the worker's to fetch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from tuner.errors import DataError
from tuner.launch.checks import Finding
from tuner.launch.resolve import ResolvedRun
from tuner.machine import few_steps as short
from tuner.recipes import paths
from tuner.recipes.schema import Rows

_NUM_ROWS = 8


def first_rows(plan: ResolvedRun) -> Iterator[Finding]:
    """Find data whose first rows cannot be read or do not fit; raises the error of the first such row."""
    config = plan.recipe.config
    for loader in (config.train_dataloader, config.val_dataloader):
        if not loader:
            continue
        shares: tuple[Rows, ...] = loader.dataset.mixture or (loader.dataset,)
        for rows in shares:
            _read(rows, config.objective.type, tolerant=loader.dataset.bad_rows > 0)
    yield from ()


def few_steps(plan: ResolvedRun) -> Iterator[Finding]:
    """Find a run of too few optimizer steps, where their number is known; one that the recipe sets is meant."""
    config, found = plan.recipe.config, plan.steps
    epochs = config.train_cfg.max_epochs
    if config.train_cfg.max_steps or found.samples.value is None:
        return
    ratio = config.param_scheduler.warmup_ratio
    told = f"{found.samples.value:,} samples ({found.samples})"
    if said := short.warning(plan.batch, epochs, found.samples.value, told, warmup_ratio=ratio):
        yield said


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
        formats.known(rows.format)
    file = _first_file(rows)
    if file is None:
        return
    from tuner.data import readers  # pyarrow: 0.3 s

    if readers.kind(file) is None:
        return
    placed = list(itertools.islice(readers.read(file, (lambda _: None) if tolerant else None), _NUM_ROWS))
    if not placed:
        return
    told = [row for _, row in placed]
    name = rows.format or formats.detect(told, str(file), columns=rows.columns, objective=objective)
    for place, row in placed:
        try:
            sample = formats.read(name, row, place, columns=rows.columns, system=rows.system)
            for_objective(sample, objective, name, place)
        except DataError as error:
            if not tolerant or not error.of_row:
                raise (formats.mixed(placed, str(file), columns=rows.columns, objective=objective) or error) from error


def _first_file(rows: Rows) -> Path | None:
    """Return the first file of local data; which files of a folder are a split's, `datasets` alone can tell."""
    place = paths.local(rows.path) if rows.path else None
    found = paths.matching(place) if place else []
    return found[0] if found and found[0].is_file() else None
