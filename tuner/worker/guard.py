"""How a rank ends: stop requests, reports of failures, and a teardown that does not abort.

It knows nothing of training; `train` asks it at each step's end whether to stop.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

from tuner.errors import Stopped, TunerError
from tuner.machine.topology import Rank
from tuner.runs.directory import RunDirectory, State

_PR_SET_PDEATHSIG = 1
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


class Guard:
    """Watches one rank's signals and decides its exit code."""

    def __init__(self, run: RunDirectory, rank: Rank) -> None:
        self.run, self.rank = run, rank
        self.terminal = os.dup(2)
        """Where a rank that nobody supervises says why it ends, wherever its output goes later."""
        self.stop_requested = False
        self.can_stop_at_a_step = False
        """True while training: before it there is no step to finish, and a signal ends the rank at once."""

    def install(self) -> None:
        """Listen for stop signals in a thread of their own: Python's handlers wait while a collective blocks."""
        if self.rank.supervised:
            # A killed torchrun cannot end its ranks; the kernel tells them.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        for number in _STOPS:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._sockets = (reader, writer)
        threading.Thread(target=self._listen, args=(reader,), daemon=True, name="stop-signals").start()

    def _listen(self, reader: socket.socket) -> None:
        while True:
            for number in reader.recv(64):
                if number in _STOPS:
                    self._request(number)

    def _request(self, number: int) -> None:
        # After a failed rank torchrun sends SIGTERM to the others, which may wait for it in a collective for ever.
        peer_failed = bool(self.run.failures())
        if self.stop_requested or peer_failed or not self.can_stop_at_a_step:
            self._leave(128 + number)
        self.stop_requested = True

    def finish(self, work: Callable[[], None]) -> NoReturn:
        """Do the work and end this process with the right exit code, reporting what went wrong."""
        try:
            work()
        except TunerError as error:
            self._fail(error.exit_code, str(error))
        except BaseException:
            self._fail(1, traceback.format_exc())
        self._teardown()
        self._leave(0)

    def _fail(self, exit_code: int, message: str) -> NoReturn:
        is_first = not self.run.failures()  # what ranks say after the first one is mostly that they lost it
        self.run.report_failure(self.rank.rank, exit_code, message)
        if not self.rank.supervised and is_first:
            os.write(self.terminal, f"rank {self.rank.rank}: {message}\n".encode())
            state: State = "stopped" if exit_code == Stopped.exit_code else "failed"
            self.run.write_status(state, exit_code=exit_code, message=message)
        if exit_code == Stopped.exit_code:  # every rank stops at the same step, so all can leave together
            self._teardown()
        self._leave(exit_code)

    @staticmethod
    def _teardown() -> None:
        import torch.distributed as dist  # heavy; not needed by a rank that fails before it is loaded

        if dist.is_initialized():
            dist.barrier()

    @staticmethod
    def _leave(exit_code: int) -> NoReturn:
        # torch 2.13's gloo aborts in its destructors after success in up to half of the runs: skip them.
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                try:
                    stream.flush()
                except OSError:
                    continue
        os._exit(exit_code)
