"""Real launches side by side: each listens at a free port before its ranks start, so there is none to race for."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.runs import environment
from tests.launch.plans import made
from tuner.launch import render, supervise
from tuner.launch.resolved_run import ResolvedRun
from tuner.machine.topology import DEFAULT_PORT
from tuner.runs.directory import create

LAUNCHES = 2


def test_launches_side_by_side_do_not_meet_on_a_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "WORKER", "tests.launch.meets")
    with socket.socket() as taken:
        with suppress(OSError):  # taken by another process: as good
            taken.bind(("", DEFAULT_PORT))
            taken.listen()
        runs = [made(work_dir=tmp_path / str(at), flags={"nproc_per_node": 2}) for at in range(LAUNCHES)]
        with ThreadPoolExecutor(LAUNCHES) as launches:
            codes = list(launches.map(_launched, runs))

    logs = [(tmp_path / str(at) / "ranks" / "launcher-0.log").read_text() for at in range(LAUNCHES)]
    assert codes == [0] * LAUNCHES, logs


def _launched(run: ResolvedRun) -> int:
    env = {**environment(), **render.environment(run), "PYTHONPATH": os.fspath(Path(__file__).parents[2])}
    directory = create(run.run_path, render.files(run), resume=False)
    return supervise.run(render.argv(run), env, directory, ranks=render.of_ranks(run.topology), grace_s=60)
