"""What a validation loss decides: which checkpoint is the best, and when training is over before its time.

All of it follows from the log that every checkpoint holds: a resumed run decides as if it had never stopped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.integrations.deepspeed import deepspeed_load_checkpoint

from tuner.recipes.schema import RecipeConfig
from tuner.runs import checkpoints
from tuner.runs.directory import RunDirectory


def best_step(state: Any) -> int | None:
    """Return the step of the lowest validation loss so far, the first of equal ones; None before any validation."""
    found = [(entry["eval_loss"], entry["step"]) for entry in state.log_history if "eval_loss" in entry]
    return int(min(found)[1]) if found else None


class Validation(TrainerCallback):  # type: ignore[misc]
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


def load_best(trainer: Any, run: RunDirectory, *, is_adapter: bool) -> int | None:
    """Give the trained model the weights of its best checkpoint; every rank takes part.

    Returns:
        Its step, or None where the last step is the best, or the checkpoint is gone.
    """
    step = best_step(trainer.state)
    folder = run.checkpoints / f"checkpoint-{step}"
    if step in (None, trainer.state.global_step) or not _is_whole(folder):
        return None
    deepspeed_load_checkpoint(trainer.model_wrapped, str(folder), load_module_strict=not is_adapter)
    return step


def _is_whole(folder: Path) -> bool:
    # A retry after running out of memory may have set the checkpoints of its first attempt aside.
    return checkpoints.inspect(folder, hashes=False) is None
