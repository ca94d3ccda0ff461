"""The only place that spawns: one torchrun agent, its signals, its end, and an exit code that tells the truth.

torchrun turns every failure into 1, so the code comes from what the ranks left in the run directory.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import psutil

from tuner.errors import DiskError, Stopped
from tuner.machine.kernel import die_with_parent, num_oom_kills
from tuner.runs.diagnose import diagnose
from tuner.runs.directory import RunDirectory, State
from tuner.runs.evidence import gather
from tuner.runs.follow import Follower

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
_POLL_S = 0.1
_REAP_S = 10.0
_STDOUT = 1


def run(
    argv: Sequence[str],
    env: Mapping[str, str],
    directory: RunDirectory,
    node_rank: int = 0,
    *,
    out: int | None = _STDOUT,
) -> int:
    """Run this node's torchrun to its end and return the exit code of the run; leave no process behind.

    What rank 0 prints is shown on the descriptor `out`, if any; a failure is told in three lines on standard error
    and written into status.json.
    """
    watch = _Watch(directory)
    shows = node_rank == 0 and out is not None
    shown = Follower(directory.ranks / "0.log", out or _STDOUT, lambda: bool(directory.failures()))
    with watch.signals():
        directory.ranks.mkdir(exist_ok=True)
        with (directory.ranks / f"torchrun-{node_rank}.log").open("wb") as log:
            agent = subprocess.Popen(  # new session: Ctrl-C of the terminal reaches the ranks once, through us
                list(argv),
                env=dict(env),
                stdout=subprocess.DEVNULL if out is None else out,  # a terminal is where rank 0 draws its bar
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        watch.agent = psutil.Process(agent.pid)
        if shows:
            shown.start()
        while agent.poll() is None:
            watch.remember_ranks()
            watch.forward()
            time.sleep(_POLL_S)
        watch.kill_ranks()
    if shows:
        shown.stop()
    return watch.verdict(agent.returncode)


class _Watch:
    def __init__(self, directory: RunDirectory) -> None:
        self.directory, self.num_oom_kills = directory, num_oom_kills()
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
        if self.forwarded and not reports:
            return self._end("failed", 128 + self.forwarded, f"stopped by {signal.Signals(self.forwarded).name}")
        if reports and reports[0]["exit_code"] == Stopped.exit_code:
            return self._end("stopped", Stopped.exit_code, str(reports[0]["message"]))
        return self._diagnose(agent_code, reports)

    def _diagnose(self, agent_code: int, reports: Sequence[Mapping[str, Any]]) -> int:
        kills = (num_oom_kills() or 0) - (self.num_oom_kills or 0)
        try:
            found = diagnose(gather(self.directory, agent_code=agent_code, num_oom_kills=max(kills, 0)))
        except BaseException:
            print(*(report["message"] for report in reports), sep="\n", file=sys.stderr)  # a bug of ours hides nothing
            raise
        return self._end("failed", found.exit_code, found.text, message=found.message, diagnosis=found.to_json())

    def _end(self, state: State, code: int, text: str, **facts: Any) -> int:
        print(text, file=sys.stderr)
        signals = {"signal": self.received[0]} if self.received else {}
        with contextlib.suppress(DiskError):  # a full disk must not hide what went wrong before
            self.directory.write_status(state, **{"exit_code": code, "message": text, **signals, **facts})
        return code


def _runs(process: psutil.Process) -> bool:
    # A zombie is dead, though nobody may ever reap it: its parent hangs, or process 1 of a container does not care.
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()
