from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.launch.processes import wait_until
from tuner.machine.kernel import killed_for_memory, num_oom_kills, parents_words, peak_resident_bytes, stopped

ROOT = Path(__file__).parents[2]
CHILD = """
import time
from tuner.machine.kernel import die_with_parent
die_with_parent()
print(1, flush=True)
time.sleep(60)
"""
LOOKS_UP = """
import sys
from tuner.machine.kernel import die_with_parent
seen = []
sys.addaudithook(lambda event, _: seen.append(event))
die_with_parent()
print(*(event for event in seen if event.startswith(("ctypes.dl", "import", "open"))))
"""
PARENT = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', sys.argv[1]]).pid, flush=True); input()"


def test_a_child_is_told_of_its_parents_end() -> None:
    command = [sys.executable, "-c", PARENT, CHILD]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        child = psutil.Process(int(parent.stdout.readline()))
        assert parent.stdout.readline() == "1\n"

        parent.send_signal(signal.SIGKILL)
        parent.wait(timeout=60)

        wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_a_child_whose_parent_has_ended_before_it_could_ask_ends_at_once() -> None:
    forked = "import os\nfrom tuner.machine.kernel import die_with_parent\n"
    forked += "die_with_parent(parent={})\nprint('goes on')"

    for parent, code, text in (("os.getppid()", 0, "goes on\n"), ("os.getpid()", 1, "")):
        done = subprocess.run(
            [sys.executable, "-c", forked.format(parent)], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stdout) == (code, text)


def test_a_forked_child_asks_for_it_without_the_loader_whose_lock_another_thread_may_have_held() -> None:
    done = subprocess.run([sys.executable, "-c", LOOKS_UP], cwd=ROOT, capture_output=True, text=True, check=True)

    assert done.stdout == "\n"


@pytest.mark.parametrize(
    ("files", "count"),
    [
        (
            {
                "proc/self/cgroup": "0::/user.slice/job\n",
                "sys/fs/cgroup/user.slice/job/memory.events": "low 0\noom 2\noom_kill 1\n",
                "proc/vmstat": "oom_kill 9\n",
            },
            1,
        ),
        (
            {
                "proc/self/cgroup": "7:cpu,cpuacct:/a\n4:memory:/slurm/job_7\n",
                "sys/fs/cgroup/memory/slurm/job_7/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n",
            },
            5,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.events": "oom_kill 4\n"}, 4),
        ({"proc/vmstat": "oom_kill 9\n"}, None),
        ({}, None),
    ],
)
def test_the_nearest_count_of_kills_is_taken(tmp_path: Path, files: dict[str, str], count: int | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert num_oom_kills(tmp_path) == count


def test_the_kernels_log_names_the_processes_that_were_killed_for_memory_since_a_moment(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text(
        "6,1,5000000,-;Memory cgroup out of memory: Killed process 11 (python3) total-vm:5kB\n"
        "3,2,9000000,-;Out of memory: Killed process 12 (python3) total-vm:5kB\n"
        "6,3,9000001,-;eth0: link up\n"
    )

    assert killed_for_memory(6.0, log) == {12}
    assert killed_for_memory(0.0, tmp_path / "none") == set()


def test_the_log_of_this_kernel_is_read_to_its_end() -> None:
    assert isinstance(killed_for_memory(0.0), set)


def test_a_stopped_process_is_known_by_its_state() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        gone = 2**22 + 1
        assert stopped({0: process.pid, 1: gone}) == []

        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: stopped({0: process.pid, 1: gone}) == [0])
        process.kill()


PEAK = """
from tuner.machine.kernel import peak_resident_bytes

before = peak_resident_bytes()
block = b"1" * (200 << 20)
del block
print(before, peak_resident_bytes())
"""


def test_the_peak_of_a_process_counts_memory_that_it_has_freed_and_none_of_the_process_that_started_it() -> None:
    ballast = bytearray(b"1" * (300 << 20))
    ended = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    del ballast

    before, after = map(int, ended.stdout.split())
    assert before < 150 << 20, "a Python with few modules"
    assert (190 << 20) < after - before < (250 << 20)


def test_without_a_kernel_that_names_the_peak_the_one_of_getrusage_counts(tmp_path: Path) -> None:
    assert peak_resident_bytes(tmp_path) > 10 << 20


def test_the_words_and_the_variables_of_all_parents_are_read() -> None:
    code = "from tuner.machine.kernel import parents_words; print(*parents_words(), sep='\\n')"
    command = ["env", "GIVEN_TO_MPIRUN=10", "sh", "-c", '"$0" -c "$1"; :', sys.executable, code, "--prtemca"]

    words = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout.splitlines()

    assert {"--prtemca", "GIVEN_TO_MPIRUN"} <= {*words}
    assert "GIVEN_TO_MPIRUN" not in parents_words()
