"""Read the files that a failed run left behind, once, for its diagnosis."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from tuner.runs import beats, metrics
from tuner.runs.diagnose import Evidence
from tuner.runs.directory import RunDirectory
from tuner.runs.follow import tail


def gather(
    run: RunDirectory,
    *,
    child_code: int = 1,
    exits: Sequence[tuple[int, int]] | None = None,
    num_oom_kills: int = 0,
    stopped: Sequence[int] = (),
    overdue: Sequence[int] = (),
    overdue_s: float = 0.0,
) -> Evidence:
    """Read the reports and the ends of all logs of a run; a file that cannot be read is left out."""
    logs = {int(file.stem): tail(file) for file in run.ranks.glob("*.log") if file.stem.isdigit()}
    return Evidence(
        folder=run.path,
        reports=run.failures(),
        logs=logs,
        launcher="\n".join(map(tail, sorted(run.ranks.glob("launcher-*.log")))),
        child_code=child_code,
        exits=exits,
        num_oom_kills=num_oom_kills,
        last_step=_last_step(run),
        free_bytes=shutil.disk_usage(run.path).free if run.path.is_dir() else None,
        run=run.run_or_none,  # None on a full disk, or if it was removed: the logs remain
        counts={rank: beat.count for rank, beat in beats.read(run).items()},
        stopped=stopped,
        overdue=overdue,
        overdue_s=overdue_s,
    )


def _last_step(run: RunDirectory) -> int | None:
    """Return the last step that this attempt logged; lines of earlier attempts are in the same file."""
    try:
        if run.metrics.stat().st_mtime_ns < run.run.stat().st_mtime_ns:
            return None
    except OSError:
        return None
    return metrics.latest(run).get("step")
