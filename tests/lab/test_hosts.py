"""A hostfile's hosts, each a shell on this machine behind a script in ssh's place; a real ssh is for tests/e2e."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.warm import warm
from tests.lab.ssh import launch
from tests.launch.processes import wait_until
from tests.refused import refused
from tuner import __version__
from tuner.errors import MachineError, UsageError
from tuner.lab import hosts as over_ssh
from tuner.machine.hostfile import MEETING, NODE, RESTARTED_NODE, Host

pytestmark = pytest.mark.timeout(60)
DRIVER = """
import sys
from pathlib import Path
from tests.lab.ssh import launch
from tuner.lab import hosts as over_ssh
over_ssh._AFTER_FAILURE_S, over_ssh._GONE_S, over_ssh._AGAIN_S = 0.5, 0.1, 0.1
spare = sum("spare" in name for name in sys.argv[2:])
plan = launch(Path(sys.argv[1]), *sys.argv[2:], num_spare=spare, replaces_lost=spare > 0)
sys.exit(over_ssh.run(plan, "10.0.0.1"))
"""
ROOT = Path(__file__).parents[2]
WAITS = "while not os.path.exists('there') and not os.path.exists('given up'): time.sleep(0.05)\n"


def does(folder: Path, code: str) -> None:
    """Make `python -m tuner` on each host run some lines, in which `name` and `rank` are the host's."""
    head = f"import os, signal, sys, time\nname = os.environ[{NODE!r}]\nrank = os.environ.get('NODE_RANK')\n"
    versions = f"if '--version' in sys.argv: print('tuner, version {__version__}\\npython 3.11'); sys.exit(0)\n"
    (folder / "tuner.py").write_text(head + versions + textwrap.dedent(code))


def answers(folder: Path, *ranks: list[int]) -> None:
    """Make each question which nodes answer get the next of these answers, and from then on the last."""
    package = folder / "tuner"
    (package / "lab").mkdir(parents=True)
    (folder / "tuner.py").rename(package / "__main__.py")
    for init in (package / "__init__.py", package / "lab" / "__init__.py"):
        init.touch()
    code = f"import json, pathlib\nanswers = {ranks!r}\nasked = pathlib.Path('asked')\n"
    code += "asked.open('a').write('x')\nat = min(len(asked.read_text()), len(answers)) - 1\n"
    (package / "lab" / "answering.py").write_text(code + "print(json.dumps({'ranks': answers[at]}))\n")


@pytest.fixture
def started(tmp_path: Path) -> Any:
    """Start the launcher as a process of its own; none survives the test."""
    children: list[subprocess.Popen[str]] = []

    def start(*hosts: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", DRIVER, tmp_path, *hosts],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.communicate()


@pytest.fixture
def ended(tmp_path: Path) -> Callable[..., str]:
    """Fork the launcher and return what it and its hosts wrote until it ended, with the code that is expected."""

    def end(*hosts: str, code: int = 0) -> str:
        child = warm().start([tmp_path, *hosts], code=DRIVER, env=os.environ)
        text, _ = child.communicate(timeout=30)
        assert child.returncode == code, text
        return str(text)

    return end


def test_each_host_starts_its_node_where_this_one_stands(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    does(tmp_path, "print(*(os.environ.get(key) for key in ('NNODES', 'NODE_RANK', 'ADDR', 'PORT', 'NPROC_PER_NODE',\n"
         "'CUDA_VISIBLE_DEVICES', 'MINE', 'SECRET')), os.getcwd() + ' ' + ' '.join(sys.argv[1:]))")  # fmt: skip
    plan = launch(tmp_path, variables={"MINE": "a b"}, master_port=1234)
    plan = over_ssh.Launch(**{**vars(plan), "hosts": (plan.hosts[0], Host("n2", (1, 3), is_whole=False))})

    code = over_ssh.run(over_ssh.look(plan)[0], "10.0.0.1")

    assert code == 0
    assert sorted(capfd.readouterr().out.splitlines()) == [
        f"n1: 2 0 10.0.0.1 1234 2 None a b None {tmp_path} train x",
        f"n2: 2 1 10.0.0.1 1234 2 1,3 a b None {tmp_path} train x",
    ]


def test_all_hosts_get_one_secret_of_the_launch_and_no_command_line_shows_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    does(tmp_path, f"print(os.environ[{MEETING!r}])")
    plans = [launch(tmp_path), launch(tmp_path)]

    for plan in plans:
        assert over_ssh.run(plan, "10.0.0.1") == 0

    secrets = {tuple(line.split(": ")[1].split()) for line in capfd.readouterr().out.splitlines()}
    assert all(names == ["n1", "n2"] for _, *names in secrets)
    assert len(secrets) == 2, "one for each launch"
    for secret, *_ in secrets:
        assert len(secret) == 64
        assert not any(
            secret in " ".join(plan.on(host)) or secret in repr(plan) for plan in plans for host in plan.hosts
        )


def test_every_host_that_is_not_ready_is_told_before_one_is_started(tmp_path: Path) -> None:
    does(tmp_path, "print('started')")
    plan = launch(tmp_path, "n1", "gone-1", "gone-2")

    with pytest.raises(MachineError) as caught:
        over_ssh.look(plan)

    told = [str(error) for error in (caught.value, *caught.value.others)]
    assert sum("cannot be reached: ssh: connect to host" in message for message in told) == 2
    assert "gone-1" in "".join(told) and "gone-2" in "".join(told)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("folder", "n1 has no folder /nowhere at all"),
        ("version", f"n1 has tuner 0.0.1, and this machine has {__version__}"),
        ("module", "cannot run .* No module named"),
    ],
)
def test_another_tuner_or_no_such_folder_on_a_host_is_refused(tmp_path: Path, change: str, said: str) -> None:
    does(tmp_path, "")
    plan = launch(tmp_path, "n1")
    if change == "folder":
        plan = over_ssh.Launch(**{**vars(plan), "folder": Path("/nowhere at all")})
    elif change == "version":
        (tmp_path / "tuner.py").write_text("print('tuner, version 0.0.1')")
    else:
        (tmp_path / "tuner.py").write_text("import not_there_at_all")

    with pytest.raises(MachineError, match=said):
        over_ssh.look(plan)


def test_the_code_is_that_of_the_host_that_failed_first_and_the_others_end(ended: Any, tmp_path: Path) -> None:
    ends = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))\ntime.sleep(0.5 if rank == '1' else 60)\nsys.exit(74)"
    does(tmp_path, ends)

    ended(code=74)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_reaches_all_hosts_and_their_code_is_the_launchers(
    started: Any, tmp_path: Path, number: signal.Signals
) -> None:
    does(
        tmp_path,
        """
        for one in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(one, lambda *_: (print("saved", flush=True), sys.exit(75)))
        print("ready", flush=True)
        time.sleep(60)
        """,
    )
    child = started()
    assert {child.stdout.readline() for _ in range(2)} == {"n1: ready\n", "n2: ready\n"}

    child.send_signal(number)

    text, _ = child.communicate(timeout=30)
    assert (child.returncode, sorted(text.splitlines())) == (75, ["n1: saved", "n2: saved"])


def test_a_host_that_is_lost_does_not_hold_up_the_end_after_a_failure(ended: Any, tmp_path: Path) -> None:
    does(tmp_path, "sys.exit(74)")
    text = ended("n1", "lost", code=74)

    assert "lost does not end" in text


def test_a_host_whose_connection_alone_is_lost_ends_nothing_and_none_takes_its_place(
    ended: Any, tmp_path: Path
) -> None:
    does(tmp_path, "while not os.path.exists('asked') or len(open('asked').read()) < 4: time.sleep(0.05)")
    answers(tmp_path, [0, 1])

    text = ended("n1", "dies", "spare1")

    assert "connection to dies is gone; its ranks still answer" in text
    assert "spare1" not in text


def test_the_run_goes_on_where_node_0_has_lost_its_connection(ended: Any, tmp_path: Path) -> None:
    does(tmp_path, "while not os.path.exists('asked') or len(open('asked').read()) < 3: time.sleep(0.05)")
    answers(tmp_path, [0, 1])

    ended("dies", "n2")


def test_a_host_whose_connection_was_lost_and_that_is_then_silent_is_lost(ended: Any, tmp_path: Path) -> None:
    does(tmp_path, f"if rank == '1': open('there', 'w').write(name)\n{WAITS}")
    answers(tmp_path, [0, 1], [0], [0, 1], [], [0])

    ended("n1", "dies", "spare1")

    assert (tmp_path / "there").read_text() == "spare1"
    assert len((tmp_path / "asked").read_text()) >= 6, "one silence is none, and node 0's own tells nothing"


def test_a_host_that_is_not_ready_is_left_out_where_enough_others_are(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    does(tmp_path, "")
    plan = launch(tmp_path, "n1", "gone-2", "n3", "gone-4", num_spare=2)

    ready, _ = over_ssh.look(plan)

    assert ([host.name for host in ready.hosts], ready.spare) == (["n1", "n3"], ())
    told = capfd.readouterr().err
    assert all(f"WARNING: {name} cannot be reached" in told for name in ("gone-2", "gone-4"))
    with pytest.raises(MachineError, match="gone-2"):
        over_ssh.look(launch(tmp_path, "gone-2", "n3", "n4", num_spare=1, master_addr="10.0.0.1"))


def test_a_spare_host_takes_the_node_of_one_that_is_lost(ended: Any, tmp_path: Path) -> None:
    does(tmp_path, f"if rank == '1': open('there', 'w').write(name + ' ' + os.environ[{MEETING!r}])\n{WAITS}")

    ended("n1", "dies", "spare1", "spare2")

    name, _, *names = (tmp_path / "there").read_text().split()
    assert (name, names) == ("spare1", ["n1", "spare1"])


def test_the_first_host_is_started_again_where_it_was_and_goes_on_from_its_checkpoint(
    ended: Any, tmp_path: Path
) -> None:
    text = f"name + ' ' + os.environ.get({RESTARTED_NODE!r}, '0')"
    does(tmp_path, f"if rank == '0': open('there', 'w').write({text})\n{WAITS}")
    ended("once", "n2", "spare1")

    assert (tmp_path / "there").read_text().split() == ["once", "1"]


def test_a_run_that_is_done_without_a_lost_host_ends_well(ended: Any, tmp_path: Path) -> None:
    does(tmp_path, "time.sleep(1)")

    ended("n1", "dies", "gone-spare")


def test_with_fewer_nodes_allowed_each_host_is_told_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    does(tmp_path, "print(os.environ['NNODES'])")

    assert over_ssh.run(launch(tmp_path, min_nodes=1), "10.0.0.1") == 0

    assert sorted(capfd.readouterr().out.splitlines()) == ["n1: 1:2", "n2: 1:2"]


def test_a_lost_host_that_nothing_replaces_ends_with_the_code_of_those_that_waited(ended: Any, tmp_path: Path) -> None:
    does(tmp_path, "time.sleep(1)\nsys.exit(124)")

    text = ended("dies", "n2", "spare1", code=124)

    assert "spare1" not in text


def test_a_second_signal_ends_the_launcher_though_a_host_is_lost(started: Any, tmp_path: Path) -> None:
    does(tmp_path, "signal.signal(signal.SIGTERM, lambda *_: None)\nprint('ready', flush=True)\ntime.sleep(60)")
    child = started("n1", "lost")
    assert {child.stdout.readline() for _ in range(2)} == {"n1: ready\n", "lost: ready\n"}

    child.send_signal(signal.SIGINT)
    child.send_signal(signal.SIGTERM)

    child.communicate(timeout=30)
    assert child.returncode == 1


def test_ssh_asks_a_silent_host_whether_it_is_alive(tmp_path: Path) -> None:
    plan = launch(tmp_path)

    assert "ServerAliveInterval=10" in plan.on(plan.hosts[0])


def test_a_launcher_that_is_killed_leaves_nothing_running(started: Any, tmp_path: Path) -> None:
    does(tmp_path, "print(os.getpid(), flush=True)\ntime.sleep(60)")
    child = started()
    pids = [int(child.stdout.readline().split()[1]) for _ in range(2)]

    child.kill()

    wait_until(_all_gone(pids))


def _all_gone(pids: list[int]) -> Callable[[], bool]:
    return lambda: not any(psutil.pid_exists(pid) for pid in pids)


def test_no_list_of_processes_shows_what_is_set_on_a_host(started: Any, tmp_path: Path) -> None:
    plan = launch(tmp_path, variables={"WANDB_API_KEY": "secret-value"})

    assert not any("secret-value" in word for word in plan.on(plan.hosts[0]))
    assert "secret-value" in plan.of(0, "10.0.0.1"), "it goes through the connection"


def test_hosts_with_different_numbers_of_slots_are_refused(tmp_path: Path) -> None:
    hosts = (Host("n1", (0, 1), is_whole=True), Host("n2", (0, 1, 2), is_whole=True))

    with refused(UsageError, "--hostfile", "n1 2", "n2 3", "--include NAME:0,1"):
        over_ssh.plan(hosts, "ssh", (), tmp_path, {}, {})


def test_more_processes_than_slots_are_refused_and_fewer_are_taken(tmp_path: Path) -> None:
    assert launch(tmp_path, nproc_per_node=1).nproc_per_node == 1
    with refused(UsageError, "--nproc-per-node", 3, 2):
        launch(tmp_path, nproc_per_node=3)


def test_a_line_break_cannot_become_a_second_command(tmp_path: Path) -> None:
    with refused(UsageError, "--hostfile"):
        launch(tmp_path, variables={"A": "x\nTERM"}).of(0, "h")
