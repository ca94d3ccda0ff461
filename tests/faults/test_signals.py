"""Signals to one of two real ranks, and a rank that does not stop when told to."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.e2e.runs import finish, processes_of, quick, wait_until
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
