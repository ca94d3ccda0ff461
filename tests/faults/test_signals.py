"""Signals to one of two real ranks, and a rank that does not stop when told to."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.e2e.runs import Finished, Once, finish, ok, processes_of, quick, train, wait_until
from tests.faults.conftest import Faulty
from tuner.runs import checkpoints

pytestmark = pytest.mark.e2e


def test_a_signal_to_one_rank_stops_all_at_the_same_step(tmp_path: Path, faulty: Faulty) -> None:
    recipe = quick(tmp_path, "full")
    recipe.write_text(recipe.read_text().replace("val_dataloader = None\n", ""))

    run = faulty("usr2@1:3", recipe, tmp_path / "run", "--deepspeed", "zero2")

    assert run.code == 75, run.text
    validated = [line["step"] for line in run.metrics if "eval_loss" in line]
    assert validated == [0], "the epoch's validation is not due yet"
    assert "stopped: at step 3 on request" in run.text
    newest, passed = checkpoints.newest_valid(run.path / "checkpoints")
    assert newest is not None and (newest.step, passed) == (3, [])
    reports = [run.json(f"ranks/{rank}.json") for rank in (0, 1)]
    assert [(report["exit_code"], report["step"]) for report in reports] == [(75, 3), (75, 3)]


def _measured(run: Finished) -> list[tuple[int, str, float]]:
    """Return every loss, validation loss and reward of a run, in the order of its log."""
    keys = ("loss", "eval_loss", "reward", "eval_exact_match")
    return [(line["step"], key, line[key]) for line in run.metrics for key in keys if key in line]


VALIDATES = ("--set", "train_cfg.val_interval=3", "--set", "checkpoint.save_best=eval_loss", "--set", "max_steps=6")


@pytest.mark.parametrize(
    ("step", "ranks", "options"),
    [
        (3, 2, ("--deepspeed", "zero2")),
        pytest.param(3, 2, ("--deepspeed", "zero3"), marks=pytest.mark.long),
        pytest.param(3, 1, ("--set", "log.generate=4"), marks=pytest.mark.long),
        pytest.param(6, 2, ("--deepspeed", "zero2"), marks=pytest.mark.long),
    ],
)
@pytest.mark.long
def test_a_stop_during_a_validation_saves_its_step_and_the_resumed_run_validates_as_if_it_had_never_stopped(
    tmp_path: Path, faulty: Faulty, step: int, ranks: int, options: tuple[str, ...]
) -> None:
    recipe = quick(tmp_path, "lora")
    recipe.write_text(recipe.read_text().replace("val_dataloader = None\n", "") + "adapter = dict(lora_dropout=0.2)\n")
    whole = ok(train(recipe, tmp_path / "whole", *VALIDATES, *options, ranks=ranks))

    run = faulty(f"usr2@{ranks - 1}:validation-{step}", recipe, tmp_path / "run", *VALIDATES, *options, ranks=ranks)
    assert run.code == 75, run.text
    newest, passed = checkpoints.newest_valid(run.path / "checkpoints")
    assert newest is not None and (newest.step, passed) == (step, [])
    assert _measured(run) == _measured(whole)[: len(_measured(run))]
    assert _measured(run)[-1][:2] == (step, "loss"), "the validation that was left has measured nothing"

    resumed = ok(train(run.path / "recipe.py", run.path, *options, "--resume", run.path, ranks=ranks))
    assert _measured(resumed) == _measured(whole)
    assert resumed.json("status.json")["result_step"] == whole.json("status.json")["result_step"]
    weights = "final/adapter_model.safetensors"
    assert (run.path / weights).read_bytes() == (whole.path / weights).read_bytes()


GENERATES = (
    *("--lr", "1e-3", "--set", "max_completion_length=8", "--set", "global_batch_size=8", "--max-steps", "5"),
    *("--set", "val_dataloader=None", "--set", "checkpoint.interval=2", "--set", "num_samples=0"),
)


@pytest.mark.parametrize(
    ("method", "ranks", "options"),
    [
        ("grpo", 2, ("--reward", "length")),
        ("grpo", 1, ("--reward", "length")),
        ("online_dpo", 2, ("--reward", "length", "--deepspeed", "zero3")),
        (
            "distill",
            2,
            ("--set", "teacher={}", "--deepspeed", "zero3"),
        ),
    ],
)
@pytest.mark.long
def test_a_stop_during_a_generation_saves_the_step_before_and_the_resumed_run_generates_the_same(
    tmp_path: Path, once: Once, faulty: Faulty, method: str, ranks: int, options: tuple[str, ...]
) -> None:
    recipe = f"tiny_{method}_full_sample_e1"
    if method == "distill":
        teacher = once(quick, "full", "--set", "max_steps=2", ranks=1)
        options = tuple(option.format(teacher.path) for option in options)
    whole = ok(train(recipe, tmp_path / "whole", *GENERATES, *options, ranks=ranks))

    fault = f"usr2@{ranks - 1}:generation-3"
    run = faulty(fault, recipe, tmp_path / "run", *GENERATES, *options, ranks=ranks)
    assert run.code == 75, run.text
    newest, passed = checkpoints.newest_valid(run.path / "checkpoints")
    assert newest is not None and (newest.step, passed) == (3, []), "no checkpoint was due at that step"
    assert _measured(run) == _measured(whole)[: len(_measured(run))]

    resumed = ok(train(run.path / "recipe.py", run.path, "--resume", run.path, ranks=ranks))
    assert _measured(resumed) == _measured(whole)
    weights = "final/model.safetensors"
    assert (run.path / weights).read_bytes() == (whole.path / weights).read_bytes()


@pytest.mark.long
def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace_and_named(tmp_path: Path, faulty: Faulty) -> None:
    work_dir = tmp_path / "run"
    process = faulty.start("ignore-term@1:2", quick(tmp_path, "full"), work_dir, "--deepspeed", "zero2", "--grace", "4")
    log = work_dir / "ranks" / "1.log"
    wait_until(lambda: log.is_file() and "deaf" in log.read_text())

    process.send_signal(signal.SIGTERM)
    run = finish(process, work_dir)

    assert run.code == 128 + signal.SIGKILL, run.text
    *_, what, where, _ = run.text.splitlines()
    assert what.startswith("error[did-not-stop]: 2 ranks did not stop within ") and what.endswith("(rank 1 lagged)")
    assert where.startswith("On rank 1, in step ")
    assert processes_of(work_dir) == []
