"""What rank 0 writes into metrics.jsonl."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerControl, TrainerState

from tests.runs.made_records import RECORD
from tuner.runs import metrics
from tuner.runs.directory import RunDirectory
from tuner.worker.step_log import LogsSteps, MetricsCallback, logs_step

pytestmark = pytest.mark.usefixtures("one_rank")


def test_the_learning_rate_is_that_of_the_step_and_not_of_the_next_one(tmp_path: Path) -> None:
    run, state = RunDirectory(tmp_path), SimpleNamespace(global_step=0, max_steps=3, num_input_tokens_seen=0)
    logged = MetricsCallback(run, RECORD, None)
    optimizer = SimpleNamespace(param_groups=[{"lr": 2e-4}])
    logged.on_train_begin(None, state, None)

    logged.on_step_begin(None, state, None, optimizer=optimizer)
    optimizer.param_groups[0]["lr"] = state.global_step = 1  # the update, and the scheduler with it
    logged.on_log(None, state, None, logs={"loss": 2.5, "learning_rate": 1.0})

    assert metrics.latest(run)["learning_rate"] == 2e-4


def test_the_peak_of_a_resumed_run_is_no_lower_than_that_of_the_attempt_before(tmp_path: Path) -> None:
    run, state = RunDirectory(tmp_path), SimpleNamespace(global_step=5, max_steps=9, num_input_tokens_seen=0)
    run.log_metrics({"step": 5, "loss": 2.0, "memory_bytes": 10**15})
    logged = MetricsCallback(run, RECORD, None)
    logged.on_train_begin(None, state, None)
    state.global_step = 6
    logged.on_log(None, state, None, logs={"loss": 1.9})

    assert metrics.latest(run)["memory_bytes"] == metrics.peak_bytes(run) == 10**15


def logged_steps(num_steps: int, interval: Any = "auto", save_steps: int = 1000, eval_steps: int = 0) -> list[int]:
    """Return the steps of a run that are logged; each is known before it, so that its metrics are measured."""
    args = SimpleNamespace(eval_strategy="steps" if eval_steps else "no")
    state = TrainerState(max_steps=num_steps, save_steps=save_steps, eval_steps=eval_steps)
    callback, found = LogsSteps(interval), []
    callback.on_train_begin(args, state, TrainerControl())
    for step in range(1, num_steps + 1):
        state.global_step, control = step, TrainerControl()
        callback.on_step_end(args, state, control)
        assert control.should_log == logs_step(step, args, state)
        found += [step] if control.should_log else []
    return found


def test_every_step_of_a_short_run_is_logged_and_every_tenth_of_a_long_one() -> None:
    assert logged_steps(6) == [1, 2, 3, 4, 5, 6]
    assert len(logged_steps(99)) == 99
    assert logged_steps(105) == [1, *range(10, 101, 10), 105]
    assert logged_steps(105, interval=50) == [1, 50, 100, 105]
    assert logged_steps(6, interval=4) == [1, 4, 6]


def test_a_step_that_validates_or_saves_is_logged() -> None:
    assert logged_steps(120, interval=100, save_steps=35) == [1, 35, 70, 100, 105, 120]
    assert logged_steps(120, interval=100, eval_steps=50) == [1, 50, 100, 120]


@pytest.mark.parametrize("word", ["should_save", "should_training_stop"])
def test_a_step_after_which_a_run_stops_is_logged(word: str) -> None:
    args, state = SimpleNamespace(eval_strategy="no"), TrainerState(max_steps=200, global_step=7, save_steps=50)
    control = TrainerControl(**{word: True})

    LogsSteps(10).on_step_end(args, state, control)

    assert control.should_log


def test_a_resumed_run_logs_at_its_own_interval_and_not_at_that_of_the_checkpoint() -> None:
    state = TrainerState(max_steps=500, global_step=100, logging_steps=10)

    LogsSteps(25).on_train_begin(None, state, TrainerControl())

    assert state.logging_steps == 25
