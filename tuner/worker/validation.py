"""What a validation loss decides: which checkpoint is the best, and when training is over before its time.

All of it follows from the log that every checkpoint holds: a resumed run decides as if it had never stopped.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from tuner.recipes.schema import RecipeConfig


def best_step(state: Any) -> int | None:
    """Return the step of the lowest validation loss so far, the first of equal ones; None before any validation."""
    found = [(entry["eval_loss"], entry["step"]) for entry in state.log_history if "eval_loss" in entry]
    return int(min(found)[1]) if found else None


class ValidationCallback(TrainerCallback):  # type: ignore[misc]
    """Saves at every best validation loss, and ends training when it gets no better, as far as the recipe says so."""

    def __init__(self, config: RecipeConfig) -> None:
        self.keeps_best, self.patience = bool(config.checkpoint.save_best), config.train_cfg.early_stopping_patience

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        steps = [entry["step"] for entry in state.log_history if "eval_loss" in entry]
        best = best_step(state)
        if self.keeps_best and best == state.global_step:
            control.should_save = True
        if self.patience and len(steps) - 1 - steps.index(best) >= self.patience:
            control.should_training_stop = True
