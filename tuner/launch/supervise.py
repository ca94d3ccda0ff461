"""The only place that spawns: one torchrun or the only rank, its signals, its end, an exit code that tells the truth.

torchrun turns every failure into 1, so the code comes from what the ranks left in the run directory.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, TextIO

import psutil

from tuner.errors import DiskError, RunDirectoryError, Stopped
from tuner.files import write_json
from tuner.machine.kernel import die_with_parent, heard, num_oom_kills, stopped
from tuner.runs import beats, checkpoints
from tuner.runs.diagnose import diagnose
from tuner.runs.directory import RunDirectory, State
from tuner.runs.evidence import gather
from tuner.runs.follow import Follower

_INSISTING = (signal.SIGTERM, signal.SIGINT)
"""Asked twice by one of them, a run is killed. A terminal that closes sends SIGHUP twice, and SIGTERM may follow it."""
_FORWARDED = (*_INSISTING, signal.SIGHUP, signal.SIGUSR2)
_POLL_S = 0.1
_REAP_S = 10.0
"""A killed process that is in a write of a slow disk, or in a driver's call, ends only when that returns."""
_LOOK_S = 1.0
_AFTER_FAILURE_S = 10.0
"""What the other ranks get once one has failed: they save nothing any more."""
_STACKS_S = 1.0
_SAVES = 3.0
"""Who is told to stop gets at least so many times the longest save so far."""
_STDOUT = 1


def run(
    argv: Sequence[str],
    env: Mapping[str, str],
    directory: RunDirectory,
    node_rank: int = 0,
    *,
    is_rank: bool = False,
    grace_s: float,
    shows_rank_0: bool = True,
    output: TextIO | None = None,
) -> int:
    """Run torchrun, or the only rank, to its end and return the exit code of the run; leave no process behind.

    A failure is told in three lines on standard error and written into status.json. Signals are heard in the main
    thread alone, where Python takes them.

    Args:
        is_rank: The command is that of the only rank itself.
        grace_s: What ranks that are told to stop have, in seconds; they get longer where saves take long.
        shows_rank_0: What rank 0 prints is shown, and not in its log alone.
        output: Where it is shown: a notebook's cell is a stream. None: on standard output's descriptor.
    """
    watch = _Watch(directory, grace_s, is_rank)
    shows = shows_rank_0 and node_rank == 0
    shown = Follower(
        directory.ranks / "0.log",
        output or _STDOUT,
        lambda: beats.has_failed(directory, 0) or bool(directory.failures()),
    )
    with watch.signals():
        directory.ranks.mkdir(exist_ok=True)
        with (directory.ranks / f"launcher-{node_rank}.log").open("wb") as log:
            # A terminal is where rank 0 draws its bar; what is shown on a stream comes from the log.
            inherited = log if output else None
            child = subprocess.Popen(  # new session: Ctrl-C of the terminal reaches the ranks once, through us
                list(argv),
                env=dict(env),
                stdout=inherited if shows_rank_0 else subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        watch.begin(child.pid)
        if shows:
            shown.start()
        while child.poll() is None:
            watch.forward()
            watch.look()
            time.sleep(_POLL_S)
        watch.kill_ranks()
    if node_rank == 0:  # a rank that found the disk full removed it too, while another may still have written
        checkpoints.clear_unfinished(directory.checkpoints)
    if shows:
        shown.stop()
    return watch.verdict(child.returncode)


class _Watch:
    def __init__(self, directory: RunDirectory, grace_s: float, is_rank: bool) -> None:
        self.directory, self.num_oom_kills, self.grace_s = directory, num_oom_kills(), grace_s
        self.is_rank = is_rank
        self.child: psutil.Process | None = None
        self.ranks: set[psutil.Process] = set()
        self.received: list[int] = []
        self.forwarded = 0
        self.ending_since_s: float | None = None
        """When the ranks were told to stop, or the first of them failed."""
        self.failed = False
        self.looked_s = 0.0
        self.stopped: list[int] = []
        self.overdue: list[int] = []
        self.overdue_s = 0.0

    @contextlib.contextmanager
    def signals(self):  # type: ignore[no-untyped-def]
        """Take over the signals before anything is spawned; give them back at the end."""
        is_main = threading.current_thread() is threading.main_thread()
        before = {number: signal.signal(number, self._receive) for number in heard(_FORWARDED) if is_main}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self.received or number in _INSISTING:
            self.received.append(number)

    @property
    def insisted(self) -> bool:
        return sum(number in _INSISTING for number in self.received) > 1

    def begin(self, pid: int) -> None:
        """Watch the process that was started."""
        self.child = psutil.Process(pid)
        # The rank itself has its stacks written and is killed after the grace; torchrun ends when its ranks have.
        self.ranks = {self.child} if self.is_rank else set()

    def remember_ranks(self) -> None:
        """Note the child's descendants while they have a parent: orphans cannot be found later."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if self.child:
                self.ranks |= set(self.child.children(recursive=True))

    def forward(self) -> None:
        """Pass the first signal on as SIGTERM (finish the step, save, stop); at the second, kill at once."""
        if self.insisted:  # the ranks are killed as soon as it is gone
            if self.child:
                _send(self.child, signal.SIGSTOP)  # it may be starting one, which nobody could find afterwards
                self.remember_ranks()
                _kill(self.child)
        elif self.received and not self.forwarded:
            self.forwarded, self.ending_since_s = self.received[0], time.monotonic()
            if self.child:
                _send(self.child, signal.SIGTERM)

    def look(self) -> None:
        """Note the ranks and end the late ones, once a second: finding them reads of every process of the machine."""
        now_s = time.monotonic()
        if now_s - self.looked_s >= _LOOK_S:
            self.looked_s = now_s
            self.remember_ranks()
            self.end_late_ranks(now_s)

    def end_late_ranks(self, now_s: float) -> None:
        """Kill the ranks that do not end when they have to: after a failure of another, or when told to stop."""
        if not self.failed and any(report["exit_code"] != Stopped.exit_code for report in self.directory.failures()):
            self.failed, self.ending_since_s = True, now_s
            self._wake()
        if self.ending_since_s is None or self.overdue_s:
            return
        self._kill_if_over(now_s - self.ending_since_s)

    def _wake(self) -> None:
        """Let stopped ranks go on: they cannot take the SIGTERM that torchrun has sent them, nor leave their stacks."""
        pids = {rank: beat.pid for rank, beat in beats.here(self.directory).items()}
        self.stopped = stopped(pids)
        for process in self._of(pids[rank] for rank in self.stopped):
            _send(process, signal.SIGCONT)

    def _kill_if_over(self, waited_s: float) -> None:
        last_beats = beats.here(self.directory)
        longest_s = max((beat.save_s for beat in last_beats.values()), default=0.0)
        grace_s = _AFTER_FAILURE_S if self.failed else max(self.grace_s, _SAVES * longest_s)
        if waited_s < grace_s:
            return
        alive = {process.pid for process in self.ranks if _runs(process)}
        self.overdue = [rank for rank, beat in sorted(last_beats.items()) if beat.pid in alive]
        self.overdue_s = waited_s
        for process in self._of(last_beats[rank].pid for rank in self.overdue):
            _send(process, signal.SIGCONT)
            _send(process, signal.SIGQUIT)  # its stacks, into its log
        time.sleep(_STACKS_S)
        for process in self.ranks:  # torchrun itself notices, and ends
            _kill(process)

    def _of(self, pids: Iterable[int]) -> list[psutil.Process]:
        wanted = set(pids)
        return [process for process in self.ranks if process.pid in wanted]

    def kill_ranks(self) -> None:
        """Kill what is left of the child's descendants; a psutil.Process never means a reused pid."""
        for process in self.ranks:
            _kill(process)
        deadline = time.monotonic() + _REAP_S
        while any(_runs(process) for process in self.ranks) and time.monotonic() < deadline:
            time.sleep(_POLL_S / 10)

    def verdict(self, child_code: int) -> int:
        """Return the run's exit code, write status.json, and print what went wrong."""
        reports = self.directory.failures()
        if self._is_done():
            if reports or (child_code != 0 and not self.forwarded):  # torchrun fails at a signal, whatever its ranks do
                text = "WARNING: the run is done and its result is complete, but the cleanup after it was interrupted."
                with contextlib.suppress(OSError):
                    print(text, file=sys.stderr)
            self._keep_signal()
            return 0
        if self.insisted:
            return self._end("failed", 128 + self.received[-1], "killed at the second signal")
        if child_code == 0 and not reports and not self.overdue:
            return 0
        if self.forwarded and not reports and not self.overdue:
            return self._end("failed", 128 + self.forwarded, f"stopped by {signal.Signals(self.forwarded).name}")
        if reports and reports[0]["exit_code"] == Stopped.exit_code:
            return self._end("stopped", Stopped.exit_code, str(reports[0]["message"]))
        return self._diagnose(child_code, reports)

    def _is_done(self) -> bool:
        """Return whether rank 0 has said so, when the result was in its place: nothing after that can undo it."""
        with contextlib.suppress(RunDirectoryError, AttributeError):
            return bool(self.directory.read_json(self.directory.status).get("state") == "done")
        return False

    def _diagnose(self, child_code: int, reports: Sequence[Mapping[str, Any]]) -> int:
        kills = (num_oom_kills() or 0) - (self.num_oom_kills or 0)
        try:
            evidence = gather(
                self.directory,
                child_code=child_code,
                is_rank=self.is_rank,
                num_oom_kills=max(kills, 0),
                stopped=self.stopped,
                overdue=self.overdue,
                overdue_s=self.overdue_s,
            )
            diagnosis = diagnose(evidence)
        except BaseException:
            print(*(report["message"] for report in reports), sep="\n", file=sys.stderr)  # a bug of ours hides nothing
            raise
        return self._end(
            "failed", diagnosis.exit_code, diagnosis.text, message=diagnosis.message, diagnosis=diagnosis.to_json()
        )

    def _keep_signal(self) -> None:
        """Let status.json say of a run that was done before it could stop that it was asked to; `api` passes it on."""
        if self.received:
            with contextlib.suppress(DiskError, RunDirectoryError):
                status = self.directory.read_json(self.directory.status)
                write_json(self.directory.status, {**status, **self._signal})

    @property
    def _signal(self) -> dict[str, int]:
        return {"signal": self.received[0]} if self.received else {}

    def _end(self, state: State, code: int, text: str, **facts: Any) -> int:
        with contextlib.suppress(DiskError):  # a full disk must not hide what went wrong before
            self.directory.write_status(state, **{"exit_code": code, "message": text, **self._signal, **facts})
        with contextlib.suppress(OSError):  # the terminal may be gone: that was why the run was to stop
            print(text, file=sys.stderr)
        return code


def _runs(process: psutil.Process) -> bool:
    # A zombie is dead, though nobody may ever reap it: its parent hangs, or process 1 of a container does not care.
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _kill(process: psutil.Process) -> None:
    _send(process, signal.SIGKILL)


def _send(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)
