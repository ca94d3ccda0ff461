"""What is appended to a log, shown on a descriptor as it comes.

Who writes the log never waits for who reads it: a terminal that is closed or stopped costs nothing but the show.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

_POLL_S = 0.1
_LAST_S = 3.0
_CHUNK_BYTES = 1 << 20
_ERASE_LINE, _SHOW_CURSOR = b"\r\x1b[K", b"\x1b[?25h"


class Follower:
    """Copies whole lines from the end of `log`, which need not be there yet, to the descriptor `target`.

    Args:
        log: The file to follow, from its first byte.
        target: Where the lines go.
        is_over: Called before each copy; what was written once it says yes is left to the log alone.
    """

    def __init__(self, log: Path, target: int, is_over: Callable[[], bool]) -> None:
        self._log, self._target, self._is_over = log, target, is_over
        self._num_read = 0
        # On a terminal a progress bar may stand in this line; it draws itself again in the next one.
        self._erase = _ERASE_LINE if os.isatty(target) else b""
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True, name="follower")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Copy what is left and end; a reader that does not read is not waited for longer than three seconds."""
        self._ending.set()
        self._thread.join(_LAST_S)

    def _loop(self) -> None:
        while not self._ending.wait(_POLL_S):
            while self._copy():
                continue
        while self._copy(whole_lines=False):
            continue
        if self._erase:  # a bar whose rank was killed leaves its last frame, and the cursor hidden
            self._write(self._erase + _SHOW_CURSOR)

    def _copy(self, *, whole_lines: bool = True) -> bool:
        """Copy one chunk; return whether there was one."""
        data = self._read()
        data = data[: data.rfind(b"\n") + 1] if whole_lines else data
        self._num_read += len(data)
        # Asked after the read: a rank reports its failure before it writes its traceback into the log.
        if data and not self._is_over():
            self._write(self._erase + data)
        return bool(data)

    def _read(self) -> bytes:
        try:
            with self._log.open("rb") as stream:
                stream.seek(self._num_read)
                return stream.read(_CHUNK_BYTES)
        except OSError:
            return b""

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            while data:
                try:
                    data = data[os.write(self._target, data) :]
                except BlockingIOError:  # some shells leave a terminal non-blocking
                    time.sleep(_POLL_S)
