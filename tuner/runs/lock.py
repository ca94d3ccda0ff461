"""The lock of a run directory: one run at a time holds it, named by its process, its host and its Slurm job.

The lock is RUN/lock. A killed run leaves it behind, and the next run on that host takes it over. This module never ends
the run that holds it. Process ids mean nothing in another container of the host: there the kernel's lock of the folder
decides, which its holder keeps until it ends. filelock would give up both: it empties the file that names the holder,
and its lock ends where a task of Slurm becomes a rank (exec).
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import TextIO

from tuner.assets import WORKER
from tuner.errors import DiskError, Option, RunDirectoryError
from tuner.files import disk_errors, load_json, open_to_change, read_bytes, read_text
from tuner.runs.directory import JOB, LOCK
from tuner.runs.records import Versioned

NAME, _RANKS = LOCK, "ranks"
HasEnded = Callable[[str], bool]
"""Returns whether a job of Slurm is over for certain."""
_SAME_S = 0.5
QUIET_S = 3600.0
"""A run of another host that has written no sign of life for so long has likely ended: `hang_timeout` is half of it."""
_PAUSES_S = (0.0, 0.05, 0.2, 0.5)


class Life(StrEnum):
    """Whether a holder is at work, as far as this machine can tell."""

    LIVES = "lives"
    GONE = "gone"
    """Its process has ended."""
    JOB_ENDED = "job ended"
    """Its process cannot be seen from this machine, and Slurm says that its job is over."""
    UNSEEN = "unseen"


class Holder(Versioned):
    """The process that supervises a run, or its rank 0 if the run has no supervisor.

    `started_s` counts from the boot: a jump of the clock does not change it. A job that Slurm starts again keeps its
    id and counts `restarts`; its id means nothing on another `cluster`. `boot` and `pids` name the boot of the host
    and the namespace in which `pid` counts; `locked`: the holder keeps the kernel's lock of the folder.
    """

    pid: int
    started_s: float
    host: str
    job: str | None
    restarts: int
    cluster: str | None = None
    boot: str | None = None
    pids: int | None = None
    locked: bool = False

    @classmethod
    def here(cls, environ: Mapping[str, str]) -> Holder:
        """Return this process; `environ` names the Slurm job around it."""
        import socket  # 2 ms, and most commands ask for no lock

        restarts = environ.get("SLURM_RESTART_COUNT", "")
        return cls(
            pid=os.getpid(),
            started_s=_started_s(os.getpid()) or 0.0,
            host=socket.gethostname(),
            job=environ.get("SLURM_JOB_ID"),
            restarts=int(restarts) if restarts.isdecimal() else 0,
            cluster=environ.get("SLURM_CLUSTER_NAME"),
            boot=_boot(),
            pids=_pid_namespace(),
        )

    def is_process(self, other: Holder) -> bool:
        """Return whether both are one process."""
        return (self.pid, self.host, self.boot, self.pids) == (other.pid, other.host, other.boot, other.pids)

    def life(self, run_path: Path, has_ended: HasEnded = lambda _: False) -> Life:
        """Return whether this holder of a folder is at work; `has_ended` is asked only where its process is unseen."""
        lives = self._lives(run_path)
        if lives is None:
            return Life.JOB_ENDED if self.job is not None and has_ended(self.job) else Life.UNSEEN
        return Life.LIVES if lives else Life.GONE

    def _lives(self, run_path: Path) -> bool | None:
        this = Holder.here({})
        if self.host != this.host:
            return None
        if self.boot not in (None, this.boot):  # the host was started anew, or another has its name
            return self.locked and bool(_is_locked(run_path))
        if self.pids not in (None, this.pids):
            return _is_locked(run_path) if self.locked else None
        started_s = _started_s(self.pid)  # and not of another that got its number
        return started_s is not None and abs(started_s - self.started_s) < _SAME_S

    def lets(self, run_path: Path, other: Holder, has_ended: HasEnded = lambda _: False) -> bool:
        """Return whether another process may take a folder over: this one has certainly ended, or is the same.

        Args:
            other: The process that wants the folder.
            has_ended: Returns whether a job of this cluster is over, according to Slurm.
        """
        if self.is_process(other):
            return True
        if self.job is not None and self.job == other.job:  # Slurm says of both that they run
            life, is_earlier = self.life(run_path), self.restarts < other.restarts
            return life is Life.GONE or (life is Life.UNSEEN and is_earlier)
        is_of_cluster = self.cluster is not None and self.cluster == other.cluster
        life = self.life(run_path, has_ended if is_of_cluster else lambda _: False)
        return life in (Life.GONE, Life.JOB_ENDED)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" + (f" in Slurm job {self.job}" if self.job else "")


def _started_s(pid: int) -> float | None:
    """Return when a process started, in seconds since the boot; None if it does not exist or has ended."""
    import psutil  # only where a lock is looked at: most commands need none

    with suppress(psutil.NoSuchProcess, TypeError, ValueError, OverflowError):
        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_ZOMBIE:
            return float(process.create_time() - psutil.boot_time())
    return None


def _boot() -> str | None:
    with suppress(OSError):
        return read_text(Path("/proc/sys/kernel/random/boot_id")).strip()
    return None


def _pid_namespace() -> int | None:
    with suppress(OSError):
        return Path("/proc/self/ns/pid").stat().st_ino
    return None


_held: dict[str, int] = {}
"""Each folder that this process keeps locked in the kernel, with its descriptor."""


def _keep(run_path: Path) -> bool:
    """Keep the kernel's lock of a folder until this process ends, even if it becomes a rank (exec).

    Returns:
        Whether the lock is kept: some file systems have no such locks.
    """
    key = os.path.realpath(run_path)
    if key in _held and os.path.samestat(os.fstat(_held[key]), run_path.stat()):
        return True
    _let_go(key)
    folder = os.open(run_path, os.O_RDONLY | os.O_DIRECTORY)
    for pause_s in _PAUSES_S:  # another may be looking whether it is locked
        time.sleep(pause_s)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        except OSError:
            break
        os.set_inheritable(folder, True)
        _held[key] = folder
        return True
    os.close(folder)
    return False


def _let_go(key: str) -> None:
    if key in _held:
        os.close(_held.pop(key))


def _is_locked(run_path: Path) -> bool | None:
    """Return whether another process keeps the kernel's lock of a folder; None where the file system cannot tell."""
    try:
        folder = os.open(run_path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        fcntl.flock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(folder)
    return False


def in_use(
    run_path: Path,
    this: Holder,
    has_ended: HasEnded = lambda _: False,
    is_gone: Callable[[Holder], bool] = lambda _: False,
    *,
    heeds_queue: bool = False,
) -> RunDirectoryError | None:
    """Return why a run has not certainly ended; None: a process may write, remove or overwrite in its directory.

    It heeds more than the `Life` of the holder, which a list shows: ranks that a killed launcher left, and jobs that
    may start the run again; an unseen holder counts as alive. The lock and the processes here decide. status.json
    proves nothing: it is written before the last process ends, and a killed run leaves it as it was.

    Args:
        this: The process that asks.
        has_ended: See `Holder.lets`.
        is_gone: Returns whether those who worked with a holder say that it is gone.
        heeds_queue: A job of Slurm that may start the run again counts too. A resume by hand may come before it.
    """
    try:
        current = holder(run_path)
    except RunDirectoryError as error:
        return error
    if current and current.is_process(this):
        return None
    if current and not (current.lets(run_path, this, has_ended) or is_gone(current)):
        return _taken(run_path, current)
    if (current or (run_path / _RANKS).is_dir()) and (pid := _rank_left(run_path)):
        problem = f"{run_path} is in use by process {pid}, left over from a run whose launcher was killed"
        return RunDirectoryError(problem, where=Option("work_dir"), fix="Wait until it has saved and exited.")
    for job in _jobs(run_path, current) - {this.job} if heeds_queue else ():
        if not has_ended(job):
            problem = f"Slurm job {job}, which may start {run_path} again, has not certainly ended"
            return RunDirectoryError(problem, where=Option("work_dir"), fix="Wait until it ends, or cancel it.")
    return None


def _jobs(run_path: Path, current: Holder | None) -> set[str]:
    """Return the jobs of a run: that of its holder, and of `tuner submit`, also for a task of an array."""
    jobs = {current.job} if current and current.job else set[str]()
    for file in (run_path / JOB, run_path.parent / JOB):
        with suppress(OSError, ValueError):
            jobs.add(read_text(file).strip())
    return jobs


def take(
    run_path: Path,
    environ: Mapping[str, str],
    has_ended: HasEnded = lambda _: False,
    is_gone: Callable[[Holder], bool] = lambda _: False,
    *,
    heeds_queue: bool = False,
) -> None:
    """Make this process the holder of a run directory, unless it already is. The arguments are those of `in_use`.

    Raises:
        RunDirectoryError: as `in_use` has it.
        DiskError: the lock cannot be written.
    """
    this = Holder.here(environ)
    with disk_errors(run_path), _opened(run_path / NAME) as file:
        if error := in_use(run_path, this, has_ended, is_gone, heeds_queue=heeds_queue):
            raise error
        file.truncate(0)
        file.write(json.dumps(this.model_copy(update={"locked": _keep(run_path)}).to_json()) + "\n")


def release(run_path: Path) -> None:
    """Release a run directory, if this process holds it."""
    with suppress(OSError, DiskError, RunDirectoryError), _opened(run_path / NAME, makes=False):
        if (current := holder(run_path)) and current.is_process(Holder.here({})):
            (run_path / NAME).unlink()
            _let_go(os.path.realpath(run_path))


def release_of_job(run_path: Path, job: str) -> None:
    """Release a run directory that a task of this job of Slurm held: the caller knows that the task has ended."""
    with suppress(OSError, DiskError, RunDirectoryError), _opened(run_path / NAME, makes=False):
        if (current := holder(run_path)) and current.job == job:
            (run_path / NAME).unlink()


def holder(run_path: Path) -> Holder | None:
    """Return the holder of a run directory; None if it is free, or its lock names no holder.

    A lock that is damaged names none: its writer went down in the middle of it, and had begun nothing.

    Raises:
        RunDirectoryError: a later version of tuner has written the lock.
    """
    file = run_path / NAME
    try:
        content = load_json(read_bytes(file))
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict):
        return None
    try:
        return Holder.of(content, file)
    except RunDirectoryError:
        if Holder.is_later(content):
            raise
        return None


def _rank_left(run_path: Path) -> int | None:
    """Return a rank of a killed launcher that is still ending in a run: it may be in the middle of a save."""
    import psutil

    real_path = os.path.realpath(run_path)
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if process.pid != os.getpid() and WORKER in words and real_path in map(os.path.realpath, words):
            return int(process.pid)
    return None


def _taken(run_path: Path, holder: Holder) -> RunDirectoryError:
    fix = f"Wait until it ends, stop it, or choose another {Option('work_dir')}."
    if holder.life(run_path) is Life.UNSEEN:
        silent_s = quiet_s(run_path)
        fix = f"{fix} Its last sign of life was {silent_s / 60:.0f} min ago"
        # A live run whose lock somebody has removed shares its folder with the next one.
        fix += f": if it has certainly ended, remove {run_path / NAME}." if silent_s >= QUIET_S else "."
    return RunDirectoryError(f"{run_path} is in use by {holder}", where=Option("work_dir"), fix=fix)


def quiet_s(run_path: Path) -> float:
    """Return how long ago the last sign of life of a run was written, in seconds by this host's clock."""
    written = 0.0
    for file in (run_path / NAME, run_path, *(run_path / _RANKS).glob("*")):
        with suppress(OSError):
            written = max(written, file.stat().st_mtime)
    return max(time.time() - written, 0.0)


@contextmanager
def _opened(path: Path, *, makes: bool = True) -> Iterator[TextIO]:
    """Open the lock file; no other process reads it until it is closed."""
    while True:
        with open_to_change(path, makes=makes) as file:
            # A file system may have no flock: two that start in the same instant are not kept apart there.
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            try:
                is_there = os.path.samestat(os.fstat(file.fileno()), path.stat())
            except FileNotFoundError:
                is_there = False
            if is_there:  # and was not removed by its holder
                yield file
                return
