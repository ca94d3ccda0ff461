"""Saves that are interrupted, that find no room, and that leave frozen weights out: real ranks, signals and disks."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.runs import finish, fork, ok, processes_of, quick, train, wait_until
from tests.faults.conftest import Faulty
from tuner.runs import checkpoints

pytestmark = [pytest.mark.e2e, pytest.mark.long]  # in one process: tests/worker/test_checkpointing.py

WEIRD = "my 'run' \"of\" $HOME $(touch x) ünï 日本"


def test_a_stop_asked_for_during_a_save_ends_with_that_save_and_nobody_else_takes_the_run(
    tmp_path: Path, faulty: Faulty
) -> None:
    recipe, work_dir = quick(tmp_path, "full"), tmp_path / "run"
    process = faulty.start("save-hold@0:2", recipe, work_dir, "--deepspeed", "zero2")
    wait_until((work_dir / "held").exists)
    assert checkpoints.listed(work_dir / "checkpoints") == [], "a save under way is no checkpoint"

    second = fork(recipe, "--work-dir", work_dir, "--resume", "auto")
    refused, _ = second.communicate(timeout=300)
    ranks = [other for other in processes_of(work_dir) if other.pid != process.pid]
    ranks[-1].send_signal(signal.SIGTERM)
    time.sleep(2)  # until its thread has noted it
    (work_dir / "held").unlink()
    run = finish(process, work_dir)

    assert (second.returncode, f"is in use by process {process.pid} on" in refused) == (2, True), refused
    assert run.code == 75, run.text
    assert [line["step"] for line in run.metrics] == [1, 2]
    assert {entry.name for entry in (work_dir / "checkpoints").iterdir()} == {"checkpoint-2", checkpoints.LATEST}
    assert checkpoints.inspect(work_dir / "checkpoints" / "checkpoint-2") is None
    assert not (work_dir / "lock").exists()


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("fill@0:3", "checkpoint-4 needs "),
        ("save-fill@1:4", " could not be written: "),
    ],
)
def test_a_full_disk_ends_with_code_74_and_the_older_checkpoint(
    tmp_path: Path, small_disk: Path, faulty: Faulty, fault: str, told: str
) -> None:
    run = faulty(fault, quick(tmp_path, "full"), small_disk / "run", "--deepspeed", "zero2")

    assert run.code == 74, run.text
    assert told in run.text and str(small_disk) in run.text, run.text
    assert "Traceback" not in run.text
    assert run.json("status.json")["exit_code"] == 74
    folder = run.path / "checkpoints"
    assert {entry.name for entry in folder.iterdir()} == {"checkpoint-2", checkpoints.LATEST}
    assert checkpoints.inspect(folder / "checkpoint-2") is None


def test_checkpoints_hold_nothing_frozen_and_a_run_resumed_from_one_has_the_same_losses(tmp_path: Path) -> None:
    recipe = quick(tmp_path, "freeze")
    whole = ok(train(recipe, tmp_path / "whole", "--deepspeed", "zero3", ranks=1))
    checkpoint = whole.path / "checkpoints" / "checkpoint-2"

    resumed = ok(train(recipe, tmp_path / "resumed", "--deepspeed", "zero3", "--resume", checkpoint, ranks=1))

    assert [loss.hex() for loss in resumed.losses] == [loss.hex() for loss in whole.losses[2:]]
    weights = load_file(whole.path / "final" / "model.safetensors")
    trained = sum(weight.numel() for name, weight in weights.items() if ".layers.1." in name or ".layers.2." in name)
    files = json.loads((checkpoint / checkpoints.MANIFEST).read_text())["files"]
    # In fp32: the weights, and two moments of Adam.
    assert sum(file["bytes"] for file in files.values()) == pytest.approx(12 * trained, rel=0.05)


def test_names_with_spaces_quotes_dollars_and_unicode_work_from_the_recipe_to_the_result(tmp_path: Path) -> None:
    folder = tmp_path / WEIRD
    folder.mkdir()
    recipe = quick(folder, "full").rename(folder / f"{WEIRD}.py")
    data, config = folder / f"{WEIRD}.jsonl", folder / f"{WEIRD}.json"
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    data.write_text(f"{json.dumps({'messages': said})}\n" * 200)
    config.write_text('{"zero_optimization": {"stage": 2}}')

    run = ok(train(recipe, folder / "run", "--data", data, "--deepspeed", config, "--set", "max_steps=2", ranks=1))

    assert checkpoints.inspect(run.path / "checkpoints" / "checkpoint-2") is None
    assert (run.path / "final" / "model.safetensors").is_file()
