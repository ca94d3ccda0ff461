"""What DeepSpeed leaves on the disks that a run swaps to: removed when its ranks have ended, and nobody else's files.

DeepSpeed makes `zero_stage_3` in the folder that the config names, and never removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from tuner.errors import MachineError
from tuner.launch.run import ResolvedRun
from tuner.zero import needs

_FOLDER = "zero_stage_3"
_OURS = "made-by-tuner"
"""Beside what is swapped, so that a later run knows what a killed one has left."""


@contextlib.contextmanager
def removed_afterwards(run: ResolvedRun) -> Iterator[None]:
    """Remove what is swapped at the end, what a killed run has left there too; leave a folder that was there before.

    Raises:
        MachineError: another run swaps there now: DeepSpeed's files have the same names, whoever runs.
    """
    with contextlib.ExitStack() as marks:
        ours = [folder for folder in _folders(run) if _claim(folder, marks)]
        try:
            yield
        finally:
            for folder in ours:
                shutil.rmtree(folder, ignore_errors=True)


def _folders(run: ResolvedRun) -> list[Path]:
    return sorted({swap.path / _FOLDER for swap in needs.swaps(run.final.config)})


def _claim(folder: Path, marks: contextlib.ExitStack) -> bool:
    """Return whether a folder is this program's; mark it, and hold the mark locked until `marks` is closed."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / _OURS).is_file():
        print(f"{folder} already existed, so it is kept when the run ends.", file=sys.stderr)
        return False
    folder.mkdir(parents=True, exist_ok=True)
    mark = marks.enter_context((folder / _OURS).open("w"))
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        fix = "Wait until it ends, or use another nvme_path."
        raise MachineError("another run is swapping to this folder", where=folder, fix=fix) from error
    return True
