"""Who has a run directory: real processes, alive, ended and killed; other hosts and Slurm stand written in the lock."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import environment, wait_until
from tests.launch.plans import written_run
from tests.refused import refused
from tests.runs.made_records import run_json
from tuner.errors import RunDirectoryError
from tuner.runs import lock, states
from tuner.runs.creation import create
from tuner.runs.lock import NAME, release, take

TAKES = "import sys; from pathlib import Path; from tuner.runs import lock; lock.take(Path(sys.argv[1]), {}); input()"
FILES = {"recipe.py": "a = 1\n", "deepspeed.json": "{}\n", "run.json": run_json()}


@contextmanager
def another(run: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that has taken a run directory, and ends when it is told to."""
    process = subprocess.Popen([sys.executable, "-c", TAKES, run], stdin=subprocess.PIPE, env=environment())
    try:
        wait_until(lambda: (run / NAME).is_file() and bool((run / NAME).read_text()))
        yield process
    finally:
        process.kill()
        process.communicate()


def held(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / NAME).read_text())
    return found


def write(run: Path, **changes: object) -> None:
    """Write a lock like this process's, but for some facts."""
    take(run, {})
    (run / NAME).write_text(json.dumps({**held(run), **changes}))


def test_a_second_run_is_refused_and_told_who_has_the_directory(tmp_path: Path) -> None:
    with another(tmp_path) as first:
        for start in (lambda: take(tmp_path, {}), lambda: create(tmp_path, FILES, resume=True)):
            with pytest.raises(RunDirectoryError) as caught:
                start()

            assert f"is in use by process {first.pid} on {os.uname().nodename}" in str(caught.value)
            assert caught.value.exit_code == 2
        with refused(RunDirectoryError, "--work-dir", first.pid):  # and not only: it is not empty
            create(tmp_path, FILES, resume=False)
        assert held(tmp_path)["pid"] == first.pid


@pytest.mark.parametrize(("beat_s_ago", "advises"), [(60, False), (7200, True)])
def test_to_remove_the_lock_of_another_host_is_advised_only_if_its_run_gives_no_sign_of_life(
    tmp_path: Path, beat_s_ago: float, advises: bool
) -> None:
    write(tmp_path, host="elsewhere")
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "0.beat").touch()
    long_ago = time.time() - 10_000
    os.utime(tmp_path / "ranks" / "0.beat", (time.time() - beat_s_ago,) * 2)
    for file in (tmp_path / NAME, tmp_path):
        os.utime(file, (long_ago, long_ago))

    with pytest.raises(RunDirectoryError) as caught:
        take(tmp_path, {})

    assert (f"remove {tmp_path / NAME}" in str(caught.value)) == advises


def test_the_lock_of_another_host_is_taken_over_if_those_who_worked_with_it_say_that_it_is_gone(tmp_path: Path) -> None:
    write(tmp_path, host="elsewhere", pid=7)
    with pytest.raises(RunDirectoryError):
        take(tmp_path, {}, is_gone=lambda holder: (holder.host, holder.pid) == ("elsewhere", 8))

    take(tmp_path, {}, is_gone=lambda holder: (holder.host, holder.pid) == ("elsewhere", 7))

    assert held(tmp_path)["pid"] == os.getpid()


def test_a_lock_with_a_key_that_this_version_does_not_know_is_heeded(tmp_path: Path) -> None:
    with another(tmp_path) as first:
        (tmp_path / NAME).write_text(json.dumps({**held(tmp_path), "colour": "red"}))

        with refused(RunDirectoryError, "--work-dir", first.pid):
            take(tmp_path, {})


def test_a_lock_of_a_later_version_is_refused_with_both_versions_and_stays(tmp_path: Path) -> None:
    run = written_run(tmp_path / "run")
    write(run.path, version=2, pid="of another form")
    before = held(run.path)

    with refused(RunDirectoryError, "run", "version 2", "reads 1"):
        take(run.path, {})
    release(run.path)

    assert held(run.path) == before
    assert states.state_of(run) == ("running", "lock has version 2, and this version of tuner reads 1")


@pytest.mark.parametrize("text", ["", "\0" * 64, "[]", "{}", '{"pid": 7', '{"pid": "7", "version": "2"}'])
def test_a_lock_whose_writing_was_cut_off_holds_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)

    take(tmp_path, {})

    assert held(tmp_path)["pid"] == os.getpid()


def test_the_lock_of_a_killed_run_is_taken_over_in_silence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with another(tmp_path) as first:
        os.kill(first.pid, signal.SIGKILL)
        first.wait()

        take(tmp_path, {})

    assert held(tmp_path)["pid"] == os.getpid()
    assert capfd.readouterr() == ("", "")


def test_a_rank_that_outlives_its_launcher_keeps_the_directory_until_it_ends(tmp_path: Path) -> None:
    write(tmp_path, pid=2**22)
    rank = [sys.executable, "-c", "input()", "tuner.worker", str(tmp_path)]
    with subprocess.Popen(rank, stdin=subprocess.PIPE) as process:
        with refused(RunDirectoryError, "--work-dir", process.pid):
            take(tmp_path, {})
        process.communicate(b"\n")

    take(tmp_path, {})


def test_a_process_that_nobody_has_reaped_is_dead(tmp_path: Path) -> None:
    with another(tmp_path) as first:
        os.kill(first.pid, signal.SIGKILL)
        os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)  # a zombie still

        take(tmp_path, {})


def test_another_process_with_the_number_of_the_first_does_not_keep_the_lock(tmp_path: Path) -> None:
    with another(tmp_path) as other:
        write_as = {"pid": other.pid, "started_s": held(tmp_path)["started_s"] - 3600}
        (tmp_path / NAME).write_text(json.dumps({**held(tmp_path), **write_as}))

        take(tmp_path, {})


def test_a_process_may_take_again_what_it_has_and_lets_go_once(tmp_path: Path) -> None:
    take(tmp_path, {})
    take(tmp_path, {})

    release(tmp_path)
    release(tmp_path)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("holder", "ended", "may"),
    [
        ({"job": "7", "cluster": "a"}, ["7"], True),
        ({"job": "7", "cluster": "a"}, [], False),
        ({"job": "7", "cluster": "b"}, ["7"], False),
        ({"job": "7", "cluster": None}, ["7"], False),
        ({"job": None, "cluster": "a"}, ["7"], False),
    ],
)
def test_a_job_takes_over_what_an_ended_job_of_its_cluster_had_on_another_host(
    tmp_path: Path, holder: dict[str, Any], ended: list[str], may: bool
) -> None:
    write(tmp_path, host="elsewhere", pid=7, **holder)
    environ = {"SLURM_JOB_ID": "8", "SLURM_CLUSTER_NAME": "a"}

    if may:
        take(tmp_path, environ, ended.__contains__)
        assert held(tmp_path)["job"] == "8"
    else:
        with refused(RunDirectoryError, "--work-dir", 7, "elsewhere"):
            take(tmp_path, environ, ended.__contains__)


def test_a_count_of_restarts_that_is_none_is_0(tmp_path: Path) -> None:
    take(tmp_path, {"SLURM_RESTART_COUNT": "often"})

    assert held(tmp_path)["restarts"] == 0


def test_nobody_releases_what_another_has(tmp_path: Path) -> None:
    with another(tmp_path) as first:
        release(tmp_path)

        assert held(tmp_path)["pid"] == first.pid


@pytest.mark.parametrize("facts", [{"host": "elsewhere"}, {"pids": 1, "locked": False}], ids=["host", "container"])
def test_a_lock_of_another_host_or_container_cannot_be_judged_and_its_last_sign_of_life_is_told(
    tmp_path: Path, facts: dict[str, Any]
) -> None:
    write(tmp_path, pid=7, **facts)

    with refused(RunDirectoryError, "--work-dir", "process 7 on", "0 min ago"):
        take(tmp_path, {})


@pytest.mark.parametrize(
    ("environ", "may"),
    [
        ({"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "1"}, True),
        ({"SLURM_JOB_ID": "12"}, False),
        ({"SLURM_JOB_ID": "13", "SLURM_RESTART_COUNT": "1"}, False),
        ({}, False),
    ],
)
def test_a_job_that_slurm_starts_again_elsewhere_has_its_directory(
    tmp_path: Path, environ: dict[str, str], may: bool
) -> None:
    write(tmp_path, host="elsewhere", job="12", restarts=0)

    if may:
        take(tmp_path, environ)
        assert (held(tmp_path)["job"], held(tmp_path)["restarts"]) == ("12", 1)
    else:
        with refused(RunDirectoryError, "--work-dir", 12):
            take(tmp_path, environ)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "3"])
def test_a_lock_that_nobody_finished_writing_holds_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)

    take(tmp_path, {})

    assert held(tmp_path)["pid"] == os.getpid()


def test_of_many_that_start_at_once_one_has_the_directory(tmp_path: Path) -> None:
    write(tmp_path, pid=2**22)  # left by a run that was killed: all see a stale lock
    children = [
        subprocess.Popen([sys.executable, "-c", TAKES, tmp_path], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(4)
    ]

    wait_until(lambda: sum(child.poll() is not None for child in children) == 3)
    (winner,) = (child for child in children if child.poll() is None)

    assert held(tmp_path)["pid"] == winner.pid
    for child in children:
        child.communicate(b"\n")


def test_a_jump_of_the_clock_takes_no_lock_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    with another(tmp_path):
        # psutil adds the time of the boot, which moves with the clock, to what the kernel says of a process.
        kernel, boot = psutil.Process.create_time, psutil.boot_time()
        monkeypatch.setattr(psutil, "boot_time", lambda: boot - 3600)
        monkeypatch.setattr(psutil.Process, "create_time", lambda process: kernel(process) - 3600)

        with pytest.raises(RunDirectoryError):
            lock.take(tmp_path, {})


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="a namespace of processes needs root")
@pytest.mark.parametrize("ended", [False, True])
def test_a_holder_in_another_container_of_this_host_is_told_by_the_kernels_lock(tmp_path: Path, ended: bool) -> None:
    inside = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", TAKES, tmp_path]
    with subprocess.Popen(inside, stdin=subprocess.PIPE, env=environment()) as container:
        wait_until(lambda: (tmp_path / NAME).is_file() and bool((tmp_path / NAME).read_text()))
        assert held(tmp_path)["pid"] < 20, "a number that means another process here"
        if ended:
            container.kill()
            container.wait()
            wait_until(lambda: not lock._is_locked(tmp_path))
            take(tmp_path, {})
            assert held(tmp_path)["pid"] == os.getpid()
        else:
            with refused(RunDirectoryError, "--work-dir", held(tmp_path)["pid"]):
                take(tmp_path, {})
        container.kill()


def test_a_rank_that_becomes_of_the_holder_keeps_the_kernels_lock(tmp_path: Path) -> None:
    becomes = "os.execv(sys.executable, [sys.executable, '-c', 'input()'])"
    code = f"import os; {TAKES.removesuffix('input()')}{becomes}"
    with subprocess.Popen([sys.executable, "-c", code, tmp_path], stdin=subprocess.PIPE, env=environment()) as rank:
        wait_until(lambda: "input()" in Path(f"/proc/{rank.pid}/cmdline").read_text().split("\0"))
        assert lock._is_locked(tmp_path)
        rank.communicate(b"\n")

    assert lock._is_locked(tmp_path) is False


def test_a_left_rank_is_found_however_its_run_is_spelled(tmp_path: Path) -> None:
    (run := tmp_path / "run").mkdir()
    write(run, pid=2**22)
    rank = [sys.executable, "-c", "input()", "tuner.worker", str(tmp_path / "run" / ".." / "run")]
    with subprocess.Popen(rank, stdin=subprocess.PIPE) as process:
        with refused(RunDirectoryError, "--work-dir", process.pid):
            take(run, {})
        process.communicate(b"\n")
