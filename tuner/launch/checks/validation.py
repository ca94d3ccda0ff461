"""Whether the validations of a run are enough for what the recipe asks of them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tuner.errors import Key
from tuner.launch.checks import Finding
from tuner.launch.resolved_run import ResolvedRun

_PATIENCE = "train_cfg.early_stopping_patience"


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
