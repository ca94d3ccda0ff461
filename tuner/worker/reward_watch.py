"""Warnings while a run learns from rewards: no signal, completions that are cut, and a model far from its reference.

It reads the values that TRL logs and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tuner.runs.directory import RunDirectory
from tuner.worker.process import warn

STEPS = 20
"""A warning needs a value that stays wrong for so many steps."""


@dataclass(frozen=True)
class _Sign:
    """One warning: a logged value of at least `least` in all steps."""

    key: str
    least: float
    text: str


SIGNS = (
    _Sign(
        "frac_reward_zero_std",
        1.0,
        "no group of completions had different rewards for {steps} steps, so nothing is learned: use prompts of which "
        "the model solves some, a reward with more than two values, or a higher objective.temperature (docs/grpo.md)",
    ),
    _Sign(
        "completions/clipped_ratio",
        0.5,
        "half or more of the completions reached objective.max_completion_length for {steps} steps and end without an "
        "answer: raise it, or reward shorter completions (docs/grpo.md)",
    ),
    _Sign(
        "kl",
        1.0,
        "the KL divergence from the reference model is above 1 nat per token for {steps} steps, so the model may have "
        "lost its language: read completions.jsonl, lower the learning rate or raise objective.beta (docs/grpo.md)",
    ),
)


class WatchRewards(TrainerCallback):  # type: ignore[misc]
    """Warns once of each sign, on rank 0."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.since: dict[str, int] = {}
        self.warned: set[str] = set()
        self.last = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        self.last = state.global_step

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **_: object,
    ) -> None:
        # A step that reuses completions logs no reward.
        if not logs or "reward_std" not in logs or (dist.is_initialized() and dist.get_rank() != 0):
            return
        for sign in SIGNS:
            if logs.get(sign.key, 0.0) < sign.least:
                self.since.pop(sign.key, None)
                continue
            steps = state.global_step - self.since.setdefault(sign.key, self.last)
            if steps >= STEPS and sign.key not in self.warned:
                self.warned.add(sign.key)
                warn(self.run, f"At step {state.global_step}: {sign.text.format(steps=steps)}.")
        self.last = state.global_step
