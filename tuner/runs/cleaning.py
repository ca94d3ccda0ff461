"""What failed and killed runs left that nobody can use: checkpoints that were never finished, and swapped files.

A run that has not certainly ended (`lock.in_use`), and one of another user, is passed over. `removed` holds the lock of
a run's directory meanwhile, so that no run begins in it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

from tuner.errors import RunDirectoryError
from tuner.files import JsonObject, disk_errors, size_of
from tuner.runs import checkpoints, lock, swapped
from tuner.runs.directory import RunDirectory
from tuner.runs.lock import HasEnded, Holder

Kind = Literal["checkpoint", "swapped"]
"""checkpoint: what a save left that never finished. swapped: DeepSpeed's folder on a disk that a run swapped to."""


@dataclass(frozen=True)
class Leftover:
    """A file or folder that nobody can use.

    Args:
        num_bytes: Of all files in it.
        launch_id: The launch that swapped to it; empty for a checkpoint.
    """

    run: Path
    path: Path
    kind: Kind
    num_bytes: int
    launch_id: str = ""

    def to_json(self) -> JsonObject:
        return {"run": str(self.run), "path": str(self.path), "kind": self.kind, "bytes": self.num_bytes}


def found(
    runs: Iterable[Path],
    environ: Mapping[str, str],
    has_ended: HasEnded = lambda _: False,
    tell: Callable[[str], object] = lambda _: None,
) -> list[Leftover]:
    """Return what runs left. Nothing is changed; the other arguments are those of `removed`."""
    leftovers = []
    for run in runs:
        of_run = [*_left_by(RunDirectory(run))]
        if of_run and (why := why_not(run, Holder.here(environ), has_ended)):
            tell(why)
        else:
            leftovers += of_run
    return leftovers


def removed(
    leftovers: Sequence[Leftover],
    environ: Mapping[str, str],
    has_ended: HasEnded = lambda _: False,
    tell: Callable[[str], object] = lambda _: None,
) -> Iterator[Leftover]:
    """Remove what `found` returned, and yield what was there to be removed.

    Args:
        environ: Names the Slurm job around this process.
        tell: Gets a line about each run that is passed over.

    Raises:
        DiskError: something cannot be removed.
    """
    for run, of_run in groupby(leftovers, lambda leftover: leftover.run):
        if not run.is_dir():  # somebody has removed it
            continue
        try:
            lock.take(run, environ, has_ended, heeds_queue=True)
        except RunDirectoryError as error:
            tell(error.what)
            continue
        try:
            checkpoints.put_back(RunDirectory(run).checkpoints)
            for leftover in of_run:
                with disk_errors(leftover.path):
                    was_there = _remove(leftover)
                if was_there:
                    yield leftover
        finally:
            lock.release(run)


def why_not(run: Path, this: Holder, has_ended: HasEnded) -> str | None:
    """Return why a run's files must stay as they are: it may be at work, or be started again, or is another user's."""
    with suppress(FileNotFoundError):
        if run.stat().st_uid != os.geteuid():
            return f"{run} belongs to another user"
    if error := lock.in_use(run, this, has_ended, heeds_queue=True):
        return error.what
    record = RunDirectory(run).run_or_none
    if record is None:
        return f"{run} is no run, or its run.json is damaged"
    if record.num_nodes > 1 and lock.holder(run) and lock.quiet_s(run) < lock.QUIET_S:
        return f"ranks of {run} gave a sign of life within the hour, and may be at work on another machine"
    return None


def _left_by(run_dir: RunDirectory) -> Iterator[Leftover]:
    for path in checkpoints.never_finished(run_dir.checkpoints):
        yield Leftover(run_dir.path, path, "checkpoint", size_of(path))
    folders = (*run_dir.earlier_attempts().values(), run_dir.path)
    records = [record for folder in folders if (record := RunDirectory(folder).run_or_none)]
    swaps_of = {record.launch_id: record.swaps_to for record in records}  # a restart is of the same launch
    for launch_id, swaps_to in swaps_of.items():
        for folder in swapped.left(swaps_to, launch_id):
            yield Leftover(run_dir.path, folder, "swapped", size_of(folder), launch_id)


def _remove(leftover: Leftover) -> bool:
    """Remove a leftover if it still is one, and return whether it was."""
    path = leftover.path
    if leftover.kind == "swapped":
        return swapped.remove_left(path, leftover.launch_id)
    if path not in checkpoints.never_finished(RunDirectory(leftover.run).checkpoints):
        return False
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    return True
