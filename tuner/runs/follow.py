"""Files that another process appends to: read their end, read what is new, copy it to a terminal as it comes.

The writer never waits for the reader: a closed or stopped terminal does not slow the run down.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from tuner.files import open_regular, text_part
from tuner.progress import POLL_S

_LAST_S = 3.0
_CHUNK_BYTES = 1 << 20
_TAIL_BYTES = 1 << 16
_ERASE_LINE, _SHOW_CURSOR = b"\r\x1b[K", b"\x1b[?25h"


def tail(file: Path) -> str:
    """Return the last 64 KiB of a file, or an empty text if it cannot be read."""
    return text_part(file, -_TAIL_BYTES)


def write_all(target: int | TextIO, data: bytes) -> None:
    """Write to a descriptor, or as text to a stream; ignore that its reader has gone."""
    with contextlib.suppress(OSError):
        if not isinstance(target, int):
            target.write(data.decode(errors="replace"))
            target.flush()
            return
        while data:
            try:
                data = data[os.write(target, data) :]
            except BlockingIOError:  # some shells leave a terminal non-blocking
                time.sleep(POLL_S)


class Growing:
    """The new bytes of a file, which need not exist yet, from a position on. `num_read` counts the bytes so far."""

    def __init__(self, file: Path, num_read: int = 0) -> None:
        self._file, self.num_read = file, num_read

    def read(self, *, whole_lines: bool = True) -> bytes:
        """Return what is new, at most a megabyte; a line that has no end yet is left for later."""
        try:
            with open_regular(self._file) as stream:
                stream.seek(self.num_read)
                data = stream.read(_CHUNK_BYTES)
        except OSError:
            return b""
        data = data[: data.rfind(b"\n") + 1] if whole_lines else data
        self.num_read += len(data)
        return data


class Poller:
    """Calls `look` in a thread ten times a second, with `is_last=True` once it is told to stop."""

    def __init__(self, look: Callable[[bool], None], name: str) -> None:
        self._look, self._ending = look, threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True, name=name)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Look once more and end; wait at most three seconds for that."""
        self._ending.set()
        self._thread.join(_LAST_S)

    def _loop(self) -> None:
        while not self._ending.wait(POLL_S):
            self._look(False)
        self._look(True)


class Follower(Poller):
    """Copies whole lines from the first byte of `log` on, which need not be there yet, to a descriptor or a stream.

    Args:
        end: Called after each read. It returns how many bytes of the log are to be copied, or None while that is not
            known.
        is_drawn: Whether a bar is drawn on a target that is a terminal.
    """

    def __init__(
        self, log: Path, target: int | TextIO, end: Callable[[], int | None], *, is_drawn: bool = True
    ) -> None:
        super().__init__(self._copy, "follower")
        self._log, self._target, self._end = Growing(log), target, end
        # On a terminal a progress bar may stand in this line; it draws itself again in the next one.
        self._erase = _ERASE_LINE if isinstance(target, int) and is_drawn and os.isatty(target) else b""

    def _copy(self, is_last: bool) -> None:
        while data := self._log.read(whole_lines=not is_last):
            # Called after the read: a rank reports its failure before it writes its traceback into the log.
            end = self._end()
            shown = data if end is None else data[: max(end + len(data) - self._log.num_read, 0)]
            if shown:
                write_all(self._target, self._erase + shown)
        if is_last and self._erase:  # a bar whose rank was killed leaves its last frame, and the cursor hidden
            write_all(self._target, self._erase + _SHOW_CURSOR)
