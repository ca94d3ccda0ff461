"""Keys that a user has set and that nothing reads in this run: each is named, with why.

The schema refuses what never has an effect with another value of the same block. Here are keys that other blocks, or
the data, make useless; a recipe that is used with several of them may well keep them.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from tuner import paths
from tuner.launch.checks import Finding
from tuner.launch.resolved_run import ResolvedRun
from tuner.launch.steps import packs
from tuner.recipes.merging import Kind, lookup
from tuner.recipes.recipe import Recipe, read_base
from tuner.recipes.schema import RecipeConfig

_ROWS = "train_dataloader.dataset"


def unread_keys(run: ResolvedRun) -> Iterator[Finding]:
    """Find keys that the user has set, and that nothing reads."""
    for key, why in _unread(run.recipe.config):
        if _is_set(run.recipe, key):
            yield f"{key} = {attrgetter(key)(run.recipe.config)!r} has no effect: {why}."


def _is_set(recipe: Recipe, key: str) -> bool:
    """Return whether a flag has set a key to something, or a file to something else than its default.

    A file that tuner has written, such as a run's recipe.py, holds every key.
    """
    origin, value = recipe.origins.get(key), attrgetter(key)(recipe.config)
    if origin is None or value in (None, False):
        return False
    differs = value != lookup(read_base().values, key.split("."))
    return origin.place.kind is Kind.FLAG or (origin.place.kind is Kind.FILE and differs)


def _unread(config: RecipeConfig) -> Iterator[tuple[str, str]]:
    """Yield each key that nothing reads, with why."""
    rows, optimizer = config.train_dataloader.dataset, config.optim_wrapper.optimizer
    if not config.reads_images:
        for key in ("image_max_pixels", "image_min_pixels", "image_folder"):
            yield f"{_ROWS}.{key}", "the model reads text alone"
    if not optimizer.facts.has_betas:
        yield "optim_wrapper.optimizer.betas", f"{optimizer.type} has none"
    if not optimizer.facts.has_eps:
        yield "optim_wrapper.optimizer.eps", f"{optimizer.type} has none"
    if not config.objective.facts.packs:
        yield f"{_ROWS}.packing", f"the samples of {config.objective.type} are not packed"
    if not packs(config):
        yield f"{_ROWS}.pack_length", "samples are not packed"
    if rows.val_split is None:
        yield f"{_ROWS}.val_seed", "no rows are held out (val_split)"
    if not rows.mixture and rows.path and (local_path := paths.local(rows.path)):
        yield f"{_ROWS}.name", "it chooses a configuration of a data set on the hub"
        if not paths.is_folder(local_path) and "[" not in rows.split and rows.split != "train":
            yield f"{_ROWS}.split", "a file is one split, and all of its rows are read"
    if not config.log.generate:
        yield "log.max_new_tokens", "it belongs to log.generate, which is 0"
    if config.checkpoint.repository is None:
        yield "checkpoint.private", "nothing is pushed to the hub (checkpoint.repository)"
