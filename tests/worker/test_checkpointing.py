"""A checkpoint becomes valid beside the next steps, and before whatever relies on it; tests/faults has real ranks."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.refused import refused
from tuner.errors import DiskError
from tuner.runs import checkpoints, rank_files
from tuner.runs.directory import RunDirectory
from tuner.runs.records import ManifestFacts
from tuner.worker import checkpointing
from tuner.worker.checkpointing import CheckpointSaver


@pytest.fixture
def seal(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Hold up what makes a checkpoint valid until `goes_on`; `error` is raised by it then."""
    held = SimpleNamespace(goes_on=threading.Event(), error=None, commit=checkpoints.commit)

    def commit(*given: Any) -> int:
        held.goes_on.wait(10)
        if held.error:
            raise held.error
        return int(held.commit(*given))

    monkeypatch.setattr(checkpoints, "commit", commit)
    return held


@pytest.fixture
def saver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointSaver:
    """Return that of a rank that is alone, whose trainer and engine are stand-ins."""
    group = {"get_rank": lambda: 0, "get_world_size": lambda: 1, "barrier": lambda: None, "all_reduce": lambda _: None}
    alone = SimpleNamespace(**group, broadcast_object_list=lambda _: None)
    monkeypatch.setattr(checkpointing, "dist", alone)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    engine = SimpleNamespace(
        module=model, basic_optimizer=optimizer, zero_optimization_stage=lambda: 0, device=torch.device("cpu")
    )
    state = SimpleNamespace(global_step=1, log_history=[])
    accelerator = SimpleNamespace(get_state_dict=lambda engine: engine.module.state_dict())
    trainer = SimpleNamespace(
        model=model, model_wrapped=engine, state=state, add_callback=lambda _: None, accelerator=accelerator
    )
    run = RunDirectory(tmp_path)
    run.checkpoints.mkdir()
    run.recipe.write_text("")
    return CheckpointSaver(trainer, run, lambda _: ManifestFacts(), 2)


def save(saver: CheckpointSaver, step: int) -> Path:
    saver.trainer.state.global_step = step
    folder = checkpoints.unfinished(saver.home) / f"checkpoint-{step}"

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "weights").write_text("1 2 3")

    saver.save(write)
    return saver.home / folder.name


def test_steps_go_on_while_a_checkpoint_becomes_valid_and_the_next_save_waits_for_it(
    saver: CheckpointSaver, seal: SimpleNamespace
) -> None:
    first = save(saver, 1)
    assert not first.exists()
    threading.Timer(0.1, seal.goes_on.set).start()

    save(saver, 2)

    assert checkpoints.inspect(first) is None
    saver.wait()
    assert [step for step, _ in checkpoints.newest_first(saver.home)] == [2, 1]


def test_a_rank_that_cannot_make_its_folder_ends_with_the_reason_before_a_library_stumbles(
    saver: CheckpointSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)

    with pytest.raises(DiskError, match="Read-only file system\\. The file system is read-only"):
        saver.save(lambda: pytest.fail("DeepSpeed would raise an error of its own"))


def test_a_tied_weight_is_saved_under_one_name(saver: CheckpointSaver) -> None:
    saver.trainer.model.all_tied_weights_keys = {"bias": "weight"}

    assert [*saver.trainer.accelerator.get_state_dict(saver.trainer.model_wrapped)] == ["weight"]


def test_a_slow_save_says_how_far_it_is_and_a_fast_one_nothing(
    saver: CheckpointSaver, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    seal = checkpoints.seal
    save(saver, 1)
    saver.wait()
    assert "Checkpoint 1" not in capfd.readouterr().out

    monkeypatch.setattr(checkpointing, "_SAY_S", 0.01)

    def slow_seal(*given: Any) -> None:
        time.sleep(0.3)
        seal(*given)

    monkeypatch.setattr(checkpoints, "seal", slow_seal)
    save(saver, 2)
    saver.wait()

    assert "Checkpoint 2 is on its way to the disk: 0 s, 5 bytes so far" in capfd.readouterr().out


def test_a_failure_waits_for_the_checkpoint_and_stays_the_cause(saver: CheckpointSaver, seal: SimpleNamespace) -> None:
    threading.Timer(0.1, seal.goes_on.set).start()

    with pytest.raises(ZeroDivisionError), saver.waited_for():
        first = save(saver, 1)
        raise ZeroDivisionError

    assert checkpoints.inspect(first) is None


def test_a_disk_found_full_late_ends_the_run_and_nothing_is_left_of_the_checkpoint(
    saver: CheckpointSaver, seal: SimpleNamespace
) -> None:
    seal.error = OSError(errno.ENOSPC, "No space left on device")
    seal.goes_on.set()

    with refused(DiskError, "checkpoints", "checkpoint-1", "No space left on device"), saver.waited_for():
        save(saver, 1)

    assert not checkpoints.unfinished(saver.home).exists()


def test_a_folder_of_checkpoints_that_somebody_removed_is_made_again(
    saver: CheckpointSaver, seal: SimpleNamespace, tmp_path: Path
) -> None:
    seal.goes_on.set()
    saver.run_dir.ranks.mkdir()
    save(saver, 1)
    saver.wait()
    shutil.rmtree(saver.home)

    second = save(saver, 2)

    saver.wait()
    assert checkpoints.inspect(second) is None
    assert str(saver.home) in saver.run_dir.warnings.read_text()


def test_a_checkpoint_that_is_removed_before_it_is_whole_ends_nothing(
    saver: CheckpointSaver, seal: SimpleNamespace
) -> None:
    saver.run_dir.ranks.mkdir()
    save(saver, 1)

    shutil.rmtree(saver.home)
    seal.goes_on.set()

    saver.wait()
    assert "checkpoint-1" in saver.run_dir.warnings.read_text()


def test_a_rank_whose_disk_is_half_as_fast_is_waited_for(
    saver: CheckpointSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_s, limit_s, clock = 1000.0, checkpointing.SEEN_LIMIT_S, SimpleNamespace(now=0.0)
    answers: list[bool] = []

    def commit(*given: Any) -> int:
        for clock.now in (own_s, 2 * own_s, 2 * own_s + 0.9 * limit_s, 2 * own_s + 1.1 * limit_s):
            answers.append(given[5]("a file is not seen"))
        return 0

    monkeypatch.setattr(checkpointing, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(checkpoints, "commit", commit)

    save(saver, 1)
    saver.wait()

    assert answers == [True, True, True, False]


@pytest.mark.parametrize("is_removed", [True, False])
def test_a_part_of_another_rank_that_is_removed_before_it_is_whole_ends_nothing(
    saver: CheckpointSaver, monkeypatch: pytest.MonkeyPatch, is_removed: bool
) -> None:
    def declare(unfinished: Path, name: str, rank: int, *_: object) -> None:
        if is_removed:
            shutil.rmtree(unfinished)
        raise FileNotFoundError(name)

    monkeypatch.setattr(checkpointing.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(rank_files, "declare", declare)

    folder = checkpoints.unfinished(saver.home) / "rank-1" / "checkpoint-1"
    saver.save(lambda: folder.mkdir(parents=True, exist_ok=True))

    with nullcontext() if is_removed else pytest.raises(FileNotFoundError):
        saver.wait()
