"""What happens at the trainer's steps: signs of life, and what libraries did to the optimizer and the config."""

from __future__ import annotations

import time
from typing import Any

from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.utils import clip_grad_norm_
from transformers import TrainerCallback

from tuner.worker.guard import Guard


class Alive(TrainerCallback):  # type: ignore[misc]
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


class FreshAdam(TrainerCallback):  # type: ignore[misc]
    """Undo the step with zero gradients that DeepSpeed's stage 0 takes in 16 bits when it is set up.

    It counts in Adam's bias correction, which makes the first updates a quarter smaller than at any ZeRO stage, and it
    decays the weights once (measured on 0.19.8: loss 7.285 instead of 7.257 after one update).
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        wrapper = self.trainer.deepspeed.optimizer
        if state.global_step or not isinstance(wrapper, FP16_UnfusedOptimizer):
            return
        wrapper.optimizer.state.clear()
        for masters, weights in zip(wrapper.fp32_groups, wrapper.fp16_groups, strict=True):
            for master, weight in zip(masters, weights, strict=True):
                master.data.copy_(weight.data)


class KeptNorm(TrainerCallback):  # type: ignore[misc]
    """Keep the gradient norm that DeepSpeed 0.19.8 works out for clipping at stage 0 in fp32, and forgets."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        engine = self.trainer.deepspeed

        def clip() -> None:
            found = clip_grad_norm_(engine.module.parameters(), engine.gradient_clipping(), mpu=engine.mpu)
            engine._global_grad_norm = found.item()

        engine.clip_fp32_gradients = clip


class AsWritten(TrainerCallback):  # type: ignore[misc]
    """deepspeed.json is what training uses: a library that changed a value on the way is a bug to be seen."""

    def __init__(self, trainer: Any, zero: dict[str, Any]) -> None:
        self.trainer, self.zero = trainer, zero

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        used = self.trainer.deepspeed.config
        differs = {key for key in used.keys() | self.zero.keys() if used.get(key) != self.zero.get(key)}
        assert not differs, f"DeepSpeed was given other values than deepspeed.json holds: {sorted(differs)}"
