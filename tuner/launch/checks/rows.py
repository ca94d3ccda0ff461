"""The first rows of local data: readable, of the format, and what the objective learns from; and if there are enough.

They take the way of training's rows; data on the hub is the worker's to fetch.
"""

from __future__ import annotations

from collections.abc import Iterator

from tuner import paths
from tuner.launch import steps
from tuner.launch.checks import Finding
from tuner.launch.run import ResolvedRun
from tuner.recipes.schema import Dataset, Rows

_NUM_ROWS = 8


def first_rows(run: ResolvedRun) -> Iterator[Finding]:
    """Find data whose first rows cannot be read or do not fit; raises the error of the first such row."""
    config = run.recipe.config
    for loader in config.loaders.values():
        for rows in loader.dataset.shares:
            _read(rows, loader.dataset, config.objective.type)
    yield from ()


def streamed(run: ResolvedRun) -> Iterator[Finding]:
    """Find a data set that is to be streamed, and cannot be read from any row on; of a folder the ranks see it."""
    rows = run.recipe.config.train_dataloader.dataset
    if not rows.streaming or not rows.path:
        return
    from tuner.data import sources  # a plan of data that is prepared whole does not need it

    place = paths.local(rows.path)
    if place is None or _are_files(rows):
        sources.check_stream(rows.path, paths.matching(place) if place else ())
    yield from ()


def few_steps(run: ResolvedRun) -> Iterator[Finding]:
    """Find a run of too few optimizer steps."""
    if warning := steps.too_few(run.recipe.config, run.batch, run.steps):
        yield warning


def _read(rows: Rows, dataset: Dataset, objective: str) -> None:
    """Take the first rows of one data set of a block to samples; bad ones may be left out, and are counted in training.

    Raises:
        DataError: there is no such format, or a row cannot be read or is not what the objective learns from.
    """
    # A row function of the user's is run in the ranks alone: it may do anything, and import torch.
    if ":" in (rows.format or ""):
        return
    from tuner.data import formats  # a plan does not need it
    from tuner.data.pipeline import Pipeline
    from tuner.data.readers.text_files import OnError, fail

    if rows.format:
        formats.named(rows.format)
    if not _are_files(rows):
        return
    of_rows = {name: getattr(rows, name) for name in Rows.model_fields}
    block = dataset.model_copy(update={**of_rows, "mixture": None, "max_rows": _NUM_ROWS, "val_split": None})
    on_error: OnError = (lambda _: None) if dataset.bad_rows else fail
    pipeline = Pipeline(block, objective)
    for _ in pipeline.samples(pipeline.tally(), on_error):
        pass


def _are_files(rows: Rows) -> bool:
    """Say whether rows are in files here; which files of a folder are a split's, `datasets` alone can tell."""
    place = paths.local(rows.path) if rows.path else None
    files = paths.matching(place) if place else []
    return bool(files) and all(file.is_file() for file in files)
