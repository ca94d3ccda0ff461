"""Ranks that are killed with SIGKILL, and runs that go on by themselves, on one node and on two."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.e2e.runs import Finished, finish, ok, processes_of, quick, start, train, wait_until
from tests.faults.conftest import ROOT, Faulty
from tuner.runs import beats, checkpoints, ledger
from tuner.runs.directory import RunDirectory

pytestmark = pytest.mark.e2e


@pytest.mark.long  # one kill: tests/faults/test_resume.py
def test_two_kills_change_no_bit_of_the_losses(tmp_path: Path, undisturbed: Finished, faulty: Faulty) -> None:
    short = ("--set", "max_steps=6", "--deepspeed", "zero2")

    run = ok(faulty("kill@1:4,kill@0:6", quick(tmp_path, "full"), tmp_path / "run", *short, "--max-restarts", 3))

    losses = {line["step"]: line["loss"] for line in run.metrics if "loss" in line}  # a step may have run twice
    assert list(losses.values()) == undisturbed.losses
    assert len(losses) == 6
    facts = run.json("run.json")
    assert [(attempt["cause"], attempt["rank"]) for attempt in facts["attempts"]] == [("killed", 1), ("killed", 0)]
    assert facts["resume"] == str(run.path / "checkpoints" / "checkpoint-4")
    assert "--max-restarts after killed: attempt 2, from checkpoint-2.\n" in run.text
    assert run.json("attempts/1/status.json")["exit_code"] == 137
    told = ledger.read_ledger(RunDirectory(run.path))
    assert [(attempt.began, attempt.step, attempt.lost_steps) for attempt in told.attempts][:2] == [
        (0, 3, 1),
        (2, 5, 1),
    ]
    assert all(attempt.recovered_s for attempt in told.interruptions)
    assert told.attempts[0].seconds["lost"] > 0  # a rank 0 that is killed may have written its times 1 s before
    assert 0 < (told.goodput or 0) < 1 and len(told.interruptions) == 2


@pytest.mark.long  # what each node decides: tests/launch/test_nodes.py
def test_two_nodes_start_again_together(tmp_path: Path) -> None:
    recipe, work_dir = quick(tmp_path, "full"), tmp_path / "run"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    where = {"NNODES": "2", "ADDR": "127.0.0.1", "PORT": port, "TUNER_FAULT": "kill@1:4,kill@1:4"}
    where["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    how = ("--work-dir", work_dir, "--deepspeed", "zero2", "--max-restarts", 5)
    command = [sys.executable, "-m", "tests.faults.tuner"]

    nodes = [start(recipe, *how, ranks=1, command=command, NODE_RANK=rank, **where) for rank in ("1", "0")]
    try:
        second, first = (node.communicate(timeout=600)[0] for node in nodes)
    finally:
        finish(nodes[0], work_dir)

    # Killed at step 4 the run goes on from 2; killed there again it has come no further than where it began.
    assert first.count("--max-restarts after ") == 1, first + second
    assert all("--max-restarts: not possible: it ended twice in step 4" in text for text in (first, second))
    assert all(node.returncode not in (0, None) for node in nodes)


def forked(tmp_path: Path, recipe: Path, *arguments: object) -> tuple[subprocess.Popen[str], RunDirectory]:
    """Start a run and kill a rank; return it when it has started again with ranks that are forked."""
    run = RunDirectory(tmp_path / "run")
    how = ("--deepspeed", "zero2", "--set", "checkpoint.interval=2", "--max-restarts", 1)
    command = start(recipe, "--work-dir", run.path, *how, *arguments)
    wait_until(lambda: (run.ranks / "warm-0.log").exists(), 120)
    ranks = {rank: psutil.Process(beat.pid) for rank, beat in beats.here(run).items()}
    for rank in ranks.values():  # until the libraries are loaded
        rank.suspend()
    wait_until(lambda: (run.ranks / "warm-0.log").read_text() == "ready\n", 120)
    ranks[1].kill()
    ranks[0].resume()
    wait_until(lambda: any(beat.pid != ranks[0].pid for beat in beats.here(run).values() if beat.rank == 0), 120)
    assert "tuner.worker.warm" in psutil.Process(beats.here(run)[0].pid).cmdline()
    return command, run


@pytest.mark.long  # without torch: tests/launch/test_warm.py
def test_ranks_of_a_restart_are_forked_from_a_process_with_the_libraries_and_no_bit_changes(tmp_path: Path) -> None:
    recipe, short = quick(tmp_path, "full"), ("--set", "max_steps=40")
    undisturbed = ok(train(recipe, tmp_path / "undisturbed", "--deepspeed", "zero2", *short))

    command, run = forked(tmp_path, recipe, *short)

    ended = ok(finish(command, run.path))
    losses = {line["step"]: line["loss"] for line in ended.metrics if "loss" in line}
    assert list(losses.values()) == undisturbed.losses
    assert len(ended.json("run.json")["attempts"]) == 1


@pytest.mark.long  # started ranks: tests/e2e/test_runs.py
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_forked_ranks_save_and_end_when_their_launcher_is_told_to_stop_or_killed(tmp_path: Path, number: int) -> None:
    command, run = forked(tmp_path, quick(tmp_path, "full"), "--set", "max_steps=100000")
    began = run.read_run().resume_step or 0
    wait_until(lambda: any(beat.step > began for beat in beats.here(run).values()), 120)

    command.send_signal(number)

    assert command.wait(120) == (75 if number == signal.SIGTERM else -9)
    command.communicate()
    wait_until(lambda: not processes_of(run.path), 60)
    newest, passed = checkpoints.newest_valid(run.checkpoints)
    assert newest and newest.step > began and not passed
