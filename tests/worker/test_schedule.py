"""No update has a learning rate of 0, and after the warm-up every one has transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import transformers

from tuner.recipes.schema import ParamScheduler
from tuner.worker.trainers import TunerTrainer

LR = 1e-3


class WarmedUp(TunerTrainer, transformers.Trainer):  # type: ignore[misc]
    """A trainer of transformers with our warm-up."""


def rates(cls: type[Any], kind: str, num_warmup: int, num_steps: int, folder: Path) -> list[float]:
    """Return the learning rate of each update."""
    arguments = transformers.TrainingArguments(
        str(folder), learning_rate=LR, lr_scheduler_type=kind, warmup_steps=num_warmup, use_cpu=True, report_to="none"
    )
    trainer = cls(model=torch.nn.Linear(1, 1), args=arguments)
    trainer.create_optimizer_and_scheduler(num_steps)
    found = []
    for _ in range(num_steps):
        found.append(trainer.optimizer.param_groups[0]["lr"])
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    return found


@pytest.mark.parametrize("kind", get_args(ParamScheduler.model_fields["type"].annotation))
@pytest.mark.parametrize("num_warmup", [0, 1, 4])
def test_the_warm_up_rises_from_the_first_update_and_the_rest_is_transformers(
    tmp_path: Path, kind: str, num_warmup: int
) -> None:
    name = "constant_with_warmup" if kind == "constant" else kind
    ours, theirs = (rates(cls, name, num_warmup, 12, tmp_path) for cls in (WarmedUp, transformers.Trainer))

    assert ours[:num_warmup] == pytest.approx([LR * (update + 1) / num_warmup for update in range(num_warmup)])
    assert ours[num_warmup:] == theirs[num_warmup:]
    assert min(ours) > 0


@pytest.mark.parametrize("kind", get_args(ParamScheduler.model_fields["type"].annotation))
def test_a_warm_up_may_last_to_the_end(tmp_path: Path, kind: str) -> None:
    name = "constant_with_warmup" if kind == "constant" else kind

    assert rates(WarmedUp, name, 4, 4, tmp_path) == pytest.approx([LR / 4, LR / 2, LR * 3 / 4, LR])


class Wrapped(torch.optim.Optimizer):  # type: ignore[misc]
    """An optimizer as DeepSpeed's are at ZeRO 1 to 3: it has groups, and no `defaults`."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups, self.step = inner, inner.param_groups, inner.step


@pytest.mark.parametrize("kind", get_args(ParamScheduler.model_fields["type"].annotation))
def test_every_schedule_takes_the_optimizer_that_deepspeed_wraps(tmp_path: Path, kind: str) -> None:
    arguments = transformers.TrainingArguments(str(tmp_path), lr_scheduler_type=kind, use_cpu=True, report_to="none")
    trainer = WarmedUp(model=torch.nn.Linear(1, 1), args=arguments)

    trainer.create_scheduler(4, Wrapped(torch.optim.AdamW(trainer.model.parameters(), lr=LR)))

    assert trainer.lr_scheduler.get_last_lr() == [LR]


def test_a_run_of_one_update_learns(tmp_path: Path) -> None:
    assert rates(WarmedUp, "cosine", 1, 1, tmp_path) == [LR]
    assert rates(transformers.Trainer, "cosine", 1, 1, tmp_path) == [0.0]
