"""No update has a learning rate of 0, and after the warm-up every one has transformers'."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import transformers

from tuner.recipes.schema import FLOORED, ParamScheduler, ScheduleType
from tuner.worker.trainers import TunerTrainer

LR = 1e-3


class WarmedUp(TunerTrainer, transformers.Trainer):  # type: ignore[misc]
    """A trainer of transformers with our warm-up."""


def scheduler(kind: str, warmup_steps: int | None = 0, **values: Any) -> ParamScheduler:
    """Return the block of a recipe, with what its schedule needs."""
    needed: dict[str, dict[str, Any]] = {
        "warmup_stable_decay": {"decay_ratio": 0.25},
        "cosine_with_restarts": {"num_cycles": 2},
    }
    block = {
        "warmup_ratio": 0.0,
        **ParamScheduler.UNUSED,
        **needed.get(kind, {}),
        "type": kind,
        "warmup_steps": warmup_steps,
        **values,
    }
    return ParamScheduler.model_validate(block)


def trainer_of(cls: type[Any], block: ParamScheduler, num_steps: int, folder: Path) -> Any:
    """Return a trainer with an optimizer and the schedule."""
    arguments = transformers.TrainingArguments(
        str(folder),
        learning_rate=LR,
        lr_scheduler_type=block.name,
        lr_scheduler_kwargs=block.options,
        warmup_steps=block.warmup,
        use_cpu=True,
        report_to="none",
    )
    trainer = cls(model=torch.nn.Linear(1, 1), args=arguments)
    trainer.create_optimizer_and_scheduler(num_steps)
    return trainer


def rates(cls: type[Any], block: ParamScheduler, num_steps: int, folder: Path) -> list[float]:
    """Return the learning rate of each update."""
    return rates_of(trainer_of(cls, block, num_steps, folder), num_steps)


def rates_of(trainer: Any, num_steps: int) -> list[float]:
    """Return the learning rate of each of the next updates."""
    found = []
    for _ in range(num_steps):
        found.append(trainer.optimizer.param_groups[0]["lr"])
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    return found


@pytest.mark.parametrize("kind", get_args(ScheduleType))
@pytest.mark.parametrize("num_warmup", [0, 1, 4])
def test_the_warm_up_rises_from_the_first_update_and_the_rest_is_transformers(
    tmp_path: Path, kind: str, num_warmup: int
) -> None:
    block, theirs = scheduler(kind, num_warmup), transformers.Trainer
    if kind == "warmup_stable_decay":
        theirs = type("InSteps", (theirs,), {"create_scheduler": _in_steps})
    ours, expected = (rates(cls, block, 12, tmp_path) for cls in (WarmedUp, theirs))

    assert ours[:num_warmup] == pytest.approx([LR * (update + 1) / num_warmup for update in range(num_warmup)])
    assert ours[num_warmup:] == expected[num_warmup:]
    assert min(ours) > 0


def _in_steps(self: Any, num_training_steps: int, optimizer: Any = None) -> Any:
    """Create transformers' schedule, which takes the steps of the decay as their number."""
    self.args.lr_scheduler_kwargs = {**self.args.lr_scheduler_kwargs, "num_decay_steps": num_training_steps // 4}
    return transformers.Trainer.create_scheduler(self, num_training_steps, optimizer)


def half_cosine(progress: float) -> float:
    """Return how much is left of a rate that falls as half a cosine."""
    return (1 + math.cos(math.pi * progress)) / 2


@pytest.mark.parametrize(
    ("block", "factors"),
    [
        (
            scheduler("warmup_stable_decay", 2, decay_ratio=0.4, min_lr_ratio=0.1),
            [0.5, 1, 1, 1, 1, 1, *(0.1 + 0.9 * half_cosine(step / 4) for step in range(4))],
        ),
        (
            scheduler("warmup_stable_decay", 4, decay_ratio=0.9),
            [0.25, 0.5, 0.75, 1, *(half_cosine(step / 6) for step in range(6))],
        ),
        (
            scheduler("warmup_stable_decay", decay_ratio=0.5, decay_type="linear", min_lr_ratio=0.2),
            [1, 1, 1, 1, *(0.2 + 0.8 * (1 - step / 4) for step in range(4))],
        ),
        (
            scheduler("warmup_stable_decay", decay_ratio=0.5, decay_type="1-sqrt"),
            [1, 1, 1, 1, *(1 - math.sqrt(step / 4) for step in range(4))],
        ),
        (scheduler("cosine", min_lr_ratio=0.2), [0.2 + 0.8 * half_cosine(step / 8) for step in range(8)]),
        (scheduler("cosine_with_restarts", num_cycles=3), [half_cosine(step / 4) for step in range(4)] * 3),
    ],
    ids=["last steps", "a decay that reaches into the warm-up", "a line", "a root", "a minimum", "cycles"],
)
def test_a_rate_falls_by_its_formula_after_the_warm_up(
    block: ParamScheduler, factors: list[float], tmp_path: Path
) -> None:
    found = rates(WarmedUp, block, len(factors), tmp_path)

    assert found == pytest.approx([LR * factor for factor in factors])


def test_the_inverse_square_root_halves_the_rate_at_four_times_the_warm_up(tmp_path: Path) -> None:
    found = rates(WarmedUp, scheduler("inverse_sqrt", 3), 28, tmp_path)

    assert (found[2], found[12], found[27]) == pytest.approx((LR, LR / 2, LR / 3))


@pytest.mark.parametrize(
    ("kind", "options"),
    [*((kind, {}) for kind in get_args(ScheduleType)), ("warmup_stable_decay", {"decay_type": "1-sqrt"})],
)
def test_a_resumed_schedule_goes_on_as_if_it_had_not_stopped(tmp_path: Path, kind: str, options: Any) -> None:
    values = {"min_lr_ratio": 0.1, **options} if kind in FLOORED else options
    whole = rates(WarmedUp, block := scheduler(kind, 2, **values), 12, tmp_path)
    stopped = trainer_of(WarmedUp, block, 12, tmp_path)
    rates_of(stopped, 7)
    resumed = trainer_of(WarmedUp, block, 12, tmp_path)

    resumed.optimizer.load_state_dict(stopped.optimizer.state_dict())
    resumed.lr_scheduler.load_state_dict(stopped.lr_scheduler.state_dict())

    assert rates_of(resumed, 5) == whole[7:]


@pytest.mark.parametrize("kind", get_args(ScheduleType))
def test_a_warm_up_may_last_to_the_end(tmp_path: Path, kind: str) -> None:
    assert rates(WarmedUp, scheduler(kind, 4), 4, tmp_path) == pytest.approx([LR / 4, LR / 2, LR * 3 / 4, LR])


class Wrapped(torch.optim.Optimizer):  # type: ignore[misc]
    """An optimizer as DeepSpeed's are at ZeRO 1 to 3: it has groups, and no `defaults`."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups, self.step = inner, inner.param_groups, inner.step


@pytest.mark.parametrize("kind", get_args(ScheduleType))
def test_every_schedule_takes_the_optimizer_that_deepspeed_wraps(tmp_path: Path, kind: str) -> None:
    trainer = trainer_of(WarmedUp, scheduler(kind), 4, tmp_path)
    trainer.lr_scheduler = None

    trainer.create_scheduler(4, Wrapped(torch.optim.AdamW(trainer.model.parameters(), lr=LR)))

    assert trainer.lr_scheduler.get_last_lr() == [LR]
