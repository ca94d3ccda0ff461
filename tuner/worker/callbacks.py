"""Callbacks of a run: signs of life, decisions after a validation, checks of the head, the weights and the rewards."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from peft import PeftModel
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tuner.errors import RecipeError, TunerError
from tuner.recipes.schema import RecipeConfig
from tuner.recipes.schema.objective import ObjectiveFacts
from tuner.runs.beats import Phase
from tuner.runs.directory import RunDirectory
from tuner.worker import loss
from tuner.worker.checkpointing import best_step, validations
from tuner.worker.guard import Guard
from tuner.worker.process import warn
from tuner.worker.step_log import peak_bytes
from tuner.worker.trainer_types import BuiltTrainer

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer type with the same number of bytes as a weight."""
_KEPT = "The checkpoints are kept."
_FIRST_STEPS = 10
_FEW_ROWS = 500
"""The validation before training measures at least this many rows, if there are that many."""


def own_callback(name: str) -> TrainerCallback:
    """Return a new object of a user's class, which is named as in `my_package.my_module:MyCallback`.

    Raises:
        RecipeError: there is no such class, or it is not a TrainerCallback.
    """
    where, fix = "train_cfg.callbacks", "Write it as 'my_package.my_module:MyCallback'."
    module, _, kind = name.partition(":")
    try:
        callback = getattr(importlib.import_module(module), kind, None) if module and kind else None
    except ImportError as error:
        message = f"cannot import {module!r}: {error}"
        raise RecipeError(message, where=where, fix="Put the folder that holds it on PYTHONPATH.") from error
    if not (isinstance(callback, type) and issubclass(callback, TrainerCallback)):
        raise RecipeError(f"{name!r} is not a class of transformers' TrainerCallback", where=where, fix=fix)
    return callback()


class HeartbeatCallback(TrainerCallback):  # type: ignore[misc]
    """Tells the watchdog that this rank makes progress, and what its time goes into: steps, validations, saves."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.since_s = time.monotonic()

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        self.guard.step = state.global_step + 1
        self.guard.heart.beat(f"in step {self.guard.step}", Phase.STEPS)

    def on_substep_end(self, *_: object, **__: object) -> None:
        self.guard.heart.beat(f"in step {self.guard.step}")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self.since_s, self.guard.heart.step = time.monotonic(), state.global_step
        self.guard.heart.peak_bytes = peak_bytes()
        if (text := self.guard.heart.end_step()) and args.process_index == 0:
            print(text, flush=True)
        self._begin_what_follows(state, control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self._begin_what_follows(state, control)

    def _begin_what_follows(self, state: TrainerState, control: TrainerControl) -> None:
        doing = f"saving step {state.global_step}" if control.should_save else f"in step {self.guard.step}"
        saves = Phase.SAVES if control.should_save else Phase.STEPS
        self.guard.heart.beat(doing, Phase.VALIDATION if control.should_evaluate else saves)

    def on_prediction_step(self, *_: object, **__: object) -> None:
        self.guard.heart.beat("validating", Phase.VALIDATION)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self.since_s = time.monotonic()
        after = Phase.STEPS if self.guard.step else Phase.STARTUP  # it is None before the first step
        self.guard.heart.enter(Phase.SAVES if control.should_save else after)

    def on_save(self, *_: object, **__: object) -> None:
        self.guard.heart.saved(time.monotonic() - self.since_s)
        self.guard.heart.enter(Phase.STEPS)

    def on_train_end(self, *_: object, **__: object) -> None:
        self.guard.heart.enter(Phase.FINISH)


class CheckWeightsMoved(TrainerCallback):  # type: ignore[misc]
    """Checks that training changed the weights: it compares their bits before and after."""

    def __init__(self, trainer: BuiltTrainer, objective_facts: ObjectiveFacts) -> None:
        self.trainer, self.facts = trainer, objective_facts
        self._before: torch.Tensor | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        if state.global_step == 0:  # the last steps of a resumed run may change too little
            self._before = self._sums()

    def check(self) -> None:
        """Refuse the result of a run that changed no weight.

        Raises:
            TunerError: every trained weight has the value that it had before the first step, on all ranks.
        """
        after, state = self._sums(), self.trainer.state
        if self._before is None or after is None or not state.global_step:
            return
        moved = (self._before != after).any().int()
        dist.all_reduce(moved, op=dist.ReduceOp.MAX)
        if not moved:
            lr = self.trainer.args.learning_rate
            message = f"no trained weight changed in {state.global_step} steps"
            norms = [line["grad_norm"] for line in state.log_history if "grad_norm" in line]
            if norms and not any(norms):
                message, fix = f"{message}, because every gradient was 0", f"{self._if_gradients_are_0()} {_KEPT}"
                raise TunerError(message, where="objective", fix=fix)
            fix = f"Raise the learning rate, which is {lr:g}, or train longer. {_KEPT}"
            raise TunerError(message, where="optim_wrapper.optimizer.lr", fix=fix)

    def _if_gradients_are_0(self) -> str:
        if self.facts.has_teacher:
            return "The student already has the teacher's probabilities: name another teacher."
        if self.facts.generates:
            return (
                "All completions of a prompt got the same reward (reward_std in metrics.jsonl is 0): use a reward that"
                " is not the same for all of them, such as one that is not only 0 or 1, or easier prompts."
            )
        return "Look at the rows as the model sees them: tuner data."

    def _sums(self) -> torch.Tensor | None:
        """Return the sum of each trained weight's bits on this rank; None if weights are on a disk (NVMe)."""
        trained = [weight for weight in self.trainer.model.parameters() if weight.requires_grad]
        weights = [getattr(weight, "ds_tensor", weight) for weight in trained]
        if not all(weight.numel() for weight in weights):
            return None
        return torch.stack([_sum_of_bits(weight.detach()).to(self.trainer.args.device) for weight in weights])


def _sum_of_bits(weight: torch.Tensor) -> torch.Tensor:
    """Return the sum of a weight's bits, 64 of them at a time where they lie so: on a CPU a 17th of the time."""
    size = weight.element_size()
    if weight.is_contiguous() and weight.storage_offset() * size % 8 == weight.nbytes % 8 == 0:
        return weight.view(-1).view(torch.int64).sum()
    return weight.view(_BITS[size]).sum(dtype=torch.int64)


class CheckLoraLearns(TrainerCallback):  # type: ignore[misc]
    """Warns of LoRA that no gradient has reached in the first steps: it never learns.

    An expert of a module of its own has no gradient either until a token has chosen it, so it waits for a few steps.
    """

    def __init__(self, trainer: BuiltTrainer, run_dir: RunDirectory) -> None:
        self.trainer, self.run_dir = trainer, run_dir
        self.arrived: dict[str, bool] = {}
        self.hooks: list[RemovableHandle] = []
        self.steps = 0

    def on_train_begin(self, *_: object, **__: object) -> None:
        for name, weight in self.trainer.model.named_parameters():
            if weight.requires_grad and "lora_" in name:
                self.arrived[name] = False
                self.hooks.append(weight.register_hook(partial(self._arrive, name)))

    def on_step_end(self, args: TrainingArguments, *_: object, **__: object) -> None:
        self.steps += 1
        if self.steps == _FIRST_STEPS:
            self._tell(args)

    def on_train_end(self, args: TrainingArguments, *_: object, **__: object) -> None:
        if 0 < self.steps < _FIRST_STEPS:
            self._tell(args)

    def _arrive(self, name: str, _: torch.Tensor) -> None:
        self.arrived[name] = True

    def _tell(self, args: TrainingArguments) -> None:
        for hook in self.hooks:
            hook.remove()
        arrived = torch.tensor([*self.arrived.values()], dtype=torch.float32, device=args.device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(arrived, dist.ReduceOp.MAX)
        lacking = [name for name, has_arrived in zip(self.arrived, arrived.tolist(), strict=True) if not has_arrived]
        if lacking and args.process_index == 0:
            steps = f"the first {self.steps} steps" if self.steps > 1 else "the first step"
            number = f"{len(lacking)} of the adapter's {len(self.arrived)} weights"
            text = f"no gradient has reached {number} in {steps}, such as {lacking[0]}"
            warn(self.run_dir, f"{text}: the model computes past them, so they do not learn.")


class CheckHead(TrainerCallback):  # type: ignore[misc]
    """Computes the loss from whole logits if TRL's head, which computes them in tiles, would give other values."""

    def __init__(self, trainer: BuiltTrainer, use_whole_logits: Callable[[], None], run_dir: RunDirectory) -> None:
        self.trainer, self.use_whole_logits, self.run_dir = trainer, use_whole_logits, run_dir

    def on_train_begin(self, args: TrainingArguments, *_: object, **__: object) -> None:
        model = self.trainer.model
        trained = model.get_base_model() if isinstance(model, PeftModel) else model
        is_same = torch.tensor(float(loss.tiles_give_its_logits(trained, self.trainer.model_wrapped)))
        if dist.is_initialized() and dist.get_world_size() > 1:
            is_same = is_same.to(args.device)
            dist.all_reduce(is_same, dist.ReduceOp.MIN)  # all ranks decide alike, even if they differ in the last bit
        if not is_same:
            self.use_whole_logits()
            if args.process_index == 0:
                name = type(trained).__name__
                why = f"{name} changes its logits behind the head, so train_cfg.loss='chunked' would be a wrong loss"
                warn(self.run_dir, f"{why}: whole logits are computed, which takes more memory than planned.")


class ValidateAtStart(TrainerCallback):  # type: ignore[misc]
    """Measures the validation loss before the first step; the end of training is compared with it.

    Of a large validation set it measures a part of the rows, spread evenly, so that this takes at most about a tenth of
    the training time. A resumed run does the validation that was due at the checkpoint's step, if a stop or a kill came
    before its end: its log, its best checkpoint and its early stopping are as if it had never stopped.
    """

    def __init__(self, trainer: BuiltTrainer, global_batch: int) -> None:
        self.trainer, self.global_batch = trainer, global_batch

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        rows = self.trainer.eval_dataset
        if rows is None or (state.global_step and not _validation_is_due(args, state)):
            return
        # A forward pass takes a third of a training step.
        limit = max(_FEW_ROWS, 3 * state.max_steps * self.global_batch // 10)
        if not state.global_step and len(rows) > limit:
            rows = rows.select([index * len(rows) // limit for index in range(limit)])
        self.trainer.evaluate(rows)


def _validation_is_due(args: TrainingArguments, state: TrainerState) -> bool:
    """Return whether a run that has taken these steps validates before the next one, and has not."""
    step = state.global_step
    if any(validated == step for validated, _ in validations(state)):
        return False
    if step >= state.max_steps:
        return True
    return step % state.eval_steps == 0 if args.eval_strategy == "steps" else float(state.epoch).is_integer()


class ValidationCallback(TrainerCallback):  # type: ignore[misc]
    """Saves at each new lowest validation loss, and stops training early, if the recipe asks for it.

    It decides by the log, which every checkpoint holds, so a resumed run decides as if it had never stopped.
    """

    def __init__(self, config: RecipeConfig) -> None:
        self.keeps_best, self.patience = bool(config.checkpoint.save_best), config.train_cfg.early_stopping_patience

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        best = best_step(state)
        if best is None:  # the validation before the first step decides nothing
            return
        steps = [step for step, _ in validations(state)]
        if self.keeps_best and best == state.global_step:
            control.should_save = True
        if self.patience and len(steps) - 1 - steps.index(best) >= self.patience:
            control.should_training_stop = True


REWARD_STEPS = 20
"""A warning about rewards needs a value that stays wrong for so many steps."""


_SIGNS = (
    (
        "frac_reward_zero_std",
        1.0,
        "no group of completions had different rewards for {steps} steps, so nothing is learned: use prompts that the "
        "model solves sometimes, a reward with more than two values, or a higher objective.temperature (docs/grpo.md)",
    ),
    (
        "completions/clipped_ratio",
        0.5,
        "half or more of the completions reached objective.max_completion_length for {steps} steps and end without an "
        "answer: raise it, or reward shorter completions (docs/grpo.md)",
    ),
    (
        "kl",
        1.0,
        "the KL divergence from the reference model is above 1 nat per token for {steps} steps, so the model may have "
        "lost its language: read completions.jsonl, lower the learning rate or raise objective.beta (docs/grpo.md)",
    ),
)
"""Warnings about rewards: of a logged value that was at least so large in all of the last steps."""


class WatchRewards(TrainerCallback):  # type: ignore[misc]
    """Warns once of each sign, on rank 0: no signal, completions that are cut, a model far from its reference."""

    def __init__(self, run_dir: RunDirectory) -> None:
        self.run_dir = run_dir
        self.since: dict[str, int] = {}
        self.warned: set[str] = set()
        self.last = 0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        self.last = state.global_step

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        *_: object,
        logs: Mapping[str, float] | None = None,
        **__: object,
    ) -> None:
        # A step that reuses completions logs no reward.
        if not logs or "reward_std" not in logs or (dist.is_initialized() and dist.get_rank() != 0):
            return
        for key, least, text in _SIGNS:
            if logs.get(key, 0.0) < least:
                self.since.pop(key, None)
                continue
            steps = state.global_step - self.since.setdefault(key, self.last)
            if steps >= REWARD_STEPS and key not in self.warned:
                self.warned.add(key)
                warn(self.run_dir, f"At step {state.global_step}: {text.format(steps=steps)}.")
        self.last = state.global_step
