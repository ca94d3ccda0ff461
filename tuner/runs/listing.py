"""The runs below a work directory: the state of each, its last step, and whether it can be resumed.

It changes nothing. Checkpoints are judged by the sizes of their files, which is enough for a list.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from tuner.errors import RunDirectoryError, did_you_mean
from tuner.files import JsonObject, read_text
from tuner.runs import checkpoints, ledger, metrics, states
from tuner.runs.directory import RunDirectory
from tuner.runs.ledger import Ledger
from tuner.runs.lock import HasEnded
from tuner.runs.records import SlowRank
from tuner.runs.states import State

Queued = Callable[[], Mapping[str, str] | None]
"""Returns the state and the reason of each job in Slurm's queue, such as "PENDING Priority", by its number; None: Slurm
cannot be asked from here."""
_FILES = ("recipe.py", "deepspeed.json", "run.json", "status.json")
_MAX_DEPTH = 4
_WAITS = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT")
_BEGINS = ("CONFIGURING", "RUNNING", "SUSPENDED")
"""States of a job of Slurm; in the others it ends."""


@dataclass(frozen=True)
class Listed:
    """One run.

    Args:
        name: Its folder, as seen from the folder that was listed.
        why: Why it failed, stopped or died, or what is damaged, in one line.
        resumable_step: The step of its newest whole checkpoint.
        tokens_per_second: Of all ranks together, in the steps since the logged line before the last one.
        seen: When it last wrote something, in seconds since 1970.
        verdict: For a finished run: its loss before and after, and the outcome, in one line.
        slow_ranks: The ranks that the others waited for at the last comparison: the keys of `runs.records.SlowRank`.
    """

    path: str
    name: str
    state: State
    why: str
    step: int | None
    loss: float | None
    tokens_per_second: float | None
    resumable_step: int | None
    seen: float
    verdict: str | None = None
    slow_ranks: tuple[SlowRank, ...] = ()

    @cached_property
    def ledger(self) -> Ledger:
        """What the time of all attempts went into: read when it is first asked for."""
        path = Path(self.path)
        if not looks_like_a_run(path):  # its job waits, or is starting
            return Ledger(())
        return ledger.read_ledger(RunDirectory(path), died=self.why if self.state == "died" else None)

    def to_json(self) -> JsonObject:
        slow_ranks = [rank.to_json() for rank in self.slow_ranks]
        return {**asdict(self), "slow_ranks": slow_ranks, "ledger": self.ledger.to_json()}


def below(folder: Path, queued: Queued = lambda: None, has_ended: HasEnded = lambda _: False) -> list[Listed]:
    """Return the runs below a folder (or in it), the one that wrote last at the end.

    A job of `tuner submit` that waits is one of them, also before its first start; Slurm is asked only if there is one
    that may wait.

    Args:
        queued, has_ended: What `machine.slurm` answers, for a list that people read. Without them no job is pending,
            and a run of a job on another node is running until it is quiet for too long.
    """
    folder = folder.absolute()  # '.' may be a run, and has no name
    runs, jobs = list[Listed](), dict[str, str]()
    for path in _find(folder):
        name = str(path.relative_to(folder)) if path != folder else path.name
        if not looks_like_a_run(path):
            seen = states.written_at(RunDirectory(path).script)
            run = Listed(
                path=str(path),
                name=name,
                state="pending",
                why="",
                step=None,
                loss=None,
                tokens_per_second=None,
                resumable_step=None,
                seen=seen,
            )
        else:
            run = look(path, name, has_ended)
        runs.append(run)
        if run.state not in ("running", "done") and (job := _job_of(path)):
            jobs[run.path] = job
    in_queue = queued() if jobs else {}
    begun = {str(parent) for run in runs for parent in Path(run.path).parents}
    for place, run in enumerate(runs):
        job = jobs.get(run.path)
        if job is None:
            continue
        # A task of an array has a run below the folder of the array; others may wait.
        is_new = run.state == "pending" and run.path not in begun
        if in_queue is None:
            if is_new:
                runs[place] = replace(run, why=f"job {job} was submitted; Slurm cannot be asked from here")
            continue
        state, _, reason = in_queue.get(job, "").partition(" ")
        if state in _WAITS:
            runs[place] = replace(run, state="pending", why=f"job {job} waits in the queue: {reason}")
        elif state in _BEGINS and is_new:
            runs[place] = replace(run, state="running", why=f"job {job} is starting")
    # A job that has ended without a run was cancelled, or is an array, whose runs are in folders of their own.
    return sorted((run for run in runs if run.state != "pending" or run.why), key=lambda run: run.seen)


def _job_of(path: Path) -> str | None:
    """Return the number of the job that `tuner submit` started for a run."""
    with contextlib.suppress(OSError):
        return read_text(RunDirectory(path).job).strip()
    return None


def look(path: Path, name: str, has_ended: HasEnded = lambda _: False) -> Listed:
    """Return the state of one run directory; a damaged one gets the state "damaged" and raises no error."""
    run_dir = RunDirectory(path)
    last, status = metrics.latest(run_dir), run_dir.status_or_none
    state, why = states.state_of(run_dir, has_ended)
    pace = run_dir.pace_or_none
    final_step = status.step if status else None  # a run that is done says it; of another the last logged step is known
    return Listed(
        path=str(path),
        name=name,
        state=state,
        why=why,
        step=last.get("step") if final_step is None else final_step,
        loss=_number(last.get("loss")),
        tokens_per_second=_number(last.get("tokens_per_second")),
        resumable_step=_resumable_step(run_dir),
        seen=states.seen_at(run_dir),
        verdict=status.verdict.brief if status and status.verdict and state == "done" else None,
        slow_ranks=tuple(rank for rank in pace.slow if rank.until_step is None) if pace else (),
    )


def looks_like_a_run(folder: Path) -> bool:
    """Return whether a folder is a run directory, or the remains of one."""
    return sum(os.path.isfile(folder / name) for name in _FILES) >= 2  # noqa: PTH113 (a name too long is no file)


def require_run(name: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a run directory, or of the remains of one.

    Raises:
        RunDirectoryError: it is not a run directory.
    """
    path = Path(name).absolute()
    if not looks_like_a_run(path):
        raise no_run(name)
    return path


def no_run(
    name: str | os.PathLike[str], where: str = "RUN", fix: str = "Name a run's folder; tuner runs lists them."
) -> RunDirectoryError:
    """Return the error for a name that should be a run's and is not.

    Args:
        where: The argument or flag with the name.
        fix: What to do if no folder beside it has a similar name.
    """
    path, problem = Path(name), "is not a run directory: it has no run.json and recipe.py"
    if not os.path.exists(path):  # noqa: PTH110 (a name too long is nowhere, and no error)
        problem = "does not exist"
        with contextlib.suppress(OSError, ValueError):  # a folder that may not be read, or a NUL in its name
            fix = did_you_mean(path.name, {entry.name for entry in path.parent.iterdir()} - {path.name}) or fix
    elif not path.is_dir():
        problem = "is a file"
    return RunDirectoryError(f"{str(name)!r} {problem}", where=where, fix=fix)


def _find(folder: Path, depth: int = 0) -> Iterator[Path]:
    if looks_like_a_run(folder):
        yield folder
        return
    if RunDirectory(folder).script.is_file() and RunDirectory(folder).job.is_file():
        yield folder
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir()) if depth < _MAX_DEPTH else ():
            if path.is_dir() and not path.is_symlink():
                yield from _find(path, depth + 1)


def _resumable_step(run_dir: RunDirectory) -> int | None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a folder may be removed while it is looked at
        newest, _ = checkpoints.newest_valid(run_dir.checkpoints, hashes=False)
        return newest.step if newest else None
    return None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
