"""How a rank ends, with and without a supervisor: real processes that guard a few lines of work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch.processes import wait_until
from tuner.runs.directory import RunDirectory, create

ROOT = Path(__file__).parents[2]
RANK = """
import os, sys, time
from pathlib import Path
from tuner.errors import DataError, Stopped
from tuner.machine.topology import Rank
from tuner.runs.directory import RunDirectory
from tuner.worker.guard import Guard
run = RunDirectory(Path(sys.argv[1]))
guard = Guard(run, Rank.of(os.environ))
guard.install()
guard.take_output()
def work():
    {work}
guard.finish(work)
"""
SUPERVISED = {"TORCHELASTIC_RUN_ID": "1"}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    facts = '{"world_size": 2, "next": {"again": "tuner train mine.py --resume auto"}}'
    return create(tmp_path / "run", {"recipe.py": "", "run.json": facts}, resume=False)


def _start(run: RunDirectory, work: str, rank: int = 0, **env: str) -> subprocess.Popen[str]:
    code = RANK.replace("{work}", work.replace("\n", "\n    "))
    variables = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", **env}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", code, run.path], cwd=ROOT, env=variables, text=True, **pipes)  # type: ignore[call-overload, no-any-return]


def _ended(run: RunDirectory, work: str, rank: int = 0, **env: str) -> tuple[int, str, str]:
    process = _start(run, work, rank, **env)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def _status(run: RunDirectory) -> dict[str, Any]:
    found: dict[str, Any] = run.read_json(run.status)
    return found


def _log(run: RunDirectory, rank: int) -> str:
    return (run.ranks / f"{rank}.log").read_text()


def test_a_rank_without_a_supervisor_shows_what_it_prints_and_logs_it(run: RunDirectory) -> None:
    code, out, _ = _ended(run, "print('step 1')\ntime.sleep(0.5)\nraise DataError('torn')")

    assert (code, out) == (2, "step 1\n")
    assert _log(run, 0) == "step 1\nbad-data: torn.\n"


def test_only_rank_0_is_shown(run: RunDirectory) -> None:
    _, out, _ = _ended(run, "print('step 1')\nraise DataError('torn')", rank=1)

    assert out == ""
    assert _log(run, 1) == "step 1\nbad-data: torn.\n"


def test_without_a_supervisor_the_failing_rank_tells_the_diagnosis_itself(run: RunDirectory) -> None:
    code, _, err = _ended(run, "guard.step = 4\nbytearray(1 << 60)", rank=1)

    assert code == 1
    assert err.splitlines() == [
        "host-out-of-memory: the machine has too little memory for this: MemoryError",
        f"On rank 1, in step 4. Logs: {run.ranks}",
        f"Next: tuner plan {run.recipe}",
    ]
    assert _status(run)["state"] == "failed"
    assert _status(run)["diagnosis"]["cause"] == "host-out-of-memory"
    assert "Traceback" in _status(run)["message"]
    assert _log(run, 1).endswith("MemoryError\n\n"), "the log holds the whole traceback"


def test_without_a_supervisor_a_known_cause_has_its_exit_code(run: RunDirectory) -> None:
    code, _, err = _ended(run, "raise OSError(28, 'No space left on device')")

    assert code == _status(run)["exit_code"] == 74
    assert err.startswith("disk: ")


def test_an_unknown_error_keeps_its_traceback_and_is_not_shown_twice(run: RunDirectory) -> None:
    code, out, err = _ended(run, "{}['labels']")

    assert (code, out) == (1, "")
    assert err.startswith("Traceback")
    assert err.count("KeyError: 'labels'") == 2, "in the traceback, and in the first of three lines"


def test_a_supervised_rank_leaves_the_telling_to_its_supervisor(run: RunDirectory) -> None:
    code, out, err = _ended(run, "raise DataError('torn')", **SUPERVISED)

    assert (code, out, err) == (2, "", "")
    assert run.failures() == [
        {"rank": 0, "exit_code": 2, "message": "bad-data: torn.", "step": None, "cause": "bad-data"}
    ]
    assert _status(run)["state"] == "running"


def test_only_the_first_rank_that_fails_speaks(run: RunDirectory) -> None:
    _ended(run, "raise DataError('torn')", rank=1)

    _, _, err = _ended(run, "raise RuntimeError('Connection closed by peer')", rank=0)

    assert err == ""
    assert _status(run)["diagnosis"]["rank"] == 1


def test_a_stop_is_told_in_one_line(run: RunDirectory) -> None:
    code, _, err = _ended(run, "guard._teardown = lambda: None\nraise Stopped('at step 3')")

    assert (code, err) == (75, "rank 0: stopped: at step 3.\n")
    assert _status(run)["state"] == "stopped"


def test_a_full_disk_does_not_hide_what_went_wrong_before(run: RunDirectory) -> None:
    code, _, err = _ended(run, "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n{}['labels']")

    assert code == 1
    assert "KeyError: 'labels'" in err


def test_a_rank_that_is_ended_after_another_failed_leaves_its_stack(run: RunDirectory) -> None:
    process = _start(run, "guard.can_stop_at_a_step = True\nprint('ready')\ntime.sleep(60)", rank=0, **SUPERVISED)
    wait_until(lambda: (run.ranks / "0.log").exists() and "ready" in _log(run, 0))
    run.report_failure(1, 1, "failed")

    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)

    assert process.returncode == 128 + signal.SIGTERM
    assert "in work" in _log(run, 0)


def test_a_stop_request_while_training_lets_the_step_end(run: RunDirectory) -> None:
    work = (
        "guard.can_stop_at_a_step = True\nprint('ready')\nwhile not guard.stop_requested: time.sleep(0.01)\nos._exit(7)"
    )
    process = _start(run, work, **SUPERVISED)
    wait_until(lambda: (run.ranks / "0.log").exists() and "ready" in _log(run, 0))

    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)

    assert process.returncode == 7
