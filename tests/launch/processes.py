"""What is left of the processes of a run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil


def alive(folder: Path) -> list[psutil.Process]:
    """Return the living processes that name `folder` on their command line."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE and str(folder) in (process.info["cmdline"] or []):
            found.append(process)
    return found


def wait_until(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    """Poll a condition with a deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)


def read_exactly(descriptor: int, num_bytes: int) -> bytes:
    """Read so many bytes: a terminal may give what was written at once in pieces."""
    data = b""
    while len(data) < num_bytes:
        data += os.read(descriptor, num_bytes - len(data))
    return data
