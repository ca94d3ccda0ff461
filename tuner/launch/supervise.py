"""The only place that spawns: one torchrun agent, its signals, its end, and an exit code that tells the truth.

torchrun turns every failure into 1, so the code comes from what the ranks wrote into the run directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

import psutil

from tuner.errors import Stopped
from tuner.runs.directory import RunDirectory

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
_POLL_S = 0.1
_REAP_S = 10.0
_PR_SET_PDEATHSIG = 1
_EXIT_CODE = re.compile(r"exitcode\s*:\s*(-?\d+)")


def run(argv: Sequence[str], env: Mapping[str, str], directory: RunDirectory, node_rank: int = 0) -> int:
    """Run this node's torchrun to its end and return the exit code of the run; leave no process behind."""
    watch = _Watch(directory, directory.ranks / f"torchrun-{node_rank}.log")
    with watch.signals():
        directory.ranks.mkdir(exist_ok=True)
        with watch.log.open("wb") as log:
            agent = subprocess.Popen(  # new session: Ctrl-C of the terminal reaches the ranks once, through us
                list(argv), env=dict(env), stderr=log, start_new_session=True, preexec_fn=_die_with_parent
            )
        watch.agent = psutil.Process(agent.pid)
        while agent.poll() is None:
            watch.remember_ranks()
            watch.forward()
            time.sleep(_POLL_S)
        watch.kill_ranks()
    return watch.verdict(agent.returncode)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class _Watch:
    def __init__(self, directory: RunDirectory, log: Path) -> None:
        self.directory, self.log = directory, log
        self.agent: psutil.Process | None = None
        self.ranks: set[psutil.Process] = set()
        self.received: list[int] = []
        self.forwarded = 0

    @contextlib.contextmanager
    def signals(self):  # type: ignore[no-untyped-def]
        """Take over the signals before anything is spawned; give them back at the end."""
        before = {number: signal.signal(number, self._receive) for number in _FORWARDED}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        # A closing terminal sends SIGHUP twice: asking again is not asking for a kill, only SIGTERM and Ctrl-C are.
        if not self.received or number in (signal.SIGTERM, signal.SIGINT):
            self.received.append(number)

    def remember_ranks(self) -> None:
        """Note the agent's descendants while they have a parent: orphans cannot be found later."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if self.agent:
                self.ranks |= set(self.agent.children(recursive=True))

    def forward(self) -> None:
        """Pass the first signal on as SIGTERM (finish the step, save, stop); at the second, kill at once."""
        if len(self.received) > 1:  # the ranks are killed as soon as it is gone
            if self.agent:
                _kill(self.agent)
        elif self.received and not self.forwarded:
            self.forwarded = self.received[0]
            if self.agent:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self.agent.terminate()

    def kill_ranks(self) -> None:
        """Kill what is left of the agent's descendants; a psutil.Process never means a reused pid."""
        for process in self.ranks:
            _kill(process)
        deadline = time.monotonic() + _REAP_S
        while any(_runs(process) for process in self.ranks) and time.monotonic() < deadline:
            time.sleep(_POLL_S / 10)

    def verdict(self, agent_code: int) -> int:
        """Return the run's exit code, write status.json, and print what went wrong."""
        reports = self.directory.failures()
        if len(self.received) > 1:
            return self._end("failed", 128 + self.received[-1], "killed at the second signal")
        if agent_code == 0 and not reports:
            return 0
        codes = self._exit_codes()
        if reports and codes[:1] != [-signal.SIGKILL]:  # a killed rank says nothing; the others report a lost peer
            first = reports[0]
            state = "stopped" if first["exit_code"] == Stopped.exit_code else "failed"
            return self._end(state, first["exit_code"], f"{first['message']}")
        if self.forwarded:
            return self._end("failed", 128 + self.forwarded, f"stopped by {signal.Signals(self.forwarded).name}")
        return self._unreported(codes, agent_code)

    def _text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def _exit_codes(self) -> list[int]:
        return [int(code) for code in _EXIT_CODE.findall(self._text())]

    def _unreported(self, codes: list[int], agent_code: int) -> int:
        """A rank ended without a word: killed, or before its handlers stood."""
        code = next(iter(codes), agent_code)  # the log names the root cause first, then whom torchrun stopped for it
        if code < 0:
            who, name = "a rank" if codes else "torchrun", signal.Signals(-code).name
            text = f"{who} was killed by {name}" + (" (out of memory?)" if -code == signal.SIGKILL else "")
            return self._end("failed", 128 - code, text)
        tail = "\n".join(self._text().splitlines()[-30:])
        text = f"{tail}\nA rank ended with code {code} and without a report. All of it: {self.directory.ranks}"
        return self._end("failed", code or 1, text.strip())

    def _end(self, state: str, code: int, message: str) -> int:
        self.directory.write_status(state, exit_code=code, message=message)  # type: ignore[arg-type]
        print(message, file=sys.stderr)
        return code


def _runs(process: psutil.Process) -> bool:
    # A zombie is dead, though nobody may ever reap it: its parent hangs, or process 1 of a container does not care.
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()
