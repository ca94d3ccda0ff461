"""Ranks that are forked are what started ones are: variables, streams, session, signals, exit codes. Without torch."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.launch.processes import wait_until
from tests.runs.made_records import made_beat, run_json
from tuner.launch import supervise
from tuner.launch import warm as warm_module
from tuner.launch.warm import Forked, Warm
from tuner.machine.topology import STORE_FD
from tuner.runs import beats
from tuner.runs.beats import Phase
from tuner.runs.creation import create
from tuner.runs.directory import RunDirectory

pytestmark = pytest.mark.timeout(60)
ENV = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).parents[2]), "SAME": "a"}
Fork = Callable[..., Forked | None]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = create(tmp_path / "run", {"recipe.py": "", "run.json": run_json()}, resume=False)
    made.ranks.mkdir(exist_ok=True)
    return made


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Warm]:
    monkeypatch.setattr(warm_module, "_MODULE", "tests.launch.forking")
    monkeypatch.setattr(warm_module, "_MEMORY_BYTES", 0)
    made = Warm()
    yield made
    made.close()


@pytest.fixture
def fork(warm: Warm, run: RunDirectory) -> Fork:
    warm.begin(argv(run), ENV, run.ranks / "warm.log")
    wait_until(lambda: warm.hear() or warm._is_ready)

    def forked(code: str, env: dict[str, str] = ENV, fds: tuple[int, ...] = (), **own: str) -> Forked | None:
        log = run.ranks / "out.log"
        with log.open("ab") as stream:
            variables = {**ENV, "CODE": f"import os, sys, time, signal\n{code}", **own}
            return warm.fork(env, variables, fds, stream.fileno(), stream.fileno())

    return forked


def argv(run: RunDirectory) -> list[str]:
    return [sys.executable, "-m", "tests.launch.forking", str(run.path)]


def ended(rank: Forked | None) -> int | None:
    assert rank
    wait_until(lambda: rank.poll() is not None)
    return rank.returncode


def test_a_forked_rank_has_its_variables_its_streams_and_a_session_of_its_own(fork: Fork, run: RunDirectory) -> None:
    code = "print(os.environ['RANK'], 'SAME' in os.environ, sys.argv[1], os.getsid(0) == os.getpid())\nsys.exit(75)"

    rank = fork(code, RANK="1")

    assert ended(rank) == 75
    assert (run.ranks / "out.log").read_text() == f"1 True {run.path} True\n"


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [("pass", 0), ("1 / 0", 1), ("sys.exit('wrong')", 1), ("os.kill(os.getpid(), signal.SIGKILL)", -9)],
)
def test_its_exit_code_is_that_of_a_process(fork: Fork, code: str, exit_code: int) -> None:
    assert ended(fork(code)) == exit_code


def test_it_hears_signals_and_has_pythons_own_handlers(fork: Fork) -> None:
    rank = fork("assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL\ntime.sleep(60)")
    assert rank and rank.poll() is None

    rank.send_signal(signal.SIGTERM)

    assert ended(rank) == -signal.SIGTERM
    rank.send_signal(signal.SIGKILL)  # to a process that has ended: nothing


def test_rank_0_inherits_the_stores_socket(fork: Fork) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        code = f"import socket\nprint(socket.socket(fileno=int(os.environ[{STORE_FD!r}])).accept()[1])"
        rank = fork(code, fds=(listener.fileno(),), **{STORE_FD: str(listener.fileno())})
        socket.create_connection(listener.getsockname()).close()

        assert ended(rank) == 0


def test_with_other_variables_nothing_is_forked_but_with_fewer_nodes(fork: Fork) -> None:
    assert fork("pass", env={**ENV, "SAME": "b"}) is None
    assert ended(fork("pass", env={**ENV, "WORLD_SIZE": "2"})) == 0


def test_a_process_that_cannot_be_forked_is_not_tried_again(warm: Warm, run: RunDirectory) -> None:
    warm.begin(argv(run), {**ENV, "UNUSABLE": "1"}, run.ranks / "warm.log")
    wait_until(lambda: warm.hear() or warm.is_gone)

    warm.begin(argv(run), ENV, run.ranks / "warm.log")

    assert warm.is_gone
    assert warm.fork(ENV, ENV, (), 1, 2) is None


@pytest.mark.parametrize("available", [None, 3 << 30])
def test_where_memory_is_short_in_the_host_or_its_control_group_there_is_none(
    warm: Warm, run: RunDirectory, monkeypatch: pytest.MonkeyPatch, available: int | None
) -> None:
    monkeypatch.setattr(warm_module, "_MEMORY_BYTES", 4 << 30)
    monkeypatch.setattr(warm_module, "available_host_bytes", lambda: available)

    warm.begin(argv(run), ENV, run.ranks / "warm.log")

    assert warm.is_gone


def test_ranks_end_with_the_process_that_forked_them(fork: Fork, warm: Warm) -> None:
    rank = fork("time.sleep(60)")
    assert rank and warm._process

    warm._process.kill()

    assert ended(rank) == -signal.SIGKILL
    assert not psutil.pid_exists(rank.pid) or psutil.Process(rank.pid).status() == psutil.STATUS_ZOMBIE
    assert fork("pass") is None


def test_ranks_are_told_once_when_their_supervisor_ends_and_may_finish(
    fork: Fork, warm: Warm, run: RunDirectory
) -> None:
    saves = """
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
print("ready", flush=True)
while not told: time.sleep(0.01)
time.sleep(0.5)
print(len(told), flush=True)
"""
    log = run.ranks / "out.log"
    assert fork(saves)
    wait_until(lambda: "ready" in log.read_text())
    assert warm._control and warm._process

    warm._control.close()

    assert warm._process.wait(30) == 0
    assert log.read_text() == "ready\n1\n"


def test_when_it_is_killed_its_ranks_stop_and_the_attempt_has_failed(fork: Fork, warm: Warm, run: RunDirectory) -> None:
    assert warm._process
    at_work = made_beat(0, os.getpid(), socket.gethostname(), 1, "step 1", 0.0, 0.0, phase=Phase.STEPS)
    beats.path_of(run, 0).write_bytes(at_work.to_bytes())
    saves = "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), sys.exit(75)))\n"
    saves += f"os.kill({warm._process.pid}, signal.SIGKILL) if os.environ['RANK'] == '1' else 0\ntime.sleep(60)"

    code = supervise.run(
        argv(run), ENV, run, ranks=[{"RANK": str(rank), "CODE": saves} for rank in range(2)], grace_s=5, warm=warm
    )

    assert beats.read_beats(run)[0].phase == Phase.STEPS
    assert code == 1, "and not 75, which nobody would start again"
    warm.begin(argv(run), ENV, run.ranks / "warm.log")
    assert warm.is_gone, "what killed it, such as a lack of memory, may do so again"


def test_a_supervisor_watches_forked_ranks_as_it_does_started_ones(fork: Fork, warm: Warm, run: RunDirectory) -> None:
    failing = "sys.exit(74) if os.environ['RANK'] == '1' else time.sleep(60)"
    ranks = [{"RANK": str(rank), "CODE": f"import os, sys, time\n{failing}"} for rank in range(2)]

    code = supervise.run(argv(run), ENV, run, ranks=ranks, grace_s=5, warm=warm)

    assert code == 74
    assert warm.is_gone, "its ranks came to no step"
