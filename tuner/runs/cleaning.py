"""What failed and killed runs left that nobody can use: checkpoints that were never finished, and swapped files.

A run whose process lives, or may live on another machine, has none: `found` passes it over, and `removed` holds the
lock of its directory meanwhile, so that no run begins in it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

from tuner.errors import RunDirectoryError
from tuner.files import JsonObject, disk_errors
from tuner.runs import checkpoints, lock, swapped
from tuner.runs.directory import RunDirectory
from tuner.runs.listing import HasEnded, Listed

Kind = Literal["checkpoint", "swapped"]
"""checkpoint: what a save left that never finished. swapped: DeepSpeed's folder on a disk that a run swapped to."""
_MAY_GO_ON = ("pending", "running")


@dataclass(frozen=True)
class Leftover:
    """A file or folder that nobody can use.

    Args:
        run: The directory of the run that left it.
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


def found(runs: Iterable[Listed], has_ended: HasEnded = lambda _: False) -> list[Leftover]:
    """Return what runs left; those at work left nothing. Nothing is changed."""
    return [
        leftover
        for run in runs
        if run.state not in _MAY_GO_ON and _is_free(Path(run.path), has_ended)
        for leftover in _left_by(RunDirectory(Path(run.path)))
    ]


def removed(
    leftovers: Sequence[Leftover],
    environ: Mapping[str, str],
    has_ended: HasEnded = lambda _: False,
    tell: Callable[[str], object] = lambda _: None,
) -> Iterator[Leftover]:
    """Remove what `found` returned, and yield what was there to be removed.

    Args:
        environ: Names the Slurm job around this process.
        tell: Gets a line about each run that is passed over, because it has begun again.

    Raises:
        DiskError: something cannot be removed.
    """
    for run, of_run in groupby(leftovers, lambda leftover: leftover.run):
        try:
            lock.take(run, environ, has_ended)
        except RunDirectoryError as error:
            tell(error.what)
            continue
        try:
            for leftover in of_run:
                with disk_errors(leftover.path):
                    was_there = _remove(leftover)
                if was_there:
                    yield leftover
        finally:
            lock.release(run)


def _is_free(run: Path, has_ended: HasEnded) -> bool:
    holder = lock.holder(run)
    return holder is None or holder.lets(run, lock.Holder.here({}), has_ended)


def _left_by(run_dir: RunDirectory) -> Iterator[Leftover]:
    for path in checkpoints.never_finished(run_dir.checkpoints):
        yield Leftover(run_dir.path, path, "checkpoint", _size(path))
    folders = (*sorted(run_dir.attempts.glob("[0-9]*")), run_dir.path)
    records = [record for folder in folders if (record := RunDirectory(folder).run_or_none)]
    swaps_of = {record.launch_id: record.swaps_to for record in records}  # a restart is of the same launch
    for launch_id, swaps_to in swaps_of.items():
        for folder in swapped.left(swaps_to, launch_id):
            yield Leftover(run_dir.path, folder, "swapped", _size(folder), launch_id)


def _size(path: Path) -> int:
    num_bytes = 0
    for file in (path, *path.rglob("*")):
        with suppress(OSError):  # somebody else removes it
            num_bytes += 0 if file.is_dir() else file.lstat().st_size
    return num_bytes


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
