"""Runs one reward in a process of its own, and ends that process at a deadline.

A thread cannot be ended: a loop in it, or a regular expression inside C, would hold the rank for ever.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from tuner.errors import MachineError, RewardError
from tuner.recipes.schema.rewards import OwnReward, RewardBlock

_LOADING_S = 120.0
"""Seconds to load a reward of the package: sympy takes one, on a busy machine many."""
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv.pop(1).split('\\n'); from tuner.rewards.reward_process import main; main()"
)


class RewardFailure(Exception):
    """A call of a reward that failed.

    Args:
        problem: What went wrong.
        where: `file:line` in the user's code, or the reward's type.
    """

    def __init__(self, problem: str, where: str) -> None:
        super().__init__(problem, where)
        self.problem, self.where = problem, where


class IsolatedReward:
    """A reward in a process of its own, which starts at the first call and again after each failure that ended it."""

    def __init__(self, block: RewardBlock) -> None:
        self._block = block
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self.place = block.type

    def __call__(self, call: Mapping[str, object]) -> object:
        """Return what the reward returns.

        Raises:
            RewardFailure: it raised an exception, its process ended, or it took more than its timeout.
            RewardError: its function cannot be loaded.
            MachineError: a library is not installed.
        """
        if self._pipe is None:
            self._start()
        assert self._pipe is not None, "it was started"
        with suppress(OSError):  # the process has ended: the answer says how
            self._pipe.send_bytes(json.dumps(call, default=str).encode())
        answer = self._answer(self._block.timeout, "one call")
        if "error" in answer:
            raise RewardFailure(str(answer["error"]), answer["where"] or self.place)
        return answer["scores"]

    def _start(self) -> None:
        pipe, end_of_child = Pipe()
        document = json.dumps(self._block.model_dump(mode="json"))
        argv = [sys.executable, "-P", "-c", _PROGRAM, "\n".join(sys.path), document, str(end_of_child.fileno())]
        # In a session of its own: Ctrl-C is for the run, which ends this process when it ends itself.
        fds = (end_of_child.fileno(),)
        self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, pass_fds=fds, start_new_session=True)
        end_of_child.close()
        self._pipe = pipe
        limit_s = self._block.timeout if isinstance(self._block, OwnReward) else max(self._block.timeout, _LOADING_S)
        answer = self._answer(limit_s, "importing it")
        if "error" in answer:
            self.end()
            error = MachineError if answer["code"] == MachineError.code else RewardError
            raise error(answer["error"], where=answer["where"] or self._block.type, fix=answer["fix"])
        self.place = answer["place"]

    def _answer(self, limit_s: float, work: str) -> dict[str, Any]:
        """Return the answer of the process; end it if there is none in time."""
        assert self._pipe is not None and self._process is not None, "it was started"
        end = time.monotonic() + limit_s
        try:
            if self._pipe.poll(max(0.0, end - time.monotonic())):
                answer: dict[str, Any] = json.loads(self._pipe.recv_bytes())
                return answer
        except (EOFError, OSError):
            code = self._process.wait()
            self.end()
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            raise RewardFailure(f"its process ended {how}", self.place) from None
        self.end()
        raise RewardFailure(f"{work} took more than {limit_s:g} s (its timeout)", self.place)

    def end(self) -> None:
        """End the process; the next call starts it again."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # with what the user's function started
            self._process.wait()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None

    def __del__(self) -> None:
        with suppress(Exception):  # at the end of Python its modules may be gone
            self.end()
