"""What a validation loss decides; tests/e2e/test_seen.py has it in a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerControl, TrainerState

from tuner.recipes.loading import load
from tuner.recipes.recipe import Overrides
from tuner.runs import checkpoints
from tuner.worker.callbacks import ValidationCallback
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


def test_pruning_leaves_the_best_checkpoint(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        checkpoints.seal(folder, {"step": step})

    checkpoints.prune(tmp_path, 1, 40, protected=20)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-20", "checkpoint-40"]
