"""A process beside a rank for when its own watchdog cannot run: C code that keeps the interpreter stops all threads.

`faulthandler.dump_traceback_later` would need no process, but its thread counts the time of a suspended job as well and
reads the stacks of threads that run: a rank that went on after a suspension could crash there (SIGSEGV, Python 3.11).
A signal handler reads the stacks of a thread that stands still.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess  # effect: a rank whose threads cannot run is ended from outside
import sys
import time

from tuner.machine.kernel import die_with_parent, stopped


class StallWatchdog:
    """Ends this process, or only shows its stacks, once nothing has called `feed` for `limit_s` seconds.

    Args:
        look_s: How often `feed` is called.
        ends: End the process by SIGABRT, for which `faulthandler` writes its stacks; else SIGQUIT only writes them.
    """

    def __init__(self, limit_s: float, look_s: float, *, ends: bool) -> None:
        number = signal.SIGABRT if ends else signal.SIGQUIT
        argv = [sys.executable, "-m", __name__, str(os.getpid()), str(limit_s), str(look_s), str(int(number))]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0)

    def feed(self) -> None:
        """Say that Python code runs in this process."""
        assert self._process.stdin
        try:
            self._process.stdin.write(b".")
        except OSError:  # it was killed; the rank goes on without it
            return

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def watch(pid: int, limit_s: float, look_s: float, number: int) -> None:
    """Signal a process once standard input has been silent for so long, not counting the time that it was stopped."""
    silent_s, looked_s = 0.0, time.monotonic()
    while silent_s < limit_s:
        is_fed, _, _ = select.select([0], [], [], look_s)
        if is_fed and not os.read(0, 4096):
            return  # the rank has ended
        now_s = time.monotonic()
        if is_fed:
            silent_s = 0.0
        elif not stopped({0: pid}):
            silent_s += min(now_s - looked_s, 2 * look_s)  # this process may have been suspended too
        looked_s = now_s
    minutes, seconds = divmod(round(limit_s), 60)
    # The words of `faulthandler`, which the diagnosis of a run knows.
    os.write(2, f"Timeout ({minutes // 60}:{minutes % 60:02}:{seconds:02})!\n".encode())
    os.kill(pid, number)


if __name__ == "__main__":
    # Slurm sends them to all processes of a step.
    for stop in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2):
        signal.signal(stop, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)
    rank, limit, look, number = sys.argv[1:]
    watch(int(rank), float(limit), float(look), int(number))
