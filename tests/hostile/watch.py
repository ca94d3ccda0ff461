"""What the interpreter itself reports of a stretch of code: files opened for writing, processes, connections.

An audit hook cannot be taken away again and slows all that comes after, so there is one, from the first use on, which
listens only inside `effects`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

_CHANGES = {
    *("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"),
    *("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "subprocess.Popen"),
    *("socket.connect", "socket.bind", "pickle.find_class"),
}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_seen: list[str] | None = None


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _seen is None:
        return
    if event == "open":
        path, _, flags = arguments
        if isinstance(flags, int) and flags & _WRITES and path != os.devnull:
            _seen.append(f"open {path!r} for writing")
    elif event in _CHANGES and arguments[:1] != ("uname",):  # platform.platform() asks it
        _seen.append(f"{event} {arguments!r}"[:200])


@cache
def _listen() -> None:
    sys.addaudithook(_hook)


@contextmanager
def effects() -> Iterator[list[str]]:
    """Give a list that fills with what the code inside changes or starts; files of Python's own cache are left out."""
    global _seen
    _listen()
    before, dont_write = _seen, sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    _seen = found = []
    try:
        yield found
    finally:
        _seen, sys.dont_write_bytecode = before, dont_write
