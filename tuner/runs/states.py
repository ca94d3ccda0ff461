"""Whether a run is at work, has ended and how, or died; and when it last wrote something. It changes nothing."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Literal

from tuner.errors import RunDirectoryError
from tuner.runs import beats, lock
from tuner.runs.directory import RunDirectory
from tuner.runs.lock import HasEnded, Life

State = Literal["pending", "running", "done", "failed", "stopped", "died", "damaged"]
"""As in status.json. pending: its job of Slurm waits. died: the file says running, but the process is gone. damaged:
the file cannot be read."""


def state_of(run_dir: RunDirectory, has_ended: HasEnded = lambda _: False) -> tuple[State, str]:
    """Return the state of a run, and why it failed, stopped or died, or what is damaged."""
    try:
        status = run_dir.read_status()
        run_dir.read_run()
    except RunDirectoryError as error:
        return "damaged", error.what
    if status.state == "running":
        return _running(run_dir, has_ended)
    if status.diagnosis:
        return status.state, f"{status.diagnosis.cause}: {status.diagnosis.what}"
    return status.state, "" if status.state == "done" else next(iter((status.message or "").splitlines()), "")


def _running(run_dir: RunDirectory, has_ended: HasEnded) -> tuple[State, str]:
    """Return what a person is to know of a run whose status.json says running.

    Of an unseen holder it believes the file, and Slurm on this machine about its job, whatever the cluster: who writes
    in the directory asks `lock.in_use`, which believes neither.
    """
    try:
        holder = lock.holder(run_dir.path)
    except RunDirectoryError as error:
        return "running", error.what
    life = holder.life(run_dir.path, has_ended) if holder else Life.GONE
    if holder and life is Life.JOB_ENDED:
        return "died", f"its Slurm job {holder.job} has ended"
    if life is Life.UNSEEN:
        return "running", f"{holder}, as recorded; it cannot be checked from here"
    if life is Life.LIVES:
        return "running", ""
    return "died", "its process is gone: it was killed, or the machine went down"


def seen_at(run_dir: RunDirectory) -> float:
    """Return when a run last wrote something, in seconds since 1970; 0.0 if it has no file yet."""
    of_rank_0 = (run_dir.log_of(0), beats.path_of(run_dir, 0))
    return max(map(written_at, (run_dir.run_json, run_dir.status, run_dir.metrics, run_dir.recipe, *of_rank_0)))


def written_at(file: Path) -> float:
    """Return when a file was written last, in seconds since 1970; 0 if it is not there."""
    with contextlib.suppress(OSError):
        return file.stat().st_mtime
    return 0.0
