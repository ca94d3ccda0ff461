"""One recipe from start to end: directory, copy, resume, user's JSON, launchers, signals and exit codes."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.runs import (
    Started,
    environment,
    finish,
    fork,
    ok,
    processes_of,
    quick,
    start,
    train,
    wait_until,
    written_lines,
)
from tests.e2e.warm import warm
from tuner.runs import checkpoints

pytestmark = pytest.mark.e2e

GUIDE = Path(__file__).parents[1] / "zero" / "data" / "guide_ds_config.json"
LONG = ("--set", "max_steps=2000", "--set", "checkpoint.interval=1000")


@pytest.mark.long  # tests/launch/test_resuming.py
def test_resume_refuses_a_damaged_checkpoint_and_takes_a_done_run_for_done(tmp_path: Path) -> None:
    recipe = quick(tmp_path, "full")
    done = ok(train(recipe, tmp_path / "run", "--set", "max_steps=2", ranks=1))
    weights = done.path / "checkpoints" / "checkpoint-2" / "model.safetensors"
    result = (done.path / "final" / "model.safetensors").read_bytes()

    again = ok(train(recipe, done.path, "--set", "max_steps=2", "--resume", "auto", ranks=1))
    assert [line["step"] for line in again.metrics] == [1, 2]
    assert (done.path / "final" / "model.safetensors").read_bytes() == result

    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    damaged = train(recipe, done.path, "--resume", weights.parent, ranks=1)
    assert (damaged.code, "model.safetensors has changed" in damaged.text) == (2, True), damaged.text


@pytest.mark.long
def test_a_copied_recipe_and_the_one_in_the_run_directory_train_to_the_same_loss(tmp_path: Path) -> None:
    short = (
        "--set",
        "max_steps=2",
        "--set",
        "train_dataloader.dataset.max_length=128",
        "--set",
        "log.interval=1",
        "--set",
        "num_samples=0",
    )
    flags = (*short, "--set", "val_dataloader=none", "--seed", "7")
    copied = warm().run(["copy", "tiny_full_sample_e1", tmp_path / "mine.py"], env=environment())
    assert copied.returncode == 0, copied.stderr

    named = ok(train("tiny_full_sample_e1", tmp_path / "named", *flags, ranks=1))
    mine = ok(train(tmp_path / "mine.py", tmp_path / "copied", *flags, ranks=1))
    again = ok(train(named.path / "recipe.py", tmp_path / "again", ranks=1))

    assert mine.losses == named.losses == again.losses
    assert again.json("deepspeed.json") == named.json("deepspeed.json")
    facts = named.json("run.json")
    assert facts["seed"] == 7
    assert facts["versions"]["deepspeed"]
    assert named.json("status.json")["state"] == "done"


@pytest.mark.long  # tests/zero/test_merge.py
def test_a_users_json_trains_and_is_kept_where_nobody_else_owns_the_value(tmp_path: Path) -> None:
    asked = ("--deepspeed", GUIDE, "--set", "max_steps=2")
    # Without a compiler: DeepSpeed would build its CPU Adam, which takes minutes.
    run = ok(train(quick(tmp_path, "full"), tmp_path / "run", *asked, ranks=1, PATH=str(tmp_path)))

    used = run.json("deepspeed.json")
    assert used["tensorboard"]["job_name"] == "my_deepspeed_experiment"
    assert (used["train_micro_batch_size_per_gpu"], used["train_batch_size"]) == (2, 4)
    assert "sparse_attention" not in used
    assert run.text.count("WARNING") >= 7


@pytest.mark.long  # tests/launch/test_execute.py
def test_one_process_without_any_launcher_trains(tmp_path: Path) -> None:
    alone = ok(
        train(quick(tmp_path, "full"), tmp_path / "alone", "--launcher", "none", "--set", "max_steps=2", ranks=0)
    )

    assert len(alone.losses) == 2
    assert alone.json("status.json")["state"] == "done"
    assert not (alone.path / "lock").exists(), "the rank lets go of what it took as the launcher"


@pytest.mark.parametrize(("ranks", "begin"), [pytest.param(1, start, marks=pytest.mark.long), (2, fork)])
def test_sigterm_ends_a_run_at_a_step_with_a_valid_checkpoint_and_code_75(
    tmp_path: Path, ranks: int, begin: Callable[..., Started]
) -> None:
    work_dir = tmp_path / "run"
    process = begin(quick(tmp_path, "full"), "--work-dir", work_dir, "--deepspeed", "zero2", *LONG, ranks=ranks)
    wait_until(lambda: written_lines(work_dir / "metrics.jsonl") > 2)

    process.send_signal(signal.SIGTERM)
    run = finish(process, work_dir)

    assert run.code == 75, run.text
    assert processes_of(work_dir) == []
    newest, passed = checkpoints.newest_valid(work_dir / "checkpoints")
    assert newest is not None and not passed
    assert run.json("status.json")["state"] == "stopped"
    assert f"--resume {work_dir}" in run.text


@pytest.mark.long  # tests/launch/test_supervise.py
def test_two_signals_end_a_run_at_once_with_the_signals_code(tmp_path: Path) -> None:
    work_dir = tmp_path / "run"
    process = fork(quick(tmp_path, "full"), "--work-dir", work_dir, *LONG, ranks=1)
    wait_until(lambda: written_lines(work_dir / "metrics.jsonl") > 1)

    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    run = finish(process, work_dir)

    assert run.code in (128 + signal.SIGINT, 128 + signal.SIGTERM), run.text
    assert processes_of(work_dir) == []


def test_a_signal_before_training_leaves_no_process(tmp_path: Path) -> None:
    work_dir = tmp_path / "run"
    process = start(quick(tmp_path, "full"), "--work-dir", work_dir, *LONG)
    wait_until(lambda: len(processes_of(work_dir)) >= 3)

    process.send_signal(signal.SIGTERM)
    run = finish(process, work_dir)

    assert run.code in (75, 128 + signal.SIGTERM), run.text
    assert processes_of(work_dir) == []


@pytest.mark.long  # tests/launch/test_supervise.py
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_rank_ends_the_run_with_its_signals_code_and_is_named(tmp_path: Path, ranks: int) -> None:
    work_dir = tmp_path / "run"
    process = fork(quick(tmp_path, "full"), "--work-dir", work_dir, "--deepspeed", "zero2", *LONG, ranks=ranks)
    wait_until(lambda: written_lines(work_dir / "metrics.jsonl") > 1)

    of_ranks = [rank_process for rank_process in processes_of(work_dir) if "tuner.worker" in rank_process.cmdline()]
    of_ranks[-1].kill()
    run = finish(process, work_dir)

    assert run.code == 128 + signal.SIGKILL, run.text
    assert "killed by SIGKILL" in run.text
    assert processes_of(work_dir) == []


@pytest.mark.long  # tests/launch/test_supervise.py
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_launcher_takes_its_ranks_along(tmp_path: Path, ranks: int) -> None:
    work_dir = tmp_path / "run"
    process = fork(quick(tmp_path, "full"), "--work-dir", work_dir, *LONG, ranks=ranks)
    wait_until(lambda: written_lines(work_dir / "metrics.jsonl") > 1)

    process.kill()
    process.communicate()

    wait_until(lambda: processes_of(work_dir) == [], timeout_s=200)
