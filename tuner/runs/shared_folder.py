"""A run directory that no longer answers on this node: it is said, and ends this node's part of the run.

A hanging mount holds whoever asks it for ever: ranks in a save, their watchdogs, and the supervisor, which reads their
signs of life. So threads ask that may be left behind, and the end touches no file.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tuner.errors import DiskError
from tuner.progress import say

_LOOK_S, _SAY_S = 10.0, 60.0
_TELL_S = 1.0


@contextmanager
def watched(
    folder: Path,
    limit_s: float,
    kill: Callable[[], None],
    *,
    leave: Callable[[int], object] = os._exit,  # effect: threads that hang in a folder would hold any other exit
    tell: Callable[[str], object] = say,
    look_s: float = _LOOK_S,
    say_s: float = _SAY_S,
) -> Iterator[None]:
    """Watch a folder during the block.

    Args:
        limit_s: When it has not answered for so long, this process ends with the code of a disk error.
        kill: Ends the ranks of this node; it must ask nothing of the folder.
        tell: Shows a line to the user. Where that goes into the folder too, it is left behind.
    """
    over = threading.Event()
    where = f"{socket.gethostname()}: {folder}"

    def watch() -> None:
        while not over.wait(look_s):
            asked_s = said_s = time.monotonic()
            asking = threading.Thread(target=_ask, args=(folder,), daemon=True, name="shared-folder-look")
            asking.start()
            while asking.is_alive() and not over.is_set():
                asking.join(min(look_s, 1.0))
                silent_s = time.monotonic() - asked_s
                silence = f"{where} has not answered for {silent_s:.0f} s"
                if asking.is_alive() and silent_s >= limit_s:
                    try:
                        kill()
                        _aside(tell, f"error[{DiskError.code}]: {silence}, so this node ends.")
                    finally:  # whatever hinders it: nothing else would end this node
                        leave(DiskError.exit_code)
                    return
                if asking.is_alive() and time.monotonic() - said_s >= say_s:
                    said_s = time.monotonic()
                    _aside(tell, f"WARNING: {silence}. This node ends after {limit_s:.0f} s.")
            if said_s > asked_s and not over.is_set():
                _aside(tell, f"{where} answers again after {time.monotonic() - asked_s:.0f} s.")

    threading.Thread(target=watch, daemon=True, name="shared-folder").start()
    try:
        yield
    finally:
        over.set()


def _aside(tell: Callable[[str], object], line: str) -> None:
    """Show a line in a thread that may be left behind: standard error may be a file in the folder."""
    telling = threading.Thread(target=tell, args=(line,), daemon=True, name="shared-folder-tell")
    telling.start()
    telling.join(_TELL_S)


def _ask(folder: Path) -> None:
    # A name that was never asked for: what a client has cached would answer for a server that is gone.
    with suppress(OSError):
        os.stat(folder / f".asked-{time.time_ns()}")  # noqa: PTH116
