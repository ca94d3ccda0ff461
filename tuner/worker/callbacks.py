"""What happens at the steps: signs of life, what a validation decides, and whether the weights have moved."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
from transformers import TrainerCallback

from tuner.errors import RecipeError, TunerError
from tuner.recipes.schema import RecipeConfig
from tuner.runs.directory import RunDirectory
from tuner.worker import loss
from tuner.worker.checkpointing import best_step, validations
from tuner.worker.guard import Guard
from tuner.worker.process import warn

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""An integer of as many bytes as a number."""
_FEW_ROWS = 500
"""Validation rows that are measured before training however few are trained on."""


def own_callback(name: str) -> TrainerCallback:
    """Return a new object of the class that `my_package.my_module:MyCallback` names.

    Raises:
        RecipeError: there is no such class, or it is of another kind.
    """
    where, fix = "train_cfg.callbacks", "Write it as 'my_package.my_module:MyCallback'."
    module, _, kind = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), kind, None) if module and kind else None
    except ImportError as error:
        what = f"cannot import {module!r}: {error}"
        raise RecipeError(what, where=where, fix="Put the folder that holds it on PYTHONPATH.") from error
    if not (isinstance(found, type) and issubclass(found, TrainerCallback)):
        raise RecipeError(f"{name!r} is not a class of transformers' TrainerCallback", where=where, fix=fix)
    return found()


class HeartbeatCallback(TrainerCallback):  # type: ignore[misc]
    """Tells the watchdog that this rank goes on: at micro-batches, validation steps and phases of training."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.since_s = time.monotonic()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.guard.step = state.global_step + 1
        self.guard.heart.beat(f"in step {self.guard.step}")

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.guard.heart.beat(f"in step {self.guard.step}")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.since_s = time.monotonic()
        self.guard.heart.beat(
            f"saving step {state.global_step}" if control.should_save else f"in step {self.guard.step}"
        )

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.guard.heart.beat("validating")

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.since_s = time.monotonic()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.guard.heart.saved(time.monotonic() - self.since_s)


class CheckWeightsMoved(TrainerCallback):  # type: ignore[misc]
    """Tells a run that taught nothing from one that did: by the bits of the trained weights before and after."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self._before = trainer, None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:  # what is left of a run that goes on may be too little to see
            self._before = self._sums()

    def check(self) -> None:
        """Refuse the result of a whole run that is what it started from.

        Raises:
            TunerError: no trained weight has another value than before the first step, on any rank.
        """
        after, state = self._sums(), self.trainer.state
        if self._before is None or after is None or not state.global_step:
            return
        moved = (self._before != after).any().int()
        dist.all_reduce(moved, op=dist.ReduceOp.MAX)
        if not moved:
            lr = self.trainer.args.learning_rate
            what = f"no trained weight changed in {state.global_step} steps"
            fix = f"Raise the learning rate, which is {lr:g}, or train longer; the checkpoints are kept."
            raise TunerError(what, where="optim_wrapper.optimizer.lr", fix=fix)

    def _sums(self) -> torch.Tensor | None:
        """Return the sum of each trained weight's bits on this rank; None where weights are not in memory (NVMe)."""
        weights = [getattr(one, "ds_tensor", one) for one in self.trainer.model.parameters() if one.requires_grad]
        if not all(one.numel() for one in weights):
            return None
        sums = [one.detach().view(_BITS[one.element_size()]).sum(dtype=torch.int64) for one in weights]
        return torch.stack([one.to(self.trainer.args.device) for one in sums])


class CheckHead(TrainerCallback):  # type: ignore[misc]
    """Computes the loss from whole logits where those of TRL's head, a tile at a time, would be others."""

    def __init__(self, trainer: Any, use_whole_logits: Callable[[], None], run: RunDirectory) -> None:
        self.trainer, self.use_whole_logits, self.run = trainer, use_whole_logits, run

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        model = self.trainer.model
        trained = model.get_base_model() if isinstance(model, PeftModel) else model
        is_same = torch.tensor(float(loss.tiles_give_its_logits(trained, self.trainer.model_wrapped)))
        if dist.is_initialized() and dist.get_world_size() > 1:
            is_same = is_same.to(args.device)
            dist.all_reduce(is_same, dist.ReduceOp.MIN)  # ranks that differ in the last bit take one way
        if not is_same:
            self.use_whole_logits()
            if args.process_index == 0:
                name = type(trained).__name__
                why = f"{name} changes its logits behind the head, so train_cfg.loss='chunked' would be a wrong loss"
                warn(self.run, f"{why}: whole logits are computed, which takes more memory than planned.")


class ValidateFirst(TrainerCallback):  # type: ignore[misc]
    """Measures the validation loss before the first step: what training is compared with when it ends.

    A large validation set is measured on a part of its rows, spread evenly, so that this takes at most about a tenth of
    the time of training.
    """

    def __init__(self, trainer: Any, global_batch: int) -> None:
        self.trainer, self.global_batch = trainer, global_batch

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        rows = self.trainer.eval_dataset
        if state.global_step or rows is None:
            return
        # A forward pass takes a third of a training step.
        most = max(_FEW_ROWS, 3 * state.max_steps * self.global_batch // 10)
        if len(rows) > most:
            rows = rows.select([index * len(rows) // most for index in range(most)])
        self.trainer.evaluate(rows)


class ValidationCallback(TrainerCallback):  # type: ignore[misc]
    """Saves at every best validation loss, and ends training when it gets no better, as far as the recipe says so.

    All of it follows from the log that every checkpoint holds: a resumed run decides as if it had never stopped.
    """

    def __init__(self, config: RecipeConfig) -> None:
        self.keeps_best, self.patience = bool(config.checkpoint.save_best), config.train_cfg.early_stopping_patience

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        best = best_step(state)
        if best is None:  # the validation before the first step decides nothing
            return
        steps = [step for _, step in validations(state)]
        if self.keeps_best and best == state.global_step:
            control.should_save = True
        if self.patience and len(steps) - 1 - steps.index(best) >= self.patience:
            control.should_training_stop = True
