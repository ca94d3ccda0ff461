"""Whether an ended run may restart automatically: as long as it gets further, and a limited number of times if not.

Attempts are counted and not timed, because a clock may jump. `launch` or Slurm does the restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from tuner.errors import DiskError, RunDirectoryError
from tuner.files import write_json
from tuner.runs.directory import RunDirectory
from tuner.runs.records import EndedAttempt, Requeues

PREEMPTED, TIME_LIMIT = "preempted", "time-limit"
MAX_RESTARTS = 100
"""The most restarts, whatever their causes: a run that is preempted every half an hour ends after two days."""


def refusal(ended: Sequence[EndedAttempt], limit: int) -> str | None:
    """Return why a run must not be restarted, or None if it may be.

    A preemption is not the run's failure, and an attempt that saved a newer checkpoint has not failed: neither counts.

    Args:
        ended: Its attempts from the first one on; the last one has just ended.
        limit: The most restarts without a newer checkpoint.
    """
    if len(ended) > MAX_RESTARTS:
        return f"it was restarted {MAX_RESTARTS} times"
    futile: list[EndedAttempt] = []
    furthest: list[EndedAttempt] = []  # which saved the newest checkpoint: the step where it ended may come again
    for attempt in ended:
        if attempt.saved > attempt.began:
            futile, furthest = [], [attempt]
        elif attempt.cause != PREEMPTED:
            futile.append(attempt)
    if not futile or ended[-1] is not futile[-1]:
        return None
    last, saved = futile[-1], f"saved no checkpoint after step {futile[-1].saved}"
    earlier = [(attempt.cause, attempt.step) for attempt in (*furthest, *futile[:-1])]
    if last.cause is not None and (last.cause, last.step) in earlier:
        where = "before its first step" if last.step is None else f"in step {last.step}"
        return f"it ended twice {where} for the same cause ({last.cause}), and {saved}"
    if len(futile) > limit:
        return f"it was restarted {len(futile) - 1} times and {saved}, and the limit is {limit}"
    return None


# Slurm


def requeue_refusal(run_dir: RunDirectory, job: str, ended: EndedAttempt, limit: int, num_restarts: int) -> str | None:
    """Return why a job must not be put back into the queue, or None if it may be.

    Args:
        limit: The most requeues without a newer checkpoint; 0: none at all.
        num_restarts: How often Slurm has started the job again, also by itself.
    """
    if not limit or num_restarts >= MAX_RESTARTS:
        return f"it was restarted {num_restarts} times, and the limit is {min(limit, MAX_RESTARTS)}"
    return refusal([*_noted(run_dir, job).attempts, ended], limit)


def note_requeue(run_dir: RunDirectory, job: str, ended: EndedAttempt) -> None:
    """Write down that a job goes back into the queue; on a full disk it is not known at the next end."""
    noted = _noted(run_dir, job)
    _write(run_dir, noted.model_copy(update={"attempts": [*noted.attempts, ended]}))


def of_job(run_dir: RunDirectory, job: str) -> list[EndedAttempt]:
    """Return the attempts after which a job started srun again."""
    return _noted(run_dir, job).restarts


def note_restart(run_dir: RunDirectory, job: str, ended: EndedAttempt) -> None:
    """Write down that a job starts srun again, or would if it had enough nodes."""
    noted = _noted(run_dir, job)
    _write(run_dir, noted.model_copy(update={"restarts": [*noted.restarts, ended]}))


def _write(run_dir: RunDirectory, requeues: Requeues) -> None:
    with suppress(DiskError):
        write_json(run_dir.requeues, requeues.to_json())


def _noted(run_dir: RunDirectory, job: str) -> Requeues:
    """Return what was written down of this job. A file that cannot be read is that of no job."""
    if run_dir.requeues.is_file():
        with suppress(RunDirectoryError):
            requeues = Requeues.of(run_dir.read_json(run_dir.requeues), run_dir.requeues)
            if requeues.job == job:
                return requeues
    return Requeues(job=job)
