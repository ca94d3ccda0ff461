"""Real launches side by side: the rendezvous picks the port, so there is none to race for."""

from __future__ import annotations

import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.runs import environment
from tests.launch.plans import made
from tuner.launch import render
from tuner.machine.topology import DEFAULT_PORT

ROOT = Path(__file__).parents[2]
LAUNCHES = 3


def test_launches_side_by_side_do_not_meet_on_a_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "WORKER", "tests.launch.meets")
    with socket.socket() as taken:
        with suppress(OSError):  # taken by another process: as good
            taken.bind(("", DEFAULT_PORT))
            taken.listen()
        runs = [made(work_dir=tmp_path / str(at), flags={"nproc_per_node": 2}) for at in range(LAUNCHES)]
        started = [
            subprocess.Popen(
                render.argv(run), cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            for run in runs
        ]
        ended = [(process.communicate(timeout=600)[0], process.returncode) for process in started]

    assert [code for _, code in ended] == [0] * LAUNCHES, ended
