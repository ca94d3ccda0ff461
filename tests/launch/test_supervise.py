"""Real processes and real signals; a few lines of Python stand in for ranks."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import Started
from tests.e2e.warm import warm
from tests.launch.place import free_port
from tests.launch.processes import alive, wait_until
from tests.launch.rank import process
from tests.refused import refused
from tests.runs.made_records import run_json
from tuner.errors import DiskError, MachineError
from tuner.launch import supervise
from tuner.machine.topology import Topology
from tuner.runs import checkpoints, ending
from tuner.runs.creation import create
from tuner.runs.diagnose import OtherNode
from tuner.runs.directory import RunDirectory
from tuner.runs.records import RunStatus

pytestmark = pytest.mark.timeout(300)
RANKS: list[dict[str, str]] = [{"RANK": "0"}, {"RANK": "1"}]
_watched = partial(supervise.run, grace_s=300, ranks=RANKS[:1])

OOM = "OOM = 'torch.OutOfMemoryError: CUDA out of memory.'\n"

DRIVER = """
import json, os, sys
from pathlib import Path
from tuner.launch import supervise
from tuner.machine.topology import Topology
from tuner.runs.directory import RunDirectory
run = RunDirectory(Path(sys.argv[2]))
supervise._LOOK_S = supervise._STACKS_S = 0.1
supervise.POLL_S = 0.02
options = json.loads(sys.argv[3])
supervise._TELL_S = options.pop("told_every_s", 10)
sys.exit(supervise.run(json.loads(sys.argv[1]), os.environ, run, **options))
"""
TERM_SAVES = "signal.signal(signal.SIGTERM, lambda *_: (report(0, 75, 'saved'), sys.exit(1)))\n"
SAVES_LATER = """
signal.signal(signal.SIGTERM, lambda *_: (said('asked'), until('go on'), report(0, 75, 'saved'), sys.exit(1)))
"""
IGNORES_TERM = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
STAYS = "said('ready')\ntime.sleep(60)\n"


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for new ranks ten times a second, not once, and for those that have ended 50 times."""
    monkeypatch.setattr(supervise, "_LOOK_S", 0.1)
    monkeypatch.setattr(supervise, "_STACKS_S", 0.1)
    monkeypatch.setattr(supervise, "POLL_S", 0.02)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    """Return a fresh run directory; whatever happens, none of its processes survives the test."""
    found = create(tmp_path / "run", {"recipe.py": "", "run.json": run_json()}, resume=False)
    yield found
    for left in alive(found.path):
        left.kill()


def _supervised(run: RunDirectory, code: str, **options: Any) -> int:
    return _watched(process(run.path, OOM + code), os.environ, run, **options)


def _status(run: RunDirectory) -> dict[str, Any]:
    found: dict[str, Any] = run.read_json(run.status)
    return found


def _driver(run: RunDirectory, code: str, **options: Any) -> list[str]:
    options = {"grace_s": 300, "ranks": RANKS[:1], **options}
    return [sys.executable, "-c", DRIVER, json.dumps(process(run.path, code)), str(run.path), json.dumps(options)]


class _Driven:
    """A supervisor in a process of its own, to send signals to: forked, unless it has an odd stream or is started so.

    Args:
        before: The words before the command, such as nohup.
    """

    def __init__(
        self, run: RunDirectory, code: str, stderr: Any = None, before: Sequence[str] = (), **options: Any
    ) -> None:
        self.run = run
        python, flag, driver, *words = _driver(run, code, **options)
        self.process: Started
        if before or stderr:
            command = [*before, python, flag, driver, *words]
            self.process = subprocess.Popen(
                command, stderr=stderr or subprocess.PIPE, text=True, start_new_session=True
            )
        else:
            self.process = warm().start(words, code=driver, env=os.environ, has_two_outputs=True)
        wait_until((run.path / "ready").exists)

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        _, text = self.process.communicate(timeout=120)
        assert alive(self.run.path) == []
        return self.process.returncode, text


# How a run ends by itself


def test_a_run_that_succeeds_is_0_and_its_status_is_the_workers(
    run: RunDirectory, capfd: pytest.CaptureFixture[str]
) -> None:
    run.write_status(RunStatus(state="done", exit_code=0))

    code = _supervised(run, "print('trained')")

    assert code == 0
    assert capfd.readouterr() == ("trained\n", "")
    assert _status(run)["state"] == "done"


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "report(0, 124, 'hang'); sys.exit(1)"])
def test_a_run_that_is_done_stays_done_whatever_becomes_of_its_samples(
    end: str, run: RunDirectory, capfd: pytest.CaptureFixture[str]
) -> None:
    run.write_status(RunStatus(state="done", exit_code=0))

    assert _supervised(run, end) == 0
    assert capfd.readouterr().err.startswith(
        "WARNING: the run is done and its result is complete, but the cleanup after it was interrupted."
    )
    assert _status(run)["state"] == "done"


def test_a_ranks_report_decides_over_its_exit_code(run: RunDirectory, capfd: pytest.CaptureFixture[str]) -> None:
    code = _supervised(run, "report(0, 2, 'bad-data: row 3 is torn.', cause='bad-data', step=None); sys.exit(1)")

    assert code == 2
    assert capfd.readouterr().err.splitlines() == [
        "error[bad-data]: row 3 is torn.",
        f"On rank 0, before the first step. More: tuner explain bad-data. Logs: {run.ranks}",
        f"Next: tuner data {run.recipe}",
    ]
    assert _status(run) | {"pid": 0, "ended": ""} == {
        "version": 1,
        "state": "failed",
        "pid": 0,
        "exit_code": 2,
        "message": "bad-data: row 3 is torn.",
        "ended": "",
        "diagnosis": {
            "cause": "bad-data",
            "what": "row 3 is torn.",
            "rank": 0,
            "step": None,
            "next_command": f"tuner data {run.recipe}",
        },
    }


def test_what_rank_0_prints_is_shown_until_a_rank_fails(run: RunDirectory, capfd: pytest.CaptureFixture[str]) -> None:
    log = "log = open(sys.argv[1] + '/ranks/0.log', 'a', buffering=1)"

    _supervised(run, f"{log}; log.write('step 1\\n'); time.sleep(0.2); report(0, 1, OOM); log.write('Traceback\\n')")

    assert capfd.readouterr().out == "step 1\n"
    assert (run.ranks / "0.log").read_text() == "step 1\nTraceback\n"


@pytest.mark.parametrize("options", [{"node_rank": 1}, {"shows_rank_0": False}])
def test_only_the_first_node_shows_what_rank_0_prints_if_the_run_is_shown(
    run: RunDirectory, capfd: pytest.CaptureFixture[str], options: dict[str, Any]
) -> None:
    agent = "" if "node_rank" in options else "print('agent'); "
    code = agent + "open(sys.argv[1] + '/ranks/0.log', 'w').write('step 1\\n')"

    assert _supervised(run, code, **options) == 0
    assert capfd.readouterr().out == ""


def test_a_closed_standard_output_ends_no_run(run: RunDirectory) -> None:
    log = "log = open(sys.argv[1] + '/ranks/0.log', 'a', buffering=1)\n"
    code = f"{log}for _ in range(10): log.write('step\\n'), time.sleep(0.05)"

    driver = subprocess.Popen(
        _driver(run, code), stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert driver.stdout
    driver.stdout.readline()
    driver.stdout.close()

    assert driver.wait(timeout=120) == 0
    assert driver.stderr and driver.stderr.read() == b""
    driver.stderr.close()


def test_a_kill_for_memory_is_told_by_the_kernels_counter(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter((4, 5))
    monkeypatch.setattr(supervise, "num_oom_kills", lambda: next(counts))

    assert _supervised(run, "os.kill(os.getpid(), 9)") == 137
    assert _status(run)["diagnosis"]["cause"] == "host-out-of-memory"


def test_a_diagnosis_that_fails_hides_no_error(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ending, "diagnose", lambda evidence: evidence.no_such_thing)

    with pytest.raises(AttributeError):
        _supervised(run, "report(1, 1, 'the error itself'); sys.exit(1)")

    assert "the error itself" in capfd.readouterr().err


def test_a_status_that_cannot_be_written_hides_no_error(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise DiskError("no space")

    monkeypatch.setattr(RunDirectory, "write_status", full)

    assert _supervised(run, "report(0, 1, OOM); sys.exit(1)") == 1
    assert capfd.readouterr().err.startswith("error[gpu-out-of-memory]: ")


def test_a_run_directory_that_was_removed_hides_no_end(run: RunDirectory, capfd: pytest.CaptureFixture[str]) -> None:
    code = f"import os, shutil, signal; shutil.rmtree({str(run.path)!r}); os.kill(os.getpid(), signal.SIGKILL)"

    assert _supervised(run, code) == 137

    assert "error[killed]: " in capfd.readouterr().err


def test_the_first_report_is_the_cause_and_later_ones_its_consequences(run: RunDirectory) -> None:
    code = _supervised(run, "report(1, 124, 'hang'); time.sleep(0.05); report(0, 1, 'KeyError: 1'); sys.exit(1)")

    assert code == 124
    assert _status(run)["message"] == "hang"
    assert _status(run)["diagnosis"]["rank"] == 1


def test_an_error_is_the_cause_though_a_rank_that_lost_its_peer_was_faster(run: RunDirectory) -> None:
    lost = "RuntimeError: Connection closed by peer"

    _supervised(run, f"report(0, 1, {lost!r}); time.sleep(0.05); report(1, 1, OOM, step=3); sys.exit(1)")

    assert _status(run)["diagnosis"]["cause"] == "gpu-out-of-memory"
    assert (_status(run)["diagnosis"]["rank"], _status(run)["diagnosis"]["step"]) == (1, 3)


def test_a_report_counts_though_the_rank_ended_with_0(run: RunDirectory) -> None:
    assert _supervised(run, "report(1, 74, 'disk is full')") == 74


def test_what_a_failed_save_left_is_removed_when_all_ranks_are_gone(run: RunDirectory) -> None:
    (checkpoints.unfinished(run.checkpoints) / "checkpoint-4").mkdir(parents=True)

    _supervised(run, "report(0, 74, 'no space'); sys.exit(1)")

    assert not checkpoints.unfinished(run.checkpoints).exists()


def test_a_stop_is_no_failure(run: RunDirectory) -> None:
    assert _supervised(run, "report(0, 75, 'stopped at step 3'); sys.exit(1)") == 75
    assert _status(run)["state"] == "stopped"


def test_an_exit_at_once_without_a_report_keeps_its_code_and_shows_what_was_said(
    run: RunDirectory, capfd: pytest.CaptureFixture[str]
) -> None:
    code = _supervised(run, "sys.stderr.write('no module named torch\\n'); sys.exit(3)")

    assert code == 3
    told = capfd.readouterr().err
    assert "no module named torch" in told
    assert str(run.ranks) in told
    assert (run.ranks / "launcher-0.log").read_text() == "no module named torch\n"
    assert _status(run)["exit_code"] == 3


@pytest.mark.parametrize(
    ("end", "code", "told"),
    [
        ("os.kill(os.getpid(), 9)", 137, "rank 0 was killed by SIGKILL (out of memory?)"),
        ("os.kill(os.getpid(), 11)", 139, "rank 0 was killed by SIGSEGV"),
        ("sys.exit(3)", 3, "rank 0 ended with code 3 and without a report"),
    ],
)
def test_a_rank_that_ended_without_a_word_is_told_by_its_end(run: RunDirectory, end: str, code: int, told: str) -> None:
    orphan = "spawn('time.sleep(60)', start_new_session=True); time.sleep(0.5)"

    assert _supervised(run, f"{orphan}; {end}") == code
    assert told in _status(run)["message"]
    assert _status(run)["diagnosis"]["rank"] == 0
    assert alive(run.path) == []


def test_a_killed_rank_is_the_cause_though_others_report_that_they_lost_it(run: RunDirectory) -> None:
    lost = "until('up'); time.sleep(0.3); report(0, 1, 'connection closed by peer'); sys.exit(1)"

    code = _watched(process(run.path, _each(lost, "said('up'); os.kill(os.getpid(), 9)")), os.environ, run, ranks=RANKS)

    assert code == 137
    assert "rank 1 was killed by SIGKILL" in _status(run)["message"]


def test_arguments_and_environment_arrive_as_they_are(run: RunDirectory) -> None:
    code = "open(sys.argv[2], 'w', encoding='utf-8').write(os.environ['WITH'] + '|' + sys.argv[3])"
    target = run.path / "a b"

    argv = [*process(run.path, code), str(target), "--flag=x y ü"]
    _watched(argv, {"WITH": "spaces and ü", "PYTHONUTF8": "1"}, run)

    assert target.read_text(encoding="utf-8") == "spaces and ü|--flag=x y ü"


# Nothing is left behind


def test_a_grandchild_that_ignores_sigterm_in_a_session_of_its_own_is_killed(run: RunDirectory) -> None:
    grandchild = f"{IGNORES_TERM}said('grandchild'); time.sleep(60)"
    child = f"spawn({grandchild!r}, start_new_session=True); time.sleep(60)"

    code = _supervised(run, f"spawn({child!r}, start_new_session=True); until('grandchild'); time.sleep(0.5)")

    assert code == 0
    assert alive(run.path) == []


def test_an_orphan_that_was_seen_is_killed(run: RunDirectory) -> None:
    child = "spawn('time.sleep(60)'); said('spawned'); time.sleep(0.5)"

    _supervised(run, f"spawn({child!r}).wait()")

    assert (run.path / "spawned").exists()
    assert alive(run.path) == []


def test_processes_of_others_are_left_alone(run: RunDirectory, tmp_path: Path) -> None:
    mine = subprocess.Popen(process(tmp_path, "time.sleep(60)"))
    try:
        _supervised(run, "spawn('time.sleep(60)'); time.sleep(0.3)")

        assert mine.poll() is None
    finally:
        mine.kill()
        mine.wait()


def test_the_signals_are_given_back(run: RunDirectory) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)]

    _supervised(run, "")

    after = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)]
    assert after == before


# Signals


def _after_the_first_line(text: str) -> str:
    """Return what was said after the line about the stop, without how to resume."""
    first, _, others = text.partition("\n")
    assert first.startswith("Stopping at SIG")
    return others.partition(" Resume: ")[0]


"""What a person at the keyboard reads at once, however long the step takes."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2])
def test_the_first_signal_asks_the_ranks_to_save_and_stop(run: RunDirectory, number: int) -> None:
    driven = _Driven(run, TERM_SAVES + STAYS)

    driven.send(number)

    code, text = driven.end()
    assert (code, _after_the_first_line(text)) == (75, "saved")
    assert _status(run)["state"] == "stopped"


@pytest.mark.parametrize("first", [signal.SIGHUP, signal.SIGUSR2])
@pytest.mark.parametrize("is_sigterm", [False, True])
def test_asking_again_does_not_interrupt_the_save(run: RunDirectory, first: int, is_sigterm: bool) -> None:
    """A terminal that closes sends SIGHUP twice, from the kernel and from the shell; a machine then SIGTERM to all."""
    driven = _Driven(run, SAVES_LATER + STAYS)
    driven.send(first)
    wait_until((run.path / "asked").exists)

    for number in [signal.SIGTERM] if is_sigterm else [first, first]:
        driven.send(number)
    time.sleep(0.2)
    (run.path / "go on").touch()

    code, text = driven.end()
    assert (code, _after_the_first_line(text)) == (75, "saved")


def test_under_nohup_a_closing_terminal_ends_no_run(run: RunDirectory) -> None:
    driven = _Driven(run, TERM_SAVES + STAYS, before=["nohup"])

    driven.send(signal.SIGHUP)
    time.sleep(0.2)

    assert driven.process.poll() is None
    driven.send(signal.SIGTERM)
    assert driven.end()[0] == 75
    assert _status(run)["signal"] == signal.SIGTERM


def test_a_signal_after_the_result_was_written_makes_no_failure_of_it(run: RunDirectory) -> None:
    ends = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))"
    done = "Path(sys.argv[1], 'status.json').write_text('{\"state\": \"done\"}')"
    driven = _Driven(run, f"from pathlib import Path\n{ends}\n{done}\n{STAYS}")

    driven.send(signal.SIGTERM)

    code, text = driven.end()
    assert (code, _after_the_first_line(text)) == (0, "")
    assert _status(run)["state"] == "done"


_SHELL = "subprocess.Popen(['sh', '-c', '{}', sys.argv[1]], start_new_session=True)"


@pytest.mark.parametrize(
    "code",
    [
        f"while True: {_SHELL.format('sleep 60; :')}; time.sleep(0.02)",
        f"{_SHELL.format('for i in $(seq 400); do sleep 60 & sleep 0.001; done')}\ntime.sleep(60)",
    ],
    ids=["a rank", "a child of a rank"],
)
def test_a_second_signal_leaves_nothing_that_is_just_being_started(run: RunDirectory, code: str) -> None:
    starts = "signal.signal(signal.SIGTERM, lambda *_: said('asked'))\nsaid('ready')\n"
    driven = _Driven(run, f"import subprocess\n{starts}{code}")

    driven.send(signal.SIGTERM)
    wait_until((run.path / "asked").exists)
    driven.send(signal.SIGTERM)

    assert driven.end()[0] == 128 + signal.SIGTERM  # the process that it is forked from counts what is left


@pytest.mark.parametrize("sent", ["TERM TERM", "INT INT", "INT TERM", "HUP TERM TERM", "USR2 TERM TERM"])
def test_the_signals_that_the_run_names_kill_ranks_that_ignore_sigterm(run: RunDirectory, sent: str) -> None:
    first, *later = (signal.Signals[f"SIG{name}"] for name in sent.split())
    rank = f"{IGNORES_TERM}{STAYS}"
    hangs = "signal.signal(signal.SIGTERM, lambda *_: said('asked'))"
    driven = _Driven(run, f"{hangs}\nspawn({rank!r}, start_new_session=True)\ntime.sleep(60)")

    driven.send(first)
    wait_until((run.path / "asked").exists)
    for number in later:
        time.sleep(0.2)  # of two that are pending at once Python sees one
        driven.send(number)

    code, text = driven.end()
    assert code == 128 + later[-1]
    assert ("Two SIGTERMs" in text) == (len(later) == 2)
    assert _after_the_first_line(text) == "killed at the second signal\n"
    assert _status(run)["state"] == "failed"


@pytest.mark.parametrize(
    ("number", "doing"),
    [
        (signal.SIGTERM, "loading the model"),
        (signal.SIGINT, "preparing the data"),
        (signal.SIGHUP, "validating"),
        (signal.SIGUSR2, "saving step 3"),
    ],
)
def test_a_stop_says_at_once_and_again_what_each_rank_does(run: RunDirectory, number: int, doing: str) -> None:
    driven = _Driven(run, f"{SAVES_LATER}beat(0, doing={doing!r})\n{STAYS}", ranks=[{"RANK": "0"}], told_every_s=0.05)

    driven.send(number)
    time.sleep(0.6)
    (run.path / "go on").touch()

    first, *others = driven.end()[1].splitlines()
    assert signal.Signals(number).name in first
    assert f"rank 0: {doing}" in first
    assert sum(f"rank 0: {doing}" in line for line in others) >= 2


DEAF_RANK = f"{IGNORES_TERM}beat(1)\n{STAYS}"
WAITS_FOR_IT = "signal.signal(signal.SIGTERM, lambda *_: None)\n"


@pytest.mark.parametrize("code", [f"{WAITS_FOR_IT}spawn({DEAF_RANK!r}).wait()", f"{IGNORES_TERM}beat(0)\n{STAYS}"])
def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace(run: RunDirectory, code: str) -> None:
    driven = _Driven(run, code, grace_s=0.2)

    driven.send(signal.SIGTERM)

    exit_code, text = driven.end()
    assert exit_code == 128 + signal.SIGKILL
    assert _after_the_first_line(text).startswith("error[did-not-stop]: a rank did not stop within ")
    assert _status(run)["diagnosis"]["cause"] == "did-not-stop"


def test_the_grace_is_longer_than_saves_took(run: RunDirectory) -> None:
    saves = "lambda *_: (time.sleep(0.8), report(0, 75, 'saved'), os._exit(1))"
    rank = f"signal.signal(signal.SIGTERM, {saves})\nbeat(0, save_s=2.5)\n{STAYS}"
    agent = "rank = None\nsignal.signal(signal.SIGTERM, lambda *_: rank.terminate())\n"
    driven = _Driven(run, f"{agent}rank = spawn({rank!r})\nrank.wait()", grace_s=0.3)

    driven.send(signal.SIGTERM)

    code, text = driven.end()
    assert (code, _after_the_first_line(text)) == (75, "saved")


def test_once_a_rank_has_failed_the_others_do_not_get_the_whole_grace(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "_AFTER_FAILURE_S", 0.2)
    fails = "report(0, 124, 'hang: no progress', cause='hang')"

    assert _supervised(run, f"rank = spawn({DEAF_RANK!r}); until('ready'); {fails}; rank.wait()") == 124
    assert alive(run.path) == []


def test_a_stopped_rank_is_named_and_goes_on_to_its_end(run: RunDirectory) -> None:
    (run.path / "run.json").write_text(run_json(world_size=2))
    rank = "signal.signal(signal.SIGTERM, lambda *_: os._exit(0))\nbeat(1); said('here'); time.sleep(60)"
    agent = f"""
rank = spawn({rank!r}); until('here'); rank.send_signal(signal.SIGSTOP); time.sleep(0.5)
report(0, 124, 'hang: no progress', cause='hang', step=2); rank.terminate(); rank.wait(); sys.exit(1)
"""

    assert _supervised(run, agent) == 124
    assert _status(run)["diagnosis"]["rank"] == 1
    assert "rank 1 was suspended" in _status(run)["diagnosis"]["what"]


def test_a_terminal_that_is_gone_changes_neither_exit_code_nor_status(run: RunDirectory) -> None:
    with Path("/dev/full").open("w") as full:
        driven = _Driven(run, TERM_SAVES + STAYS, stderr=full)
        driven.send(signal.SIGHUP)

        assert driven.end()[0] == 75
    assert _status(run)["state"] == "stopped"


def test_a_run_that_stops_without_a_word_has_the_signals_code(run: RunDirectory) -> None:
    driven = _Driven(run, STAYS)

    driven.send(signal.SIGINT)

    code, text = driven.end()
    assert (code, _after_the_first_line(text)) == (130, "stopped by SIGINT\n")


def test_a_signal_while_a_rank_is_being_started_is_not_lost(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.Popen

    def interrupted(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*args, **options)

    monkeypatch.setattr(subprocess, "Popen", interrupted)

    assert _supervised(run, "time.sleep(60)") == 143
    assert alive(run.path) == []


def test_a_rank_has_a_session_of_its_own_so_that_ctrl_c_reaches_it_once(run: RunDirectory) -> None:
    assert _supervised(run, "sys.exit(os.getsid(0) != os.getpid())") == 0


def test_a_killed_supervisor_takes_its_ranks_along(run: RunDirectory) -> None:
    driven = _Driven(run, IGNORES_TERM + STAYS)

    driven.process.kill()
    driven.process.communicate(timeout=120)

    wait_until(lambda: alive(run.path) == [])


# Several ranks


def _each(rank_0: str, rank_1: str) -> str:
    return f"if os.environ['RANK'] == '0':\n    {rank_0}\nelse:\n    {rank_1}\n"


def test_ranks_that_all_succeed_are_waited_for(run: RunDirectory) -> None:
    code = _each("pass", "time.sleep(0.2); said('late')")

    assert _supervised(run, code, ranks=RANKS) == 0
    assert (run.path / "late").exists()


@pytest.mark.parametrize(("end", "code"), [("os.kill(os.getpid(), 9)", 137), ("sys.exit(3)", 3)])
def test_a_rank_that_fails_without_a_word_is_the_cause_and_the_others_are_told_to_end(
    run: RunDirectory, end: str, code: int
) -> None:
    told = "signal.signal(signal.SIGTERM, lambda *_: (said('told'), sys.exit(143)))"
    code_of_ranks = _each(f"{told}; said('up'); time.sleep(60)", f"until('up'); {end}")

    assert _supervised(run, code_of_ranks, ranks=RANKS) == code
    assert (run.path / "told").exists()
    assert _status(run)["diagnosis"]["rank"] == 1
    assert alive(run.path) == []


def test_a_rank_that_does_not_end_after_another_has_failed_is_killed_and_no_cause(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "_AFTER_FAILURE_S", 0.2)
    ranks = _each("said('up'); time.sleep(60)", "until('up'); report(1, 1, OOM); sys.exit(1)")

    assert _supervised(run, IGNORES_TERM + ranks, ranks=RANKS) == 1
    assert (_status(run)["diagnosis"]["cause"], _status(run)["diagnosis"]["rank"]) == ("gpu-out-of-memory", 1)
    assert alive(run.path) == []


def test_a_signal_reaches_every_rank_once(run: RunDirectory) -> None:
    code = """
rank, asked = int(os.environ["RANK"]), []
signal.signal(signal.SIGTERM, lambda *_: (asked.append(1), said(f"asked {rank}")))
said("up") if rank == 0 else (until("up"), said("ready"))
until("asked 0"), until("asked 1")
time.sleep(0.2)
report(rank, 75, f"saved, asked {len(asked)} time")
sys.exit(75)
"""
    driven = _Driven(run, code, ranks=RANKS)

    driven.send(signal.SIGTERM)

    code_of_run, text = driven.end()
    assert (code_of_run, _after_the_first_line(text)) == (75, "saved, asked 1 time")
    assert _status(run)["state"] == "stopped"


def test_where_not_all_ranks_can_be_started_none_is_left(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    real, started = subprocess.Popen, iter([True, False])

    def limited(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        if next(started):
            return real(*args, **options)
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))  # as under `ulimit -u`

    monkeypatch.setattr(subprocess, "Popen", limited)

    with refused(MachineError, sys.executable, os.strerror(errno.EAGAIN)):
        _supervised(run, "time.sleep(60)", ranks=RANKS)

    assert alive(run.path) == []


def test_the_second_signal_kills_every_rank(run: RunDirectory) -> None:
    ranks = _each("said('up'); time.sleep(60)", "until('up'); said('ready'); time.sleep(60)")
    driven = _Driven(run, IGNORES_TERM + ranks, ranks=RANKS)

    driven.send(signal.SIGTERM)
    time.sleep(0.2)
    driven.send(signal.SIGTERM)

    code_of_run, text = driven.end()
    assert (code_of_run, _after_the_first_line(text)) == (143, "killed at the second signal\n")


def test_rank_0_alone_inherits_the_socket_that_listens_at_the_port_of_all(run: RunDirectory) -> None:
    code = """
import socket
assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
port = int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    listener = socket.socket(fileno=int(os.environ["TUNER_STORE_FD"]))
    assert listener.getsockname() == ("127.0.0.1", port)
    peer, _ = listener.accept()
    sys.exit(peer.recv(1) != b"1")
assert "TUNER_STORE_FD" not in os.environ
socket.create_connection(("127.0.0.1", port)).sendall(b"1")
"""

    assert _supervised(run, code, ranks=RANKS) == 0


@pytest.mark.parametrize(("first", "called"), [(0, "127.0.0.1"), (2, "192.0.2.1")])
def test_node_0_needs_no_way_to_itself_by_the_address_that_other_nodes_call(first: int, called: str) -> None:
    ranks = [{"RANK": str(first + at), "LOCAL_RANK": str(at)} for at in range(2)]

    with supervise.rank_starts({"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": str(free_port())}, ranks) as starts:
        assert [rank_start.env["MASTER_ADDR"] for rank_start in starts] == [called] * 2


# Other nodes


class _Meeting:
    """A meeting whose only word comes after some seconds."""

    names, is_adrift, is_abandoned = ("a", "b"), False, False
    topology, keeps_status = Topology("local", 2, 1, 1, 2), True
    own_status: RunStatus | None = None

    def __init__(self, word: OtherNode, after_s: float) -> None:
        self.word, self.from_s = word, time.monotonic() + after_s

    def interruption(self) -> OtherNode | None:
        return self.word if time.monotonic() >= self.from_s else None

    def await_word(self) -> OtherNode | None:
        return self.word


@pytest.mark.parametrize(
    "code",
    [
        STAYS,  # it would wait for the lost ranks
        TERM_SAVES + STAYS,  # only the launcher there is gone: it stops and saves with the ranks there
        "report(0, 1, 'RuntimeError: Connection closed by peer [127.0.0.1]:43400.')\nsys.exit(1)\n",
    ],
)
def test_ranks_end_when_another_node_is_gone_and_that_node_is_named(
    run: RunDirectory, capfd: pytest.CaptureFixture[str], code: str
) -> None:
    meeting = _Meeting(OtherNode("node 1 (b, 10.0.0.2) is gone", "lost-peer", 1), 0.3)

    ended = _supervised(run, code, meeting=meeting)

    assert ended == 1
    assert (_status(run)["diagnosis"]["cause"], _status(run)["diagnosis"].get("rank")) == ("lost-peer", None)
    assert "node 1 (b, 10.0.0.2) is gone" in _status(run)["diagnosis"]["what"]
    assert "node 1 (b, 10.0.0.2) is gone" in capfd.readouterr().err


def test_ranks_that_all_stopped_because_a_command_was_killed_say_of_which_node(
    run: RunDirectory, capfd: pytest.CaptureFixture[str]
) -> None:
    meeting = _Meeting(OtherNode("node 1 (b, 10.0.0.2) is gone", "lost-peer", 1), 1_000)

    ended = _supervised(run, "report(0, 75, 'saved')\nsys.exit(1)\n", meeting=meeting)

    assert (ended, _status(run)["state"]) == (75, "stopped")
    assert "node 1 (b, 10.0.0.2) is gone" in _status(run)["message"]
    assert "node 1 (b, 10.0.0.2) is gone" in capfd.readouterr().err


def test_ranks_that_another_nodes_failure_ended_have_its_exit_code(run: RunDirectory) -> None:
    meeting = _Meeting(OtherNode("node 1 (b): rank 1 was killed by SIGKILL", "killed", 137), 0)

    assert _supervised(run, STAYS, meeting=meeting) == 137


def test_a_node_leaves_status_json_to_node_0_and_knows_how_it_ended_itself(run: RunDirectory) -> None:
    meeting = _Meeting(OtherNode("", "", 1), 1_000)
    meeting.keeps_status = False

    ended = _supervised(run, "report(0, 1, OOM)\nsys.exit(1)\n", meeting=meeting)

    assert _status(run)["state"] == "running"
    status = meeting.own_status
    assert status and (status.exit_code, status.state) == (ended, "failed")
    assert status.diagnosis and status.diagnosis.cause == "gpu-out-of-memory"


def test_another_node_writes_the_status_where_node_0_cannot_write(run: RunDirectory) -> None:
    meeting = _Meeting(OtherNode("node 0 (a): the file system is read-only", "disk", 74), 0)
    meeting.keeps_status = False

    assert _supervised(run, STAYS, meeting=meeting) == 74

    assert (_status(run)["state"], _status(run)["diagnosis"]["cause"]) == ("failed", "disk")


def test_a_node_that_stood_still_does_not_write_over_what_node_0_has_told(run: RunDirectory) -> None:
    run.write_status(RunStatus(state="failed", exit_code=1, message="node 1 is gone"))
    meeting = _Meeting(OtherNode("node 0 (a, 10.0.0.1) is gone", "lost-peer", 1), 0)

    _supervised(run, STAYS, meeting=meeting)

    assert _status(run)["message"] == "node 1 is gone"
    assert meeting.own_status and "node 0" in meeting.own_status.message


def test_a_failure_of_its_own_waits_for_no_word_of_other_nodes(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "_WORD_S", 200)
    meeting = _Meeting(OtherNode("", "", 1), 1_000)

    began_s = time.monotonic()
    _supervised(run, "report(0, 1, OOM)\nsys.exit(1)\n", meeting=meeting)
    assert time.monotonic() - began_s < 100


def test_a_node_whose_ssh_is_gone_trains_on_until_all_are_gone_and_then_saves(run: RunDirectory) -> None:
    meeting = _Meeting(OtherNode("", "", 1), 1_000)

    def hang_up() -> None:
        wait_until((run.path / "ready").exists)
        os.kill(os.getpid(), signal.SIGHUP)
        wait_until(lambda: meeting.is_adrift)
        time.sleep(0.2)
        (run.path / "trained on").touch()
        meeting.is_abandoned = True

    threading.Thread(target=hang_up).start()
    ended = _supervised(run, TERM_SAVES + STAYS, meeting=meeting)

    assert (ended, _status(run)["signal"]) == (75, signal.SIGHUP)
    assert (run.path / "trained on").exists()
