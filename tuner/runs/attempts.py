"""Whether an ended run may restart automatically: only a limited number of times, and only if it made progress.

Attempts are counted and not timed, because a clock may jump. `launch` or Slurm does the restart.
"""

from __future__ import annotations

from tuner.runs import checkpoints
from tuner.runs.directory import RunDirectory


def refusal(run_dir: RunDirectory, num_restarts: int, limit: int, saved: int | None = None) -> str | None:
    """Return why a run must not be restarted, or None if it may be.

    Args:
        run_dir: The run; its attempt has just ended.
        saved: The step of the checkpoint that it has just written; None: find the newest valid checkpoint.

    Raises:
        RunDirectoryError: run.json cannot be read.
    """
    if often := too_often(num_restarts, limit):
        return often
    if not num_restarts:
        return None
    began = run_dir.read_run().resume_step or 0
    if saved is None:
        # Every byte of a checkpoint is read to find it valid: minutes that a job about to be killed may not have.
        newest, _ = checkpoints.newest_valid(run_dir.checkpoints)
        saved = newest.step if newest else 0
    return None if saved > began else f"its last attempt began at step {began} and saved no newer checkpoint"


def too_often(num_restarts: int, limit: int) -> str | None:
    """Return why a run with this many restarts must not be restarted, or None."""
    if num_restarts < limit:
        return None
    return f"it was restarted {num_restarts} times, and the limit is {limit}"
