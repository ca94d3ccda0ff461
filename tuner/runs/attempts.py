"""Whether a run that ended may be started again by itself: not too often, and never in a loop without progress.

Attempts are counted, never timed: a clock may jump. Who starts it again is `launch`'s business, or Slurm's.
"""

from __future__ import annotations

from tuner.runs import checkpoints
from tuner.runs.directory import RunDirectory


def refusal(run: RunDirectory, num_restarts: int, limit: int, saved: int | None = None) -> str | None:
    """Return why a run must not be started again, or None where it may.

    Args:
        run: The run whose attempt has just ended.
        num_restarts: How often it was started again before.
        limit: How often it may be.
        saved: The step whose checkpoint it has just written; None: the newest valid one is looked for.

    Raises:
        RunDirectoryError: run.json is missing or not JSON.
    """
    if often := too_often(num_restarts, limit):
        return often
    if not num_restarts:
        return None
    began = int(run.read_json(run.run).get("resume_step") or 0)
    if saved is None:
        # Every byte of a checkpoint is read to find it valid: minutes that a job about to be killed may not have.
        newest, _ = checkpoints.newest_valid(run.checkpoints)
        saved = newest.step if newest else 0
    return None if saved > began else f"its last attempt began at step {began} and saved no newer checkpoint"


def too_often(num_restarts: int, limit: int) -> str | None:
    """Return why a run that was started again so often must not be once more, or None."""
    if num_restarts < limit:
        return None
    return f"it was restarted {num_restarts} times, and the limit is {limit}"
