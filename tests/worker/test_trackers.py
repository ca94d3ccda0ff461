"""Trackers that are down. All but TensorBoard are made up here: a real one needs a server."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_callback import CallbackHandler

from tuner.recipes.schema import Tracker as Name
from tuner.runs.directory import RunDirectory
from tuner.worker import step_log
from tuner.worker.step_log import Tracker

HOOKS = ("on_init_end", "on_train_begin", "on_step_end", "on_log", "on_evaluate", "on_save", "on_train_end")


@pytest.fixture(autouse=True)
def places(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("TENSORBOARD_LOGGING_DIR", "WANDB_DIR", "WANDB_PROJECT"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    yield


def made_up(monkeypatch: pytest.MonkeyPatch, **hooks: Any) -> list[str]:
    """Register an integration 'wandb' whose hooks note that they were called, and do what is given."""
    called: list[str] = []

    def hook(name: str) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> None:
            called.append(name)
            hooks.get(name, lambda: None)()

        return call

    members = {name: hook(name) for name in ("__init__", *HOOKS)}
    monkeypatch.setitem(INTEGRATION_TO_CALLBACK, "wandb", type("MadeUp", (TrainerCallback,), members))
    return called


def run_through(tracker: Tracker, folder: Path) -> None:
    handler = CallbackHandler([tracker], None, None, None, None)
    arguments = TrainingArguments(str(folder), use_cpu=True, report_to="none")
    state, control = TrainerState(is_world_process_zero=True), TrainerControl()
    handler.on_init_end(arguments, state, control)
    handler.on_train_begin(arguments, state, control)
    for step in (1, 2):
        state.global_step = step
        handler.on_step_end(arguments, state, control)
        handler.on_log(arguments, state, control, {"loss": 1.0})
    handler.on_evaluate(arguments, state, control, {"eval_loss": 1.0})
    handler.on_save(arguments, state, control)
    handler.on_train_end(arguments, state, control)


def fail(error: BaseException) -> Any:
    def call() -> None:
        raise error

    return call


@pytest.mark.parametrize("hook", ["__init__", *HOOKS])
@pytest.mark.parametrize("error", [ConnectionError("no route"), SystemExit(1)], ids=["error", "exit"])
def test_a_tracker_that_fails_is_one_warning_and_off(
    hook: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    called = made_up(monkeypatch, **{hook: fail(error)})

    run_through(Tracker("wandb", RunDirectory(tmp_path)), tmp_path)

    assert called.count(hook) == 1 and called[-1] == hook
    warnings = [line for line in capfd.readouterr().out.splitlines() if "WARNING" in line]
    assert warnings == [
        f"WARNING: the tracker wandb is disabled for the rest of the run: {type(error).__name__}: {error}"
    ]


def test_a_tracker_that_hangs_is_off_after_some_patience(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    released = threading.Event()
    called = made_up(monkeypatch, on_log=released.wait)
    monkeypatch.setattr(step_log, "PATIENCE_S", 0.2)

    run_through(Tracker("wandb", RunDirectory(tmp_path)), tmp_path)
    released.set()

    assert called == ["__init__", "on_init_end", "on_train_begin", "on_step_end", "on_log"]
    assert "disabled for the rest of the run: it took more than 0 s" in capfd.readouterr().out


def test_wandb_is_told_that_the_run_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called = made_up(monkeypatch)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(finish=lambda: called.append("finish")))

    run_through(Tracker("wandb", RunDirectory(tmp_path)), tmp_path)

    assert called[-2:] == ["on_train_end", "finish"]


def test_tensorboard_writes_into_the_run_directory(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_through(Tracker("tensorboard", RunDirectory(tmp_path)), tmp_path / "checkpoints")

    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))
    assert not (tmp_path / "checkpoints").exists() and "WARNING" not in capfd.readouterr().out


def test_a_place_that_the_user_chose_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "mine"))

    run_through(Tracker("tensorboard", RunDirectory(tmp_path)), tmp_path)

    assert list((tmp_path / "mine").iterdir()) and not (tmp_path / "tensorboard").exists()


def test_every_name_is_one_of_transformers_integrations() -> None:
    assert set(get_args(Name)) <= INTEGRATION_TO_CALLBACK.keys()
