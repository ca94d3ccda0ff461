"""What a recipe's settings say against a run, whatever machine it is on: rows, steps, validations, rates, unread keys.

The schema refuses what never has an effect with another value of the same block. Here are keys that other blocks, or
the data, make useless; a recipe that is used with several of them may well keep them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from operator import attrgetter

from tuner import paths
from tuner.data.holdout import no_rows
from tuner.errors import Key, RecipeError
from tuner.launch import row_counts, steps
from tuner.launch.checks import Finding
from tuner.launch.resolved_run import ResolvedRun
from tuner.recipes.merging import Kind, lookup
from tuner.recipes.recipe import Recipe, read_base
from tuner.recipes.schema import RecipeConfig

_ROWS = "train_dataloader.dataset"
_PATIENCE = "train_cfg.early_stopping_patience"
_HIGH_RATE = 1e-2
"""Above it even a small new model rarely learns with Adam."""
_POLYNOMIAL_END = 1e-7
"""The `lr_end` of transformers' polynomial schedule, which raises ValueError for a rate that is not above it (5.24)."""


def held_out(run: ResolvedRun) -> Iterator[Finding]:
    """Find a split that leaves no row to train on, or none to validate on: equal rows are held out together."""
    dataset, objective = run.recipe.config.train_dataloader.dataset, run.recipe.config.objective.type
    if dataset.val_split is None:
        return
    rows_of_split = {"training": run.steps.rows.value, "validation": row_counts.num_held_out(dataset, objective)}
    rows = row_counts.read_rows(dataset, objective) or ()
    num_different, why = len({row.key for row in rows}), ""
    if dataset.val_copies == "together" and num_different < len(rows):
        why = f": equal rows are held out together, and {num_different:,} of the {len(rows):,} rows are different"
    yield from (
        no_rows(dataset, split, f"{_ROWS}.val_split", why) for split, num_left in rows_of_split.items() if num_left == 0
    )


def early_stopping(run: ResolvedRun) -> Iterator[Finding]:
    """Find early stopping that can end no run of so few validations.

    One is the best, `early_stopping_patience` others follow it, and the one at the last step ends nothing early.
    """
    train_cfg, total = run.recipe.config.train_cfg, run.steps.total.value
    patience, interval = train_cfg.early_stopping_patience, _interval(run)
    if not (patience and total and interval):
        return
    needed, made = patience + 2, math.ceil(total / interval)
    if made >= needed:
        return
    problem = f"{_PATIENCE} = {patience} cannot end this run early: that takes {needed} validations, and it has {made}"
    often = total // needed
    instead = f"{Key('train_cfg.val_interval', often)}" if often else f"{Key(_PATIENCE, None)}"
    yield f"{problem} (one each {interval:,} of {total:,} steps). Try {instead}."


def _interval(run: ResolvedRun) -> int | None:
    """Return the optimizer steps between two validations; None where the steps of an epoch are not known."""
    interval, total = run.recipe.config.train_cfg.val_interval, run.steps.total.value
    if isinstance(interval, float):
        return math.ceil(interval * total) if total else None
    return interval or run.steps.per_epoch.value


def few_steps(run: ResolvedRun) -> Iterator[Finding]:
    """Find a run of too few optimizer steps, or of fewer than its warm-up."""
    yield from steps.warnings(run.recipe.config, run.batch, run.steps)


def polynomial(run: ResolvedRun) -> Iterator[Finding]:
    """Find a rate that the polynomial schedule of transformers cannot begin with."""
    config = run.recipe.config
    if config.param_scheduler.type == "polynomial" and config.optim_wrapper.optimizer.lr <= _POLYNOMIAL_END:
        ends = f"the polynomial schedule ends at a rate of {_POLYNOMIAL_END:g}"
        problem = f"{ends}, and lr = {config.optim_wrapper.optimizer.lr:g} is not above it"
        fix = "Use another schedule such as param_scheduler.type=linear, or a higher lr."
        yield RecipeError(problem, where="param_scheduler.type", fix=fix)


def high_rate(run: ResolvedRun) -> Iterator[Finding]:
    """Find a learning rate that is likely a slip of the keys: 1e-1 for 1e-4."""
    optimizer = run.recipe.config.optim_wrapper.optimizer
    if "Adam" in optimizer.type and optimizer.lr > _HIGH_RATE:
        yield (
            f"lr = {optimizer.lr:g} is likely to destroy what the model knows: with {optimizer.type}, 2e-4 is usual "
            "for an adapter and 2e-5 for all weights."
        )


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
    if not steps.packs(config):
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
