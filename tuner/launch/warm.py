"""The supervisor's side of `tuner.worker.warm`: a process that has the libraries, and forks the ranks of a restart.

Whatever hinders it, the ranks start as they do without it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import psutil

from tuner.machine.hardware import available_host_bytes
from tuner.machine.kernel import die_with_parent
from tuner.machine.topology import STORE_FD
from tuner.progress import POLL_S
from tuner.worker.warm import Word

_MODULE = "tuner.worker.warm"
_ANSWER_S = 10.0
_MAX_BYTES = 1 << 16
_MEMORY_BYTES = 4 << 30
"""It is not started where less memory is free, of the host or of its control group. It takes about 0.8 GiB."""


class Forked:
    """A forked rank, with what the supervisor uses of a `Popen`."""

    def __init__(self, warm: Warm, pid: int) -> None:
        self._warm, self.pid = warm, pid
        self._process: psutil.Process | None = None
        """None: it has ended already."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process = psutil.Process(pid)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code of a rank that has ended; negative for a signal."""
        self._warm.hear()
        if self.returncode is None:
            self.returncode = self._warm.codes.pop(self.pid, None)
        if self.returncode is None and self._warm.is_gone and not (self._process and runs(self._process)):
            self.returncode = -signal.SIGKILL  # nobody could tell how it ended
        return self.returncode

    def wait(self) -> int:
        """Wait for the end, and return the exit code."""
        while (code := self.poll()) is None:
            time.sleep(POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, if it has not ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if self.poll() is None and self._process:
                self._process.send_signal(number)


def runs(process: psutil.Process) -> bool:
    """Return whether a process has not ended: a zombie has, also if its parent, or process 1 of a container, hangs."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


class Warm:
    """The process that ranks are forked from. It is begun while a run trains, and ends with `close`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._env: Mapping[str, str] = {}
        self._is_ready = False
        self._has_failed = False
        self._pids: list[int] = []
        self.codes: dict[int, int] = {}
        """The exit codes of ranks that have ended, until they are asked for."""

    @property
    def is_gone(self) -> bool:
        """Whether it has ended, so that no rank can be forked."""
        return self._control is None

    def begin(self, argv: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        """Start it, if it is not there, has not failed, and memory suffices.

        Args:
            argv: The command of a rank: the interpreter, -m, the module, the run directory.
            env: The ranks' variables but for those that differ between them.
        """
        if not self.is_gone or self._has_failed or (available_host_bytes() or 0) < _MEMORY_BYTES:
            return
        own_socket, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own_socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * _MAX_BYTES)
        fd = child_socket.fileno()
        command = [*argv[:2], _MODULE, *argv[2:], str(fd)]
        with child_socket, contextlib.suppress(OSError), log.open("ab") as stream:
            self._process = subprocess.Popen(
                command, env=dict(env), pass_fds=(fd,), stdout=stream, stderr=stream, start_new_session=True,
                preexec_fn=partial(die_with_parent, signal.SIGKILL, os.getpid()),
            )  # fmt: skip
            self._control, self._env, self._is_ready = own_socket, env, False

    def fork(
        self, env: Mapping[str, str], rank_env: Mapping[str, str], fds: tuple[int, ...], stdout: int, stderr: int
    ) -> Forked | None:
        """Return a rank that was forked, or None if it must be started otherwise.

        Args:
            env: As for `begin`: with other variables the libraries would be other ones.
            own: All variables of this rank.
            fds: The descriptors that it inherits: none, or the store's socket.
        """
        self.hear()
        if self.is_gone or not self._is_ready or _of_libraries(env) != _of_libraries(self._env):
            return None
        assert self._control
        variables = {name: value for name, value in rank_env.items() if name != STORE_FD}
        try:
            socket.send_fds(self._control, [json.dumps(variables).encode()], [stdout, stderr, *fds])
            while not self._pids and not self.is_gone:
                if not select.select([self._control], [], [], _ANSWER_S)[0]:
                    self.close()
                self.hear()
        except OSError:
            self.close()
        return Forked(self, self._pids.pop()) if self._pids else None

    def distrust(self) -> None:
        """End it for good: ranks that it had forked came to no step, or ended with it."""
        self._has_failed = True
        self.close()

    def hear(self) -> None:
        """Read what it has told: that it is ready, and which rank has ended how."""
        while control := self._control:
            try:
                # At once: the thread that watches the run directory asks too, and one of two would wait for ever.
                data = control.recv(_MAX_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._has_failed = not self._is_ready
                self.close()
                return
            word = Word(*json.loads(data))
            if word.pid is None:
                self._is_ready = True
            elif word.code is None:
                self._pids.append(word.pid)
            else:
                self.codes[word.pid] = word.code

    def close(self) -> None:
        """End it. Ranks that it has forked get SIGTERM if they are still there."""
        if self._control:
            self._control.close()
            self._control = None
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None


def _of_libraries(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those that follow the number of nodes (`--nnodes MIN:MAX`)."""
    return {name: value for name, value in env.items() if name != "WORLD_SIZE"}
