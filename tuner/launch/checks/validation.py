"""Whether a run has rows for its training and its validations, and enough validations for what is asked of them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tuner.data.holdout import no_rows
from tuner.errors import Key
from tuner.launch import row_counts
from tuner.launch.checks import Finding
from tuner.launch.resolved_run import ResolvedRun

_SPLIT = "train_dataloader.dataset.val_split"
_PATIENCE = "train_cfg.early_stopping_patience"


def held_out(run: ResolvedRun) -> Iterator[Finding]:
    """Find a split that leaves no row to train on, or none to validate on: equal rows are held out together."""
    dataset, objective = run.recipe.config.train_dataloader.dataset, run.recipe.config.objective.type
    if dataset.val_split is None:
        return
    left = {"training": run.steps.rows.value, "validation": row_counts.num_held_out(dataset, objective)}
    rows = row_counts.read_rows(dataset, objective) or ()
    num_different, why = len({row.key for row in rows}), ""
    if dataset.val_copies == "together" and num_different < len(rows):
        why = f": equal rows are held out together, and {num_different:,} of the {len(rows):,} rows are different"
    yield from (no_rows(dataset, split, _SPLIT, why) for split, num_left in left.items() if num_left == 0)


def early_stopping(run: ResolvedRun) -> Iterator[Finding]:
    """Find early stopping that can end no run of so few validations.

    One is the best, `early_stopping_patience` others follow it, and the one at the last step ends nothing early.
    """
    train_cfg, total = run.recipe.config.train_cfg, run.steps.total.value
    patience, interval = train_cfg.early_stopping_patience, _interval(run)
    if not (patience and total and interval):
        return
    wanted, made = patience + 2, math.ceil(total / interval)
    if made >= wanted:
        return
    told = f"{_PATIENCE} = {patience} cannot end this run early: that takes {wanted} validations, and it has {made}"
    often = total // wanted
    instead = f"{Key('train_cfg.val_interval', often)}" if often else f"{Key(_PATIENCE, None)}"
    yield f"{told} (one each {interval:,} of {total:,} steps). Try {instead}."


def _interval(run: ResolvedRun) -> int | None:
    """Return the optimizer steps between two validations; None where the steps of an epoch are not known."""
    interval, total = run.recipe.config.train_cfg.val_interval, run.steps.total.value
    if isinstance(interval, float):
        return math.ceil(interval * total) if total else None
    return interval or run.steps.per_epoch.value
