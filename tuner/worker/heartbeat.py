"""The heartbeat of a rank, what its time goes into, and the watchdogs that end a run if no rank makes progress.

It knows nothing of training: the code that works calls `beat`, and a watchdog calls its `on_hang`.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import subprocess  # effect: a rank whose threads cannot run is ended from outside
import sys
import threading
import time
from collections.abc import Callable, Iterator

import psutil

from tuner.errors import Hang
from tuner.machine.kernel import STOPS, die_with_parent, stopped
from tuner.machine.topology import Rank
from tuner.runs import beats
from tuner.runs.beats import Beat, Phase
from tuner.runs.directory import RunDirectory
from tuner.runs.time_limits import TimeLimits

_WRITE_S = 1.0
_LOOK_S = 30.0
_MOVED_BYTES, _MOVED_FAULTS = 1 << 20, 100
"""Bytes read or written, or pages fetched from a disk, since the last look: a download, load or save makes progress."""


class Heartbeat:
    """Records progress in ranks/N.beat and watches the progress of all ranks.

    A rank that waits for another makes no progress itself, so a run hangs only if all ranks stand still: then each rank
    that can calls `on_hang`, and the beats show which rank is behind.
    """

    def __init__(self, run_dir: RunDirectory, rank: Rank) -> None:
        self.run_dir, self.rank = run_dir, rank
        self._count, self.doing, self._save_s = 0, "starting", 0.0
        self.log_bytes: int | None = None
        """The size of this rank's log when it failed."""
        self._has_ended = False
        self._ticks = 0
        """The number of signs of progress, also of steps that only this rank does."""
        self._written_s = -_WRITE_S
        self.step = 0
        """The last step taken."""
        self.peak_bytes = 0
        """The most memory that this rank has held."""
        self.phase, self._saves = Phase.STARTUP, list[tuple[int, float]]()
        self._seconds: dict[str, float] = dict.fromkeys(Phase, 0.0)
        self._since_s = self._progress_s = time.monotonic()
        """When this phase began, and when the last progress was made."""
        self._progress_at = time.time()
        self._file: int | None = None
        self.limits = TimeLimits()
        self._is_watched = False
        self._step_s = 0.0
        """The time since the last step's end, without saves, validations and generations."""
        self._has_stepped = False

    def open(self) -> None:
        """Create the file; on a full disk there is no file, and the rank goes on."""
        with contextlib.suppress(OSError):
            self._file = os.open(
                beats.path_of(self.run_dir, self.rank.rank), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644
            )
        self.write()

    def beat(self, doing: str, phase: Phase | None = None) -> None:
        """Note that this rank begins `doing`, and with it perhaps a phase.

        All ranks begin the same things in order, so a lower count is behind.
        """
        self.doing = doing
        self._count += 1
        if phase:
            self.enter(phase)
        self.tick()

    def enter(self, phase: Phase) -> None:
        """Note that this rank begins a phase, which is progress; the others see at once if its limit is another."""
        limit_s = self.limit_s
        self._ticks += 1
        self._advance()
        took_s, self._since_s = self._progress_s - self._since_s, self._progress_s
        if self.phase is Phase.STEPS:
            self._step_s += took_s
        elif self.phase is Phase.SAVES and phase is not Phase.SAVES:
            self.limits.learn(Phase.SAVES, took_s)
        self.phase = phase
        if self.limit_s != limit_s:
            self.write()

    @contextlib.contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        before = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def end_step(self) -> str | None:
        """Note that a step has ended; return what to say once the limit of a step is learned."""
        self.enter(Phase.STEPS)
        text = self.limits.learn(Phase.STEPS, self._step_s) if self._has_stepped else None
        self._has_stepped, self._step_s = True, 0.0
        return text

    def save_begins(self, step: int) -> None:
        """Note that a step is saved: a run that resumes there repeats what comes later."""
        self.enter(Phase.SAVES)
        self._saves = [*self._saves[-1:], (step, round(beats.in_steps_s(self._seconds), 2))]

    def _advance(self) -> None:
        now_s = time.monotonic()
        self._seconds[self.phase] += now_s - self._progress_s
        self._progress_s, self._progress_at = now_s, time.time()

    def tick(self) -> None:
        self._ticks += 1
        self._advance()
        if time.monotonic() - self._written_s >= _WRITE_S:
            self.write()

    def saved(self, seconds: float) -> None:
        """Note how long a save took: the supervisor waits longer than that when it stops a run."""
        self._save_s = max(self._save_s, seconds)
        self.write()

    def fail(self) -> None:
        """Note that this rank ends with an error. What it writes to its log from now on is not shown."""
        if self.log_bytes is None:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
            self.log_bytes = beats.log_size(self.run_dir, self.rank.rank)
            self.write()

    def end(self) -> None:
        """End the watch: the work of this rank is done, and the rest may take long."""
        self._has_ended = True
        self._advance()
        self.write()

    @property
    def limit_s(self) -> float:
        """How long this rank may stand still now, in seconds. The first step belongs to the start: it compiles."""
        starts = self.phase is Phase.STEPS and not self._has_stepped
        return self.limits.of(Phase.STARTUP if starts else self.phase)

    def watch(self, limits: TimeLimits, on_hang: Callable[[Hang], None]) -> None:
        """Start a thread that calls `on_hang` if no rank makes progress for as long as its phase allows."""
        self.limits, self._is_watched = limits, True
        threading.Thread(target=self._watch, args=(on_hang,), daemon=True, name="watchdog").start()

    def _watch(self, on_hang: Callable[[Hang], None]) -> None:
        limit_s = self.limit_s
        look_s = min(limit_s / 10, _LOOK_S)
        idle_s, looked_s, before = 0.0, time.monotonic(), self._signs()
        others: dict[int, int] | None = None
        # Nothing else would end a single rank. Of several ranks, the others see that one is behind, and the supervisor
        # ends it.
        stall = StallWatchdog(limit_s + 2 * look_s, look_s, ends=self.rank.world_size == 1)
        while idle_s < limit_s or idle_s < (limit_s := self._limit_of_all()):
            stall.feed(limit_s + 2 * look_s)
            time.sleep(look_s)
            limit_s = self.limit_s
            now_s, now = time.monotonic(), self._signs()
            # A job that was suspended did not hang in the meantime.
            idle_s += min(now_s - looked_s, 2 * look_s)
            looked_s = now_s
            if self._has_ended:
                stall.stop()
                return
            if self._moved(before, now):
                idle_s, before, others = 0.0, now, None
                self.write()
            elif idle_s >= limit_s / 2:  # not earlier: with many ranks this reads many files
                written = beats.written(self.run_dir).items()
                others_before, others = others, {rank: at for rank, at in written if rank != self.rank.rank}
                if others_before not in (None, others):
                    idle_s = limit_s / 2
        stall.stop()
        self.write()
        on_hang(
            Hang(
                f"no rank made progress for {limit_s:g} s; this one was {self.doing}",
                fix="Every rank's stack is at the end of its log. If a step may take longer, raise hang_timeout.",
            )
        )

    def _limit_of_all(self) -> float:
        """Return the longest limit of all ranks: one that waits in a step may wait for one that still saves."""
        other_limits_s = [
            beat.limit_s for beat in beats.read_beats(self.run_dir).values() if beat.rank != self.rank.rank
        ]
        return max([self.limit_s, *other_limits_s])

    def _signs(self) -> tuple[int, int, int]:
        moved = 0
        with contextlib.suppress(psutil.Error, AttributeError, OSError):  # AttributeError: not on every system
            counters = psutil.Process().io_counters()
            moved = counters.read_chars + counters.write_chars
        return self._ticks, moved, resource.getrusage(resource.RUSAGE_SELF).ru_majflt

    @staticmethod
    def _moved(before: tuple[int, int, int], now: tuple[int, int, int]) -> bool:
        ticks, moved, faults = (new - old for old, new in zip(before, now, strict=True))
        return ticks > 0 or moved >= _MOVED_BYTES or faults >= _MOVED_FAULTS

    def write(self) -> None:
        """Write the beat now; `tick` writes at most once a second, to spare a shared file system."""
        self._written_s = now_s = time.monotonic()
        if self._file is None:
            return
        seconds: dict[str, float] = {phase: round(spent_s, 2) for phase, spent_s in self._seconds.items()}
        beat = Beat(
            rank=self.rank.rank, pid=os.getpid(), host=socket.gethostname(),
            count=self._count, doing=self.doing, at_s=now_s, save_s=self._save_s, log_bytes=self.log_bytes,
            limit_s=self.limit_s if self._is_watched else 0.0,
            step=self.step, phase=self.phase, seconds=seconds,
            progress_at=round(self._progress_at, 2), saves=self._saves, peak_bytes=self.peak_bytes,
        )  # fmt: skip
        with contextlib.suppress(OSError):
            os.pwrite(self._file, beat.to_bytes(), 0)


class StallWatchdog:
    """Ends this process, or only writes its stacks, if `feed` is not called for `limit_s` seconds or what it said last.

    It is a separate process: C code that holds the interpreter lock stops all threads, also the rank's own watchdog.
    `faulthandler.dump_traceback_later` would need no process, but its thread also counts the time of a suspended job
    and reads the stacks of running threads: a rank that continued after a suspension could crash there (SIGSEGV, Python
    3.11). A signal handler reads the stacks of a stopped thread.

    Args:
        look_s: The time between two calls of `feed`.
        ends: End the process by SIGABRT, on which `faulthandler` writes its stacks; SIGQUIT only writes them.
    """

    def __init__(self, limit_s: float, look_s: float, *, ends: bool) -> None:
        number = signal.SIGABRT if ends else signal.SIGQUIT
        argv = [sys.executable, "-m", __name__, str(os.getpid()), str(limit_s), str(look_s), str(int(number))]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0)

    def feed(self, limit_s: float) -> None:
        """Tell the watchdog that Python code runs in this process, and its limit from now on."""
        assert self._process.stdin
        try:
            self._process.stdin.write(f"{limit_s}\n".encode())
        except OSError:  # it was killed; the rank goes on without it
            return

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def watch(pid: int, limit_s: float, look_s: float, number: int) -> None:
    """Signal a process if standard input is silent for `limit_s` seconds, without time in which it was stopped.

    Each line of standard input is the limit from then on.
    """
    silent_s, looked_s = 0.0, time.monotonic()
    while silent_s < limit_s:
        is_fed, _, _ = select.select([0], [], [], look_s)
        if is_fed:
            fed = os.read(0, 4096)
            if not fed:
                return  # the rank has ended
            limit_s = float(fed.split()[-1])
        now_s = time.monotonic()
        if is_fed:
            silent_s = 0.0
        elif not stopped({0: pid}):
            silent_s += min(now_s - looked_s, 2 * look_s)  # this process may have been suspended too
        looked_s = now_s
    minutes, seconds = divmod(round(limit_s), 60)
    # The text of `faulthandler`, which the diagnosis of a run recognizes.
    os.write(2, f"Timeout ({minutes // 60}:{minutes % 60:02}:{seconds:02})!\n".encode())
    os.kill(pid, number)


if __name__ == "__main__":
    # Slurm sends these signals to all processes of a step.
    for stop in (*STOPS, signal.SIGQUIT):
        signal.signal(stop, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)
    rank, limit, look, number = sys.argv[1:]
    watch(int(rank), float(limit), float(look), int(number))
