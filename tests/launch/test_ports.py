"""Real launches side by side: each listens at a free port before its ranks start, so there is none to race for."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

from tests.e2e.runs import finish, fork
from tests.launch.plans import TINY
from tuner.machine.topology import DEFAULT_PORT

LAUNCHES = 3


def test_launches_side_by_side_do_not_meet_on_a_port(tmp_path: Path) -> None:
    with socket.socket() as taken:
        with suppress(OSError):  # taken by another process: as good
            taken.bind(("", DEFAULT_PORT))
            taken.listen()
        places = [tmp_path / str(at) for at in range(LAUNCHES)]
        launches = [fork(TINY, "--work-dir", place, worker="tests.launch.meets") for place in places]
        ended = [finish(launch, place) for launch, place in zip(launches, places, strict=True)]

    assert [run.code for run in ended] == [0] * LAUNCHES, [run.text for run in ended]
