"""Who has a run directory: one run at a time, named by its process, its host and its Slurm job.

The lock is RUN/lock. A run that was killed leaves it, and the next one on that host takes it over; nothing here ends
the run that holds it, or looks into it.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from tuner.errors import RunDirectoryError
from tuner.files import disk_errors

NAME = "lock"
_SAME_S = 0.5


@dataclass(frozen=True)
class Holder:
    """The process that starts and watches a run, or its rank 0 where nobody does.

    `started_s` counts from the boot: a jump of the clock does not change it. A job that Slurm starts again keeps its
    id and counts `restarts`; its id means nothing on another `cluster`.
    """

    pid: int
    started_s: float
    host: str
    job: str | None
    restarts: int
    cluster: str | None = None

    @classmethod
    def here(cls, environ: Mapping[str, str]) -> Holder:
        """Return this process; `environ` tells of the Slurm job around it."""
        restarts = environ.get("SLURM_RESTART_COUNT", "")
        return cls(
            os.getpid(),
            _started_s(os.getpid()) or 0.0,
            socket.gethostname(),
            environ.get("SLURM_JOB_ID"),
            int(restarts) if restarts.isdecimal() else 0,
            environ.get("SLURM_CLUSTER_NAME"),
        )

    @property
    def is_here(self) -> bool:
        """Whether it is a process of this host, of which alone it is known whether it lives."""
        return self.host == socket.gethostname()

    @property
    def lives(self) -> bool:
        """Whether there is such a process on this host, and not another that got its number."""
        started_s = _started_s(self.pid)
        return started_s is not None and abs(started_s - self.started_s) < _SAME_S

    def lets(self, other: Holder, has_ended: Callable[[str], bool] = lambda _: False) -> bool:
        """Return whether another may take over: this one has ended for certain, or is the other.

        Args:
            other: Who wants to.
            has_ended: Whether a job of this cluster is over, as Slurm knows it.
        """
        if self.host == other.host:
            return self.pid == other.pid or not self.lives
        if self.job is None or self.job == other.job:
            return self.job is not None and self.restarts < other.restarts
        return self.cluster is not None and self.cluster == other.cluster and has_ended(self.job)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" + (f" in Slurm job {self.job}" if self.job else "")


def _started_s(pid: int) -> float | None:
    """Return when a process started, in seconds since the boot; None where there is none, or one that has ended."""
    import psutil  # only where a lock is looked at: most commands need none

    with suppress(psutil.NoSuchProcess, TypeError, ValueError, OverflowError):
        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_ZOMBIE:
            return float(process.create_time() - psutil.boot_time())
    return None


def take(run: Path, environ: Mapping[str, str], has_ended: Callable[[str], bool] = lambda _: False) -> None:
    """Make this process the holder of a run directory; who holds it already, holds it on. `has_ended`: see `lets`.

    Raises:
        RunDirectoryError: another run holds it, or may do so on another host.
        DiskError: the lock cannot be written.
    """
    this = Holder.here(environ)
    with disk_errors(run), _opened(run / NAME, "a+") as file:
        holder = _read(file)
        if holder and not holder.lets(this, has_ended):
            raise _taken(run, holder, this)
        if holder and holder.pid != this.pid:
            _refuse_ranks_left(run)
        file.truncate(0)
        file.write(json.dumps(asdict(this)) + "\n")


def release(run: Path) -> None:
    """Let a run directory go, if this process holds it."""
    with suppress(OSError), _opened(run / NAME, "r") as file:
        holder, this = _read(file), Holder.here({})
        if holder and (holder.pid, holder.host) == (this.pid, this.host):
            (run / NAME).unlink()


def check(run: Path) -> None:
    """Check that nobody holds a run directory, changing nothing.

    Raises:
        RunDirectoryError: another run holds it, or may do so on another host.
    """
    this, found = Holder.here({}), holder(run)
    if found and not found.lets(this):
        raise _taken(run, found, this)


def holder(run: Path) -> Holder | None:
    """Return who holds a run directory, or None: nobody."""
    with suppress(OSError), (run / NAME).open(encoding="utf-8") as file:
        return _read(file)
    return None


def _refuse_ranks_left(run: Path) -> None:
    """Refuse a directory whose launcher was killed while its ranks still end: they may be in the middle of a save."""
    import psutil

    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if str(run) in words and any(word.endswith(".worker") for word in words):
            what = f"{run} is in use by process {process.pid}, which is left of a run whose launcher was killed"
            raise RunDirectoryError(what, where="--work-dir", fix="Wait until it has saved and ended.")


def _taken(run: Path, holder: Holder, this: Holder) -> RunDirectoryError:
    fix = "Wait for it, stop it, or choose another --work-dir."
    if holder.host != this.host:
        fix = f"Wait for it; if it is over for certain, remove {run / NAME}."
    return RunDirectoryError(f"{run} is in use by {holder}", where="--work-dir", fix=fix)


@contextmanager
def _opened(path: Path, mode: str) -> Iterator[IO[str]]:
    """Open the lock so that no other process looks at it until it is closed."""
    while True:
        with path.open(mode, encoding="utf-8") as file:
            with suppress(
                OSError
            ):  # a file system without flock: two that start in the same instant are not kept apart
                fcntl.flock(file, fcntl.LOCK_EX)
            try:
                is_there = os.path.samestat(os.fstat(file.fileno()), path.stat())
            except FileNotFoundError:
                is_there = False
            if is_there:  # and was not removed by who had it
                yield file
                return


def _read(file: IO[str]) -> Holder | None:
    """Return who is written in a lock, or None: nobody yet."""
    file.seek(0)
    try:
        return Holder(**json.loads(file.read()))
    except (ValueError, TypeError):
        return None
