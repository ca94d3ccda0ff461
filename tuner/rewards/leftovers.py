"""Ends what code of the user's has started, when the rank that called it has ended, however it ended.

The kernel ends the process of the code with its rank, and nothing else of its group: a shell that a tool has started
would run on. So a process of its own, one for each rank, reads which groups there are until the rank's end of the pipe
is closed, and kills those that are left.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from contextlib import suppress

_PROGRAM = """
import os, sys
groups = set()
for line in sys.stdin:
    group = int(line)
    groups.add(group) if group > 0 else groups.discard(-group)
for group in groups:
    try:
        os.killpg(group, 9)
    except OSError:
        pass
"""
_process: subprocess.Popen[bytes] | None = None
"""Of this process; one that is forked from it has its own."""


def watch(group: int) -> None:
    """Have a process group killed when this process has ended."""
    global _process
    if _process is None:
        argv = [sys.executable, "-I", "-S", "-c", _PROGRAM]
        none = subprocess.DEVNULL  # who reads what this process prints waits for no other
        _process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=none, stderr=none, bufsize=0, start_new_session=True
        )
        atexit.register(_end)
    _write(group)


def forget(group: int) -> None:
    """Have it left alone: it is over, and its number may become another's."""
    _write(-group)


def _end() -> None:
    """Close the pipe of a process that does not end as ranks do, by `os._exit`."""
    if _process is not None and _process.stdin is not None:
        _process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            _process.wait(timeout=1)


def _let_go() -> None:
    """Close the pipe in a forked process: later its number may be that of another file there."""
    global _process
    if _process is not None and _process.stdin is not None:
        _process.stdin.close()
        _process.returncode = 0  # it is no child of this process
    _process = None


os.register_at_fork(after_in_child=_let_go)


def _write(number: int) -> None:
    if _process is not None and _process.stdin is not None:
        with suppress(OSError, ValueError):  # it was killed, or this process ends
            _process.stdin.write(f"{number}\n".encode())
