"""The learning rate's course: transformers', but for a warm-up in which no update has a rate of 0."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim.lr_scheduler import LambdaLR


class WarmsUpFromFirstUpdate:
    """Mixed into a trainer: update u of w in the warm-up, from 1, has u / w of the rate; all later ones are as before.

    transformers gives it (u - 1) / w, so that the first update of every run changes nothing, and a run of one update
    learns nothing at all.
    """

    def create_scheduler(self: Any, num_training_steps: int, optimizer: Any = None) -> LambdaLR:
        if self.lr_scheduler is None:
            made = super().create_scheduler(num_training_steps, optimizer)  # type: ignore[misc]
            num_warmup = self.args.get_warmup_steps(num_training_steps)
            factors = [partial(_factor, course, num_warmup) for course in made.lr_lambdas]
            self.lr_scheduler = LambdaLR(made.optimizer, factors)
        return self.lr_scheduler


def _factor(course: Callable[[int], float], num_warmup: int, num_updates: int) -> float:
    """Return the part of the rate that the update after `num_updates` has."""
    return (num_updates + 1) / num_warmup if num_updates < num_warmup else course(num_updates)
