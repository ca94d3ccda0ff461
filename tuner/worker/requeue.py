"""A stopped run of Slurm puts its own job back into the queue: once, and only where it was asked to and may.

Slurm does that itself for what it kills, but not for a job that ends in time after a signal.
"""

from __future__ import annotations

from collections.abc import Callable

from tuner.errors import TunerError
from tuner.machine import slurm
from tuner.machine.slurm import Job
from tuner.runs import attempts
from tuner.runs.directory import RunDirectory


def requeue(run: RunDirectory, job: Job, saved: int | None, say: Callable[[str], None]) -> None:
    """Requeue the job of this run, and say so before Slurm ends this process for it; or say why not.

    Args:
        saved: The step whose checkpoint was just written; None where nothing was.
    """
    try:
        refusal = attempts.refusal(run, job.num_restarts, job.max_requeues, saved) or slurm.not_running(job.id)
        if not refusal:
            say(f"Job {job.id} goes back into the queue: restart {job.num_restarts + 1} of at most {job.max_requeues}.")
            slurm.requeue(job.id)
    except TunerError as error:
        refusal = error.what
    if refusal:
        say(f"Job {job.id} is not requeued: {refusal}.")
