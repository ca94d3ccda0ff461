"""Real processes that print as a rank does."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.processes import read_exactly
from tests.runs.made_records import made_beat
from tuner.machine.topology import Rank
from tuner.runs import beats
from tuner.runs.beats import Phase
from tuner.runs.directory import RunDirectory
from tuner.worker.process import end_mpirun, late_ranks_named

ROOT = Path(__file__).parents[2]
PRELUDE = """
import ctypes, os, subprocess, sys
from pathlib import Path
from tuner.worker.process import send_to
terminal = send_to(Path(sys.argv[1]))
"""


def _rank(code: str, log: Path, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PRELUDE + code, str(log)]
    return subprocess.run(command, cwd=ROOT, capture_output="stdout" not in options, text=True, timeout=60, **options)  # type: ignore[call-overload, no-any-return]


def test_everything_that_is_printed_goes_into_the_log_in_its_order(tmp_path: Path) -> None:
    code = """
print("from Python")
ctypes.CDLL(None).puts(b"from C")
ctypes.CDLL(None).fflush(None)
print("to stderr", file=sys.stderr)
subprocess.run(["echo", "from a child"])
print("ü \\udcff")
"""
    done = _rank(code, tmp_path / "ranks" / "1.log")

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    lines = (tmp_path / "ranks" / "1.log").read_text(encoding="utf-8").splitlines()
    assert lines == ["from Python", "from C", "to stderr", "from a child", "ü \\udcff"]


def test_a_log_is_appended_to(tmp_path: Path) -> None:
    (tmp_path / "0.log").write_text("before\n")

    _rank("print('after')", tmp_path / "0.log")

    assert (tmp_path / "0.log").read_text() == "before\nafter\n"


@pytest.mark.parametrize("folder", ["/dev/full", "/proc/no/such/log"])
def test_a_log_that_cannot_be_written_ends_no_rank(folder: str) -> None:
    code = "for _ in range(3): print('x' * 100_000)\nsys.stderr.write('y')\nsys.stdout.flush()\nos._exit(7)"

    assert _rank(code, Path(folder)).returncode == 7


def test_a_terminal_that_is_gone_ends_no_rank(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    code = "os.read(0, 1)\nprint('bar', file=terminal, flush=True)\nos._exit(7)"
    command = [sys.executable, "-c", PRELUDE + code, str(tmp_path / "0.log")]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=slave) as rank:
        os.close(slave)
        os.close(master)
        rank.communicate(b"x", timeout=60)

    assert rank.returncode == 7


def test_the_terminal_is_kept_for_the_progress_bar(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    code = "print('bar', file=terminal)\nprint('line')"

    _rank(code, tmp_path / "0.log", stdout=slave)

    os.close(slave)
    assert read_exactly(master, len(b"bar\r\n")) == b"bar\r\n"
    os.close(master)
    assert (tmp_path / "0.log").read_text() == "line\n"


def test_without_a_terminal_there_is_none(tmp_path: Path) -> None:
    _rank("print(terminal)", tmp_path / "0.log")

    assert (tmp_path / "0.log").read_text() == "None\n"


def test_a_crash_in_c_leaves_its_stack_in_the_log(tmp_path: Path) -> None:
    done = _rank("def here(): ctypes.string_at(0)\nhere()", tmp_path / "0.log")

    assert done.returncode == -11
    text = (tmp_path / "0.log").read_text()
    assert "Segmentation fault" in text and "in here" in text


@pytest.mark.parametrize("closed", [(1,), (1, 2), (0, 1, 2)])
def test_a_closed_standard_output_is_no_place_for_the_log_to_be_lost(tmp_path: Path, closed: tuple[int, ...]) -> None:
    shut = "".join(f" {number}>&-" for number in closed)
    command = f'exec "$0" -c "$1" "$2"{shut}'
    code = PRELUDE + "print('kept')\nprint('and this', file=sys.stderr)\nos._exit(7)"

    done = subprocess.run(["sh", "-c", command, sys.executable, code, tmp_path / "0.log"], cwd=ROOT, timeout=60)

    assert done.returncode == 7
    assert (tmp_path / "0.log").read_text() == "kept\nand this\n"


def test_ranks_that_have_not_come_are_named_by_rank_0_again_and_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(tmp_path)
    run.ranks.mkdir()
    for rank, host, phase in ((0, "n1", Phase.WAITING), (1, "n2", Phase.STARTUP)):
        beats.path_of(run, rank).write_bytes(made_beat(rank, 1, host, 1, "starting", 0.0, 0.0, phase=phase).to_bytes())

    for rank in (0, 1):
        with late_ranks_named(run, Rank(rank, 0, 3, supervised=False), first_s=0.02):
            time.sleep(0.4)

    lines = capsys.readouterr().out.splitlines()
    assert 2 <= len(lines) <= 6, "after 0.02, 0.06, 0.14 and 0.3 s, and of rank 0 alone"
    assert all("rank 1 (n2, starting), rank 2 (never seen)" in line for line in lines)


def test_ranks_that_have_all_come_and_do_not_meet_are_told_the_port(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", "29500")
    run = RunDirectory(tmp_path)
    run.ranks.mkdir()
    for rank in (0, 1):
        waits = made_beat(rank, 1, "n1", 1, "waiting", 0.0, 0.0, phase=Phase.WAITING)
        beats.path_of(run, rank).write_bytes(waits.to_bytes())

    with late_ranks_named(run, Rank(0, 0, 2, supervised=True), first_s=0.02):
        time.sleep(0.2)

    assert "port 29500" in capsys.readouterr().out


def test_an_mpirun_that_does_not_end_after_a_rank_is_ended(tmp_path: Path) -> None:
    assert end_mpirun(0) is None, "whatever has started this process is none"
    mpirun = shutil.copy("/bin/sleep", tmp_path / "mpirun")  # its name is what counts
    rank = f"{sys.executable} -c 'from tuner.worker.process import end_mpirun as end; print(end(0.1))'"

    launcher = subprocess.run(
        ["/bin/sh", "-c", f"(sleep 0.1; exec {rank}) & exec {mpirun} 50"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip

    assert (launcher.returncode, launcher.stdout) == (-signal.SIGKILL, "mpirun\n"), launcher.stderr
