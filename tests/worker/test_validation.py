"""What a validation loss decides; tests/e2e/test_seen.py has it in a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from transformers import TrainerControl, TrainerState

from tuner.recipes.loading import load
from tuner.recipes.recipe import Overrides
from tuner.runs import checkpoints
from tuner.runs.records import ManifestFacts
from tuner.worker.callbacks import ValidateAtStart, ValidationCallback
from tuner.worker.checkpointing import best_step


def state_after(*losses: float, every: int = 10) -> TrainerState:
    state = TrainerState()
    for number, loss in enumerate(losses, 1):
        state.global_step = number * every
        state.log_history += [{"loss": 0.0, "step": state.global_step}, {"eval_loss": loss, "step": state.global_step}]
    return state


def decided(state: TrainerState, *sets: str) -> TrainerControl:
    config = load("tiny_full_sample_e1", Overrides(pairs=[("--set", text) for text in sets])).config
    control = TrainerControl()
    ValidationCallback(config).on_evaluate(None, state, control)
    return control


@pytest.mark.parametrize(
    ("losses", "saves"), [((3.0,), True), ((3.0, 2.0), True), ((2.0, 3.0), False), ((2.0, 2.0), False)]
)
def test_a_lower_loss_than_all_before_is_saved(losses: tuple[float, ...], saves: bool) -> None:
    assert decided(state_after(*losses), "save_best=eval_loss").should_save is saves
    assert decided(state_after(*losses)).should_save is False, "unless nobody asked for it"


@pytest.mark.parametrize(
    ("losses", "stops"),
    [((3.0, 4.0), False), ((3.0, 4.0, 5.0), True), ((3.0, 4.0, 2.0), False), ((3.0, 4.0, 2.0, 2.5, 2.4), True)],
)
def test_training_stops_when_patience_is_over(losses: tuple[float, ...], stops: bool) -> None:
    assert decided(state_after(*losses), "early_stopping_patience=2").should_training_stop is stops
    assert decided(state_after(*losses)).should_training_stop is False, "unless nobody asked for it"


def test_patience_goes_on_where_a_resumed_run_left_it(tmp_path: Path) -> None:
    state_after(3.0, 4.0).save_to_json(str(tmp_path / "trainer_state.json"))
    resumed: Any = TrainerState.load_from_json(str(tmp_path / "trainer_state.json"))
    resumed.global_step = 30
    resumed.log_history.append({"eval_loss": 5.0, "step": 30})

    assert best_step(resumed) == 10
    assert decided(resumed, "early_stopping_patience=2").should_training_stop


def test_the_validation_before_the_first_step_is_no_best_one_and_uses_up_no_patience() -> None:
    state = TrainerState(log_history=[{"eval_loss": 1.0, "step": 0}])

    assert best_step(state) is None
    assert not decided(state, "save_best=eval_loss", "early_stopping_patience=1").should_save

    later = state_after(3.0)
    later.log_history.insert(0, {"eval_loss": 1.0, "step": 0})
    assert best_step(later) == 10
    control = decided(later, "save_best=eval_loss", "early_stopping_patience=1")
    assert control.should_save and not control.should_training_stop


class Evaluated:
    """A trainer that notes which rows it is to validate on."""

    def __init__(self, num_rows: int) -> None:
        self.eval_dataset = datasets.Dataset.from_dict({"row": list(range(num_rows))})
        self.asked: list[list[int]] = []

    def evaluate(self, rows: Any) -> None:
        self.asked.append(list(rows["row"]))


@pytest.mark.parametrize(
    ("num_rows", "max_steps", "measured"),
    [
        (300, 1, list(range(300))),
        (1_000, 1, list(range(0, 1_000, 2))),
        (4_800, 2_000, list(range(4_800))),
        (9_600, 2_000, list(range(0, 9_600, 2))),
    ],
)
def test_before_training_a_large_validation_set_is_measured_on_rows_spread_over_it(
    num_rows: int, max_steps: int, measured: list[int]
) -> None:
    trainer = Evaluated(num_rows)

    ValidateAtStart(trainer, 8).on_train_begin(None, TrainerState(max_steps=max_steps), TrainerControl())

    assert trainer.asked == [measured]


def test_pruning_leaves_the_best_checkpoint(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        checkpoints.seal(folder, ManifestFacts(step=step))

    checkpoints.prune(tmp_path, 1, 40, protected=20)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-20", "checkpoint-40"]


@pytest.mark.parametrize(
    ("strategy", "step", "epoch", "validated", "is_due"),
    [
        ("steps", 6, 0.5, (0, 3), True),
        ("steps", 6, 0.5, (0, 3, 6), False),
        ("steps", 7, 0.5, (0, 3, 6), False),
        ("steps", 10, 0.8, (0, 3, 6, 9), True),  # the last step
        ("epoch", 5, 1.0, (0,), True),  # a kill came between the save of the epoch's last step and its validation
        ("epoch", 5, 1.0, (0, 5), False),
        ("epoch", 6, 1.2, (0, 5), False),
        ("epoch", 10, 1.9, (0, 5), True),
    ],
)
def test_a_resumed_run_does_the_validation_that_was_due_at_its_checkpoint_and_is_not_in_its_log(
    strategy: str, step: int, epoch: float, validated: tuple[int, ...], is_due: bool
) -> None:
    trainer: Any = Evaluated(600)
    log = [{"step": at, "eval_loss": 1.0} for at in validated]
    state = TrainerState(global_step=step, max_steps=10, epoch=epoch, eval_steps=3, log_history=log)

    args: Any = SimpleNamespace(eval_strategy=strategy)
    ValidateAtStart(trainer, 8).on_train_begin(args, state, TrainerControl())

    assert trainer.asked == [[*range(600)]] * is_due
