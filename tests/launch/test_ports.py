"""Real launches side by side: the rendezvous picks the port, so there is none to race for."""

from __future__ import annotations

import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.runs import environment
from tuner.launch import local
from tuner.machine.topology import DEFAULT_PORT, Topology

ROOT = Path(__file__).parents[2]
LAUNCHES = 5


def test_launches_side_by_side_do_not_meet_on_a_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "WORKER", "tests.launch.meets")
    with socket.socket() as taken:
        with suppress(OSError):  # taken by another process: as good
            taken.bind(("", DEFAULT_PORT))
            taken.listen()
        commands = [local.torchrun(Topology("torchrun", 1, 0, 2, 2), tmp_path / str(at)) for at in range(LAUNCHES)]
        started = [
            subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            for command in commands
        ]
        ended = [(process.communicate(timeout=300)[0], process.returncode) for process in started]

    assert [code for _, code in ended] == [0] * LAUNCHES, ended
