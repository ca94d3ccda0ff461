"""How a rank ends, with and without a supervisor: real processes that guard a few lines of work."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.warm import Forked, warm
from tests.launch.processes import wait_until
from tests.machine.fake_slurm import FakeSlurm
from tests.runs.made_records import made_beat, run_json
from tuner.files import write_text
from tuner.machine import topology
from tuner.runs import beats
from tuner.runs.causes import classify
from tuner.runs.creation import create
from tuner.runs.diagnose import diagnose
from tuner.runs.directory import RunDirectory
from tuner.runs.ending import gather
from tuner.runs.records import RankReport
from tuner.runs.resume_advice import resume_advice

ROOT = Path(__file__).parents[2]
RANK = """
import os, sys, time
from pathlib import Path
from tuner.errors import DataError, NotANumber, Stopped
from tuner.machine.slurm import Job
from tuner.machine.topology import Rank
from tuner.runs.directory import RunDirectory
from tuner.runs.beats import Phase
from tuner.runs.time_limits import TimeLimits
from tuner.worker import guard
guard._STACKS_S = 0.3
from tuner.worker.guard import Guard
run = RunDirectory(Path(sys.argv[1]))
guard = Guard(run, Rank.of(os.environ), Job.of(os.environ))
guard.install()
guard.take_output()
def work():
    {work}
guard.finish(work)
"""
SUPERVISED = {topology.SUPERVISED: "1"}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    record = run_json(world_size=2, next={"again": "tuner train mine.py --resume auto"})
    return create(tmp_path / "run", {"recipe.py": "", "run.json": record}, resume=False)


def _start(run: RunDirectory, work: str, rank: int = 0, **env: str) -> Forked:
    """Start a rank in a session of its own, with the libraries imported."""
    variables = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", **env}
    return warm().start([run.path], code=_code(work), cwd=ROOT, env=variables, has_two_outputs=True)


def _piped(run: RunDirectory, work: str) -> subprocess.Popen[str]:
    """Start a rank whose output goes through pipes, not into files."""
    argv, env = [sys.executable, "-c", _code(work), run.path], {**os.environ, "RANK": "0", "WORLD_SIZE": "2"}
    return subprocess.Popen(argv, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def _code(work: str) -> str:
    return RANK.replace("{work}", work.replace("\n", "\n    "))


def _ended(run: RunDirectory, work: str, rank: int = 0, **env: str) -> tuple[int, str, str]:
    process = _start(run, work, rank, **env)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def _ready(run: RunDirectory, work: str, rank: int = 0, says: str = "ready", **env: str) -> Forked:
    """Start a rank, and wait until its log has what it says."""
    process = _start(run, work, rank, **env)
    wait_until(lambda: (run.ranks / f"{rank}.log").exists() and says in _log(run, rank))
    return process


def _code_after(process: Forked, *signals: int) -> int:
    """Send signals to a rank, and return its exit code."""
    for number in signals:
        process.send_signal(number)
    process.communicate(timeout=60)
    return int(process.returncode)


def _status(run: RunDirectory) -> dict[str, Any]:
    found: dict[str, Any] = run.read_json(run.status)
    return found


def _log(run: RunDirectory, rank: int) -> str:
    return (run.ranks / f"{rank}.log").read_text()


@pytest.mark.parametrize(("rank", "shown"), [(0, "step 1\n"), (1, "")])
def test_a_rank_without_a_supervisor_logs_what_it_prints_and_rank_0_shows_it(
    run: RunDirectory, rank: int, shown: str
) -> None:
    code, out, _ = _ended(run, "print('step 1')\ntime.sleep(0.2)\nraise DataError('torn')", rank)

    assert (code, out) == (2, shown)
    assert _log(run, rank) == "step 1\nbad-data: torn.\n"


def test_a_rank_whose_terminal_is_open_mpis_writes_no_escape_codes(run: RunDirectory) -> None:
    mine, its = pty.openpty()
    work = "print('step 1', guard.terminal)\ntime.sleep(0.2)\nraise DataError('torn')"
    argv, env = [sys.executable, "-c", _code(work), run.path], {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
    with subprocess.Popen(argv, cwd=ROOT, env=env, stdout=its, stderr=subprocess.PIPE) as process:
        process.communicate(timeout=60)
    os.close(its)

    assert os.read(mine, 4096).split() == [b"step", b"1", b"None"]
    os.close(mine)


def test_without_a_supervisor_the_failing_rank_tells_the_diagnosis_itself(run: RunDirectory) -> None:
    code, _, err = _ended(run, "guard.step = 4\nbytearray(1 << 60)", rank=1)

    assert code == 1
    assert err.splitlines() == [
        "error[host-out-of-memory]: the machine ran out of memory: MemoryError",
        f"On rank 1, in step 4. More: tuner explain host-out-of-memory. Logs: {run.ranks}",
        f"Next: tuner plan {run.recipe}",
    ]
    assert _status(run)["state"] == "failed"
    assert _status(run)["diagnosis"]["cause"] == "host-out-of-memory"
    assert "Traceback" in _status(run)["message"]
    assert _log(run, 1).endswith("MemoryError\n\n"), "the log holds the whole traceback"


def test_without_a_supervisor_a_terminal_that_is_gone_does_not_lose_how_the_run_ended(run: RunDirectory) -> None:
    process = _piped(run, "time.sleep(0.5)\nraise DataError('torn')")
    assert process.stdout and process.stderr
    process.stderr.close()

    with process.stdout:
        assert process.wait(60) == 2
    assert _status(run)["state"] == "failed"


def test_a_failed_rank_without_a_supervisor_leaves_the_report(run: RunDirectory) -> None:
    env = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}

    done = warm().run([run.path], code="import tuner.worker.__main__", env=env)

    assert done.returncode == _status(run)["exit_code"] != 0
    assert "recipe.json is missing" in run.report.read_text(encoding="utf-8")


@pytest.mark.parametrize("ended", ["failed", "stopped"])
def test_without_a_supervisor_the_rank_runs_the_users_command(run: RunDirectory, ended: str) -> None:
    received = run.path / "received"
    block = {"notify": ["sh", "-c", f"cat > {received}"]}
    run.resolved_recipe.write_text(json.dumps({"schema": 1, "recipe": {"log": block}}))
    work = {"failed": "raise DataError('torn')", "stopped": "guard._teardown = int\nraise Stopped('at step 7')"}

    code, _, _ = _ended(
        run, f"from tuner.report import end\nguard._run_has_ended = end.follow_up\n{work[ended]}", rank=1
    )

    ending = json.loads(received.read_text())
    assert (ending["state"], ending["exit_code"]) == (ended, code)


@pytest.mark.parametrize(("work", "told"), [("raise DataError('torn')", False), ("raise Stopped('at 7')", True)])
def test_a_failure_that_a_restart_may_follow_is_left_to_the_jobs_script(
    run: RunDirectory, work: str, told: bool
) -> None:
    block = {"notify": ["touch", str(run.path / "received")]}
    run.resolved_recipe.write_text(json.dumps({"schema": 1, "recipe": {"log": block}}))
    job = "from tuner.machine.slurm import Job\nguard.job, guard._teardown, guard.step = Job('8', 0, 0, 2), int, 7"

    _ended(run, f"from tuner.report import end\nguard._run_has_ended = end.follow_up\n{job}\n{work}", rank=1)

    assert (run.path / "received").exists() == told
    assert _status(run)["state"] == ("stopped" if told else "failed")


def test_without_a_supervisor_a_known_cause_has_its_exit_code(run: RunDirectory) -> None:
    code, _, err = _ended(run, "raise OSError(28, 'No space left on device')")

    assert code == _status(run)["exit_code"] == 74
    assert err.startswith("error[disk]: ")


def test_a_file_that_may_not_be_written_is_told_with_its_path(run: RunDirectory) -> None:
    code, out, err = _ended(run, "raise PermissionError(13, 'Permission denied', str(run.checkpoints))")

    assert code == _status(run)["exit_code"] == 74
    assert err.startswith(f"error[disk]: cannot use {run.checkpoints}: Permission denied")
    assert "Traceback" not in out + err + _log(run, 0)


def test_an_unknown_error_keeps_its_traceback_and_is_not_shown_twice(run: RunDirectory) -> None:
    code, out, err = _ended(run, "{}['labels']")

    assert (code, out) == (1, "")
    assert err.startswith("Traceback")
    assert err.count("KeyError: 'labels'") == 2, "in the traceback, and in the first of three lines"


@pytest.mark.parametrize("supervised", [SUPERVISED, {}], ids=["supervised", "srun"])
def test_a_run_directory_that_was_removed_or_renamed_is_told_as_that(
    run: RunDirectory, supervised: dict[str, str]
) -> None:
    moves = "run.path.rename(run.path.with_name('moved'))\nopen(run.path / 'checkpoints' / 'recipe.py')"

    code, out, err = _ended(run, moves, **supervised)

    assert code == 74
    (report,) = run.failures()
    assert (report.exit_code, report.cause) == (74, "disk")
    assert f"{run.path} was removed or renamed during the run" in report.message
    log = run.path.with_name("moved") / "ranks" / "0.log"
    assert "Traceback" not in out + err + log.read_text()


def test_a_supervised_rank_leaves_the_telling_to_its_supervisor(run: RunDirectory) -> None:
    code, out, err = _ended(run, "raise DataError('torn')", **SUPERVISED)

    assert (code, out, err) == (2, "", "")
    (report,) = run.failures()
    assert (report.rank, report.exit_code, report.cause, report.what) == (0, 2, "bad-data", "torn.")
    assert (report.message, report.step, report.origin) == ("bad-data: torn.", None, None)
    assert _status(run)["state"] == "running"


def test_only_the_first_rank_that_fails_speaks(run: RunDirectory) -> None:
    _ended(run, "raise DataError('torn')", rank=1)

    _, _, err = _ended(run, "raise RuntimeError('Connection closed by peer')", rank=0)

    assert err == ""
    assert _status(run)["diagnosis"]["rank"] == 1


def test_a_stop_is_told_in_one_line(run: RunDirectory) -> None:
    code, _, err = _ended(run, "guard._teardown = lambda: None\nraise Stopped('at step 3')")

    assert (code, err) == (75, f"stopped: at step 3. Resume: {resume_advice(run.path)}\n")
    assert _status(run)["state"] == "stopped"


def test_a_full_disk_does_not_hide_what_went_wrong_before(run: RunDirectory) -> None:
    process = _piped(run, "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n{}['labels']")

    _, err = process.communicate(timeout=60)

    assert process.returncode == 1
    assert "KeyError: 'labels'" in err


@pytest.mark.parametrize(("env", "code"), [(SUPERVISED, 128 + signal.SIGTERM), ({}, 1)], ids=["supervised", "srun"])
def test_a_rank_that_is_ended_after_another_failed_leaves_its_stack_and_does_not_hide_the_others_code(
    run: RunDirectory, env: dict[str, str], code: int
) -> None:
    """srun returns the highest code of all."""
    process = _ready(run, "guard.can_stop_at_a_step = True\nprint('ready')\ntime.sleep(60)", rank=1, **env)
    run.report_failure(RankReport(rank=0, exit_code=74, message="failed"))

    assert _code_after(process, signal.SIGTERM) == code
    assert "in work" in _log(run, 1)


def test_a_rank_that_srun_ends_while_it_tells_of_its_own_failure_still_tells_it(run: RunDirectory) -> None:
    slow = "from tuner.runs import ending\nfail = ending.fail\ndef told(*given, **named):\n    print('telling')\n"
    slow += "    time.sleep(0.5)\n    return fail(*given, **named)\nending.fail = told\n"
    process = _ready(run, f"{slow}raise DataError('torn')", rank=1, says="telling", SLURM_STEP_ID="0")

    assert (_code_after(process, signal.SIGTERM), _status(run)["state"]) == (2, "failed")


WAITS = "guard.can_stop_at_a_step = True\nprint('ready')\nwhile not guard.stop_requested: time.sleep(0.01)\n"


@pytest.mark.parametrize(
    ("signals", "task", "code"),
    [
        ((signal.SIGHUP,), {}, 7),
        ((signal.SIGTERM, signal.SIGUSR2), {}, 7),
        ((signal.SIGUSR2, signal.SIGUSR2, signal.SIGTERM), {}, 7),
        ((signal.SIGTERM, signal.SIGTERM), {}, 128 + signal.SIGTERM),
        ((signal.SIGTERM, signal.SIGTERM), {"SLURM_STEP_ID": "0"}, 7),
        ((signal.SIGUSR2, signal.SIGTERM, signal.SIGINT), {}, 128 + signal.SIGINT),
        ((signal.SIGTERM, signal.SIGINT, signal.SIGINT), {"SLURM_STEP_ID": "0"}, 128 + signal.SIGINT),
    ],
)
def test_what_slurm_sends_in_turn_interrupts_no_save_but_asking_twice_does(
    run: RunDirectory, signals: tuple[int, ...], task: dict[str, str], code: int
) -> None:
    saves = "print('saving')\nwhile not (run.path / 'go on').exists(): time.sleep(0.01)\nos._exit(7)"
    process = _ready(run, f"{WAITS}{saves}", 0, **task)

    for number in signals:
        process.send_signal(number)
        wait_until(lambda: "saving" in _log(run, 0))
        time.sleep(0.05)
    if code == 7:
        (run.path / "go on").touch()
    process.communicate(timeout=60)

    assert process.returncode == code


def test_nohup_holds_for_a_rank_without_a_supervisor(run: RunDirectory) -> None:
    ignores = "signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    code = RANK.replace("guard = Guard", f"import signal; {ignores}\nguard = Guard")
    work = "guard.can_stop_at_a_step = True\nos.kill(os.getpid(), signal.SIGHUP)\ntime.sleep(0.1)\n"
    code = code.replace("{work}", f"{work}os._exit(7 + guard.stop_requested)".replace("\n", "\n    "))

    assert subprocess.run([sys.executable, "-c", code, run.path], cwd=ROOT, timeout=60).returncode == 7


def test_a_signal_to_all_of_a_ranks_processes_is_one_and_ends_none_that_makes_batches(run: RunDirectory) -> None:
    """torchrun signals the group of each rank, Slurm every process, and Ctrl-C all that are before the terminal."""
    batches = """
from torch.utils.data import DataLoader
batches = iter(DataLoader(range(10**6), num_workers=2, prefetch_factor=1))
next(batches)
"""
    # Their processes end when they are let go; else after 5 s, when they see that their parent has ended.
    after = "time.sleep(0.2)\nfor _ in range(50): next(batches)\ndel batches\nos._exit(7)"
    process = _ready(run, WAITS.replace("print", f"{batches.strip()}\nprint") + after)

    for number in (signal.SIGUSR2, signal.SIGTERM):
        os.killpg(process.pid, number)
    process.communicate(timeout=60)

    assert process.returncode == 7, _log(run, 0)


def test_work_with_a_limit_of_its_own_ends_a_rank_that_stands_still_in_it_and_no_other(run: RunDirectory) -> None:
    lost = made_beat(1, 7, "node-2", 3, "an all-reduce", 0.0, 0.0)
    work = f"""with guard.limited(0.5, "the comparison") as begin:
    begin("a product")
time.sleep(0.7)
print("after it", flush=True)
with guard.limited(0.5, "the comparison") as begin:
    for _ in range(4):
        begin("a sum")
        time.sleep(0.05)
    Path({str(beats.path_of(run, 1))!r}).write_bytes({lost.to_bytes()!r})
    time.sleep(60)"""

    code, _, _ = _ended(run, work, **SUPERVISED)

    assert code == 124
    (report,) = gather(run).reports
    assert report.cause == "hang" and report.message.startswith("hang: the comparison took longer than 0.5 s")
    assert "rank 1 on node-2" in report.message
    assert _log(run, 0).startswith("after it\n")
    assert beats.read_beats(run)[0].count == 5


_LAUNCHER = """
import subprocess, sys, threading, time
for _ in range(400): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
subprocess.Popen([sys.executable, "-c", *sys.argv[1:]])
time.sleep(60)
"""


def test_a_killed_launcher_tells_its_ranks_once_however_many_threads_it_had(run: RunDirectory) -> None:
    saves = """guard.can_stop_at_a_step = True
guard.heart.beat("a step")
print("ready", flush=True)
while not guard.stop_requested: time.sleep(0.01)
time.sleep(0.2)
print("saved", flush=True)
os._exit(0)"""
    env = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", **SUPERVISED}
    command = [sys.executable, "-c", _LAUNCHER, _code(saves), run.path]
    with subprocess.Popen(command, cwd=ROOT, env=env) as launcher:
        wait_until(lambda: (run.ranks / "0.log").exists() and "ready" in _log(run, 0))
        launcher.kill()
    pid = beats.read_beats(run)[0].pid
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)

    assert _log(run, 0) == "ready\nsaved\n"


# A job of Slurm that may requeue itself

STOPS = "guard._teardown = lambda: None\nguard.step = {step}\nraise Stopped('at step {step}')"


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    return FakeSlurm(tmp_path / "slurm")


def _task(slurm: FakeSlurm, restarts: int = 0) -> dict[str, str]:
    job = {"SLURM_JOB_ID": "8", "SLURM_STEP_ID": "0", "TUNER_MAX_REQUEUES": "3"}
    return {**job, "SLURM_RESTART_COUNT": str(restarts), "PATH": slurm.path}


def _requeues(slurm: FakeSlurm) -> list[list[str]]:
    return [call for call in slurm.calls() if call[1] == "requeue"]


def test_a_stopped_run_requeues_its_job_once_and_from_rank_0_alone(run: RunDirectory, slurm: FakeSlurm) -> None:
    _ended(run, STOPS.format(step=3), rank=1, **_task(slurm))
    assert slurm.calls() == []

    code, _, err = _ended(run, STOPS.format(step=3), **_task(slurm))

    assert code == 75
    assert "Job 8 is requeued" in err
    assert _requeues(slurm) == [["scontrol", "requeue", "8"]]


def test_the_others_leave_after_rank_0_has_requeued(run: RunDirectory, slurm: FakeSlurm) -> None:
    work = "guard._teardown = lambda: print(open(os.environ['CALLS']).read())\nraise Stopped('')"

    _ended(run, work, **_task(slurm), CALLS=str(slurm.folder / "calls"))

    assert '["scontrol", "requeue", "8"]' in _log(run, 0)


@pytest.mark.parametrize(("steps", "requeues"), [(0, 1), (3, 5)])
def test_a_run_that_gets_further_is_requeued_each_time_and_one_that_stops_at_the_same_step_once(
    run: RunDirectory, slurm: FakeSlurm, steps: int, requeues: int
) -> None:
    for restarts in range(5):
        step = 3 + restarts * steps
        write_text(run.run_json, run_json(resume_step=step - steps if restarts else None))
        _, _, err = _ended(run, STOPS.format(step=step), **_task(slurm, restarts))

    assert len(_requeues(slurm)) == requeues
    assert ("Job 8 is not requeued: it ended twice in step 3" in err) == (not steps)


HANGING_FOLDER = """
from tuner.runs import shared_folder
shared_folder._ask, shared_folder._LOOK_S = (lambda folder: time.sleep(60)), 0.05
watched = shared_folder.watched
shared_folder.watched = lambda *given, **more: watched(*given, **more, look_s=0.05)
guard.watch(TimeLimits(0.3))
time.sleep(60)
"""


@pytest.mark.parametrize(("local_rank", "is_told"), [(0, True), (1, False)])
def test_a_folder_that_hangs_ends_a_rank_without_a_supervisor_and_one_of_its_node_says_so(
    run: RunDirectory, local_rank: int, is_told: bool
) -> None:
    code, _, err = _ended(run, HANGING_FOLDER.strip(), rank=1, LOCAL_RANK=str(local_rank))

    assert code == 74
    assert (f"{run.path} has not answered" in err) == is_told


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_job_that_is_being_cancelled_is_not_started_again_and_a_slurm_that_refuses_changes_no_end(
    run: RunDirectory, slurm: FakeSlurm, is_cancelled: bool
) -> None:
    slurm.says("JobId=8 JobState=CANCELLED") if is_cancelled else slurm.fails("scontrol: error: Requeue disabled")

    code, _, err = _ended(run, STOPS.format(step=3), **_task(slurm))

    why = "Slurm says that it is CANCELLED" if is_cancelled else "scontrol fails: Requeue disabled"
    assert (code, _status(run)["state"]) == (75, "stopped") and f"Job 8 is not requeued: {why}.\n" in err
    assert _requeues(slurm) == []


def test_a_signal_before_training_requeues_too(run: RunDirectory, slurm: FakeSlurm) -> None:
    process = _ready(run, "print('ready')\ntime.sleep(60)", **_task(slurm))

    assert _code_after(process, signal.SIGUSR2) == 128 + signal.SIGUSR2
    assert _requeues(slurm) == [["scontrol", "requeue", "8"]]


@pytest.mark.parametrize(("number", "requeues"), [(signal.SIGTERM, 2), (signal.SIGUSR2, 1)])
def test_a_preemption_before_training_does_not_count_and_a_time_limit_does(
    run: RunDirectory, slurm: FakeSlurm, number: signal.Signals, requeues: int
) -> None:
    for restarts in range(2):
        process = _start(run, f"os.kill(os.getpid(), {int(number)})\ntime.sleep(60)", **_task(slurm, restarts))
        process.communicate(timeout=60)

    assert len(_requeues(slurm)) == requeues


def test_a_signal_that_came_before_the_rank_listened_is_not_lost(run: RunDirectory, slurm: FakeSlurm) -> None:
    held = "slurm.prepare_for_signals(); os.kill(os.getpid(), signal.SIGUSR2)"
    becomes = "os.execv(sys.executable, [sys.executable, '-c', *sys.argv[1:]])"
    code = f"import os, signal, sys; from tuner.machine import slurm; {held}; {becomes}"
    rank = RANK.replace("{work}", "time.sleep(60)")

    done = subprocess.run(
        [sys.executable, "-c", code, rank, run.path],
        cwd=ROOT, env={**os.environ, **_task(slurm)}, timeout=60,
    )  # fmt: skip

    assert done.returncode == 128 + signal.SIGUSR2
    assert len(_requeues(slurm)) == 1


def test_a_failure_requeues_nothing(run: RunDirectory, slurm: FakeSlurm) -> None:
    _ended(run, "{}['labels']", **_task(slurm))

    assert slurm.calls() == []


# A rank that stands still


GOES_ON = "os._exit(7)"
"""Python's own end would not prove that the watchdog let it live."""


def test_a_rank_without_progress_ends_with_code_124_and_its_stack(run: RunDirectory) -> None:
    code, _, err = _ended(run, "guard.heart.beat('loading the model')\nguard.watch(TimeLimits(1))\ntime.sleep(60)")

    assert code == _status(run)["exit_code"] == 124
    assert err.startswith("error[hang]: no rank made progress for 1 s; this one was loading the model.")
    assert "in work" in _log(run, 0)


@pytest.mark.parametrize(
    "progress",
    [
        "guard.heart.beat('training')",
        "(run.ranks / '1.beat').write_text(str(number))",
        "Path('/dev/zero').open('rb').read(1 << 21)",
    ],
    ids=["its own", "another rank's", "bytes that it reads"],
)
def test_a_rank_with_progress_goes_on(run: RunDirectory, progress: str) -> None:
    work = f"guard.watch(TimeLimits(1))\nfor number in range(13):\n    time.sleep(0.1)\n    {progress}\n{GOES_ON}"

    assert _ended(run, work, **SUPERVISED)[0] == 7


@pytest.mark.parametrize("world_size", ["1", "2"])
def test_a_rank_that_was_suspended_has_not_hung_in_between(run: RunDirectory, world_size: str) -> None:
    # A rank that is busy when it goes on: whatever reads its stacks from outside then crashes it.
    busy = "end_s = time.monotonic() + 1.9\nwhile time.monotonic() < end_s: str(run)"
    work = f"guard.watch(TimeLimits(1))\nprint('ready')\n{busy}\n{GOES_ON}"
    process = _ready(run, work, WORLD_SIZE=world_size)

    process.send_signal(signal.SIGSTOP)
    time.sleep(1.4)
    assert _code_after(process, signal.SIGCONT) == 7
    assert "Timeout" not in _log(run, 0)


@pytest.mark.parametrize(
    ("phase", "code"),
    [("STEPS", 124), ("SAVES", 7), ("VALIDATION", 7), ("GENERATION", 7)],
)
def test_a_step_ends_by_the_limit_that_it_taught_and_what_is_no_step_does_not(
    run: RunDirectory, phase: str, code: int
) -> None:
    limits = "from tuner.runs import time_limits\ntime_limits._LEAST_S[Phase.STEPS] = 0.4\nlimits = TimeLimits()\n"
    known = f"{limits}for _ in range(10): limits.learn(Phase.STEPS, 0.01)\n"
    steps = f"guard.heart.end_step()\nguard.heart.beat('at work', Phase.{phase})\nguard.watch(limits)\n"
    quiet_s = 20 if code == 124 else 0.8  # it ends long before the first

    ended, _, _ = _ended(run, f"{known}{steps}time.sleep({quiet_s})\n{GOES_ON}", WORLD_SIZE="1", **SUPERVISED)

    assert ended == code


def test_the_only_rank_ends_though_c_code_never_gives_up_the_interpreter(run: RunDirectory) -> None:
    hold = "import ctypes\nlock = ctypes.create_string_buffer(64)\nlock_it = ctypes.PyDLL(None).pthread_mutex_lock"
    work = f"guard.watch(TimeLimits(1))\ntime.sleep(0.3)\n{hold}\nlock_it(lock)\nlock_it(lock)"

    code, _, _ = _ended(run, work, WORLD_SIZE="1", **SUPERVISED)

    assert code == -signal.SIGABRT
    found = classify(_log(run, 0))
    assert found and found[0].name == "hang"
    assert "in work" in _log(run, 0)


def test_sigquit_shows_a_running_ranks_stacks(run: RunDirectory) -> None:
    seen = "(run.ranks / '0.log').read_text()"
    process = _ready(run, f"print('ready')\nwhile 'in work' not in {seen}: time.sleep(0.05)\n{GOES_ON}")

    assert _code_after(process, signal.SIGQUIT) == 7


def test_a_rank_leaves_its_sign_of_life(run: RunDirectory) -> None:
    process = _ready(
        run, "guard.heart.beat('loading the model')\nguard.heart.saved(2.5)\nprint('ready')\ntime.sleep(60)", 1
    )

    found = beats.here(run)
    process.kill()
    process.communicate(timeout=60)

    assert (found[1].pid, found[1].doing, found[1].count, found[1].save_s) == (process.pid, "loading the model", 1, 2.5)


def test_a_stop_request_lets_the_step_end_and_writes_how_far_the_rank_is_however_lately_it_last_wrote(
    run: RunDirectory,
) -> None:
    beats_now = "guard.heart.beat('in step 1')\nguard.heart.beat('in step 2')\n"
    process = _ready(run, f"{beats_now}{WAITS}os._exit(7)", **SUPERVISED)

    assert _code_after(process, signal.SIGTERM) == 7
    assert (beats.read_beats(run)[0].count, beats.read_beats(run)[0].doing) == (2, "in step 2")


def test_a_torn_sign_of_life_is_none(run: RunDirectory) -> None:
    run.ranks.mkdir()
    (run.ranks / "0.beat").write_bytes(b'{"rank": 0, "pi')

    assert beats.read_beats(run) == {}


# A number that is none


def test_all_ranks_report_the_rank_that_it_began_on(run: RunDirectory) -> None:
    _ended(run, "raise NotANumber('loss is nan', rank=1)", rank=0, **SUPERVISED)

    assert diagnose(gather(run)).record.rank == 1


def test_without_a_supervisor_only_that_rank_tells(run: RunDirectory) -> None:
    _, _, quiet = _ended(run, "raise NotANumber('loss is nan', rank=1)", rank=0)
    (run.ranks / "0.json").unlink()
    _, _, told = _ended(run, "raise NotANumber('loss is nan', rank=1)", rank=1)

    assert quiet == ""
    assert told.startswith("error[not-a-number]: loss is nan.\nOn rank 1,")
