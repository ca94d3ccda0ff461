"""Where a rank's output goes: all of it into a log of its own, whatever becomes of terminals and disks.

It decides nothing about what is printed. Rank 0's warnings are kept in the run directory too.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import signal
import sys
from pathlib import Path
from typing import Any, TextIO

from tuner.errors import DiskError
from tuner.runs.directory import RunDirectory


class _Careless(io.FileIO):
    """A descriptor whose writes cannot fail: a closed terminal or a full disk must not end a rank."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def send_to(log: Path) -> TextIO | None:
    """Append everything that this process and its children print to `log`, C++ libraries' lines and crashes too.

    Returns:
        The terminal that standard output was before, for what a log need not hold (a progress bar), or None.
    """
    terminal = _stream(os.dup(1)) if os.isatty(1) else None
    try:
        log.parent.mkdir(exist_ok=True)
        handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:  # a disk so full that no log can begin: the output stays where it went
        pass
    else:
        for number in (1, 2):
            os.dup2(handle, number)
        if handle > 2:
            os.close(handle)
    sys.stdout, sys.stderr = _stream(1), _stream(2)
    faulthandler.enable()
    faulthandler.register(signal.SIGQUIT)  # whoever wonders what this rank does sends it, and reads the log
    return terminal


def warn(run: RunDirectory, text: str) -> None:
    """Print a warning of rank 0 and keep it for the report; a disk that takes no line holds up nothing."""
    print(f"WARNING: {text}", flush=True)
    with contextlib.suppress(DiskError, OSError):
        run.log_warning(text)


def _stream(number: int) -> TextIO:
    raw = io.BufferedWriter(_Careless(number, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
