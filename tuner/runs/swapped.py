"""Remove the files that DeepSpeed leaves on the disks that a run swaps to, and no other files, when the run has ended.

DeepSpeed makes `zero_stage_3` in the folder that the config names, and never removes it. The supervisor on a node, or
each rank if the node has no supervisor, holds the kernel's lock of a mark file in it. The last process that leaves
removes the folder. A killed run holds no lock: the next run in the folder takes its files over, or `runs.cleaning`
removes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TextIO

from tuner.errors import DiskError, MachineError
from tuner.files import disk_errors, open_to_change

_FOLDER = "zero_stage_3"
_MARK = "made-by-tuner"
"""The mark file beside the swapped files; it holds the id of their launch."""
_WAIT_S = 2.0
"""Time for another process to finish looking at the mark, or removing its files."""
_PAUSE_S = 0.05


class Swapped:
    """The folders that this process removes when it ends, unless other processes of its run still use them."""

    def __init__(self) -> None:
        self._marks: dict[Path, TextIO] = {}

    def claim(self, paths: Iterable[str], launch_id: str) -> list[str]:
        """Claim the folders on disks that a run swaps to; return a line about each that is left as it is.

        Args:
            launch_id: The same for all processes of this run.

        Raises:
            MachineError: another run swaps there now: DeepSpeed's files have the same names, whoever runs.
        """
        notes = []
        for folder in (Path(path) / _FOLDER for path in paths):
            if folder.is_dir() and not (folder / _MARK).is_file() and any(folder.iterdir()):
                notes.append(f"{folder} already existed, so it is kept when the run ends.")
            else:
                self._marks[folder] = _marked(folder, launch_id)
        return notes

    def let_go(self) -> None:
        """Unlock the folders, and remove those that no other process of the run uses."""
        for folder, mark in self._marks.items():
            with contextlib.suppress(OSError), mark:
                fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(mark, folder / _MARK):
                    _remove(folder)
        self._marks.clear()


def left(paths: Iterable[str], launch_id: str) -> list[Path]:
    """Return the folders with files that a launch left on the disks that it swapped to, and that no process holds."""
    return [folder for folder in (Path(path) / _FOLDER for path in paths) if _with_free_mark(folder, launch_id)]


def remove_left(folder: Path, launch_id: str) -> bool:
    """Remove a folder that `left` returned; return whether it still was the launch's, and held by no process."""
    return _with_free_mark(folder, launch_id, _remove)


def _with_free_mark(folder: Path, launch_id: str, act: Callable[[Path], object] = lambda _: None) -> bool:
    """Act on a folder while no process can claim it, if its mark is a launch's that has ended; return whether it is."""
    if folder.is_symlink():
        return False
    try:
        mark = open_to_change(folder / _MARK, makes=False)
    except (OSError, DiskError):
        return False
    with mark:
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # a process holds it; or the file system has no locks, and nobody knows
            return False
        mark.seek(0)
        is_left = mark.read(len(launch_id) + 1) == launch_id and _is_at(mark, folder / _MARK)
        if is_left:
            act(folder)
        return is_left


@contextlib.contextmanager
def removed_afterwards(paths: Iterable[str], launch_id: str) -> Iterator[list[str]]:
    """Claim folders as `Swapped.claim` does, and let them go at the end."""
    swapped = Swapped()
    try:
        yield swapped.claim(paths, launch_id)
    finally:
        swapped.let_go()


def _marked(folder: Path, launch_id: str) -> TextIO:
    """Return the mark of a folder, which names the launch, locked together with its other processes."""
    deadline = time.monotonic() + _WAIT_S
    while True:
        # The last one of another run may just have removed it.
        with contextlib.suppress(FileNotFoundError), disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            mark = open_to_change(folder / _MARK)
            is_ours = False
            try:
                is_ours = _lock_mark(mark, launch_id) and _is_at(mark, folder / _MARK)
            finally:
                if not is_ours:
                    mark.close()
            if is_ours:
                return mark
        if time.monotonic() > deadline:
            fix = "Wait until it ends, or use another nvme_path."
            raise MachineError("another run is swapping to this folder", where=folder, fix=fix)
        time.sleep(_PAUSE_S)


def _lock_mark(mark: TextIO, launch_id: str) -> bool:
    """Lock a mark together with all processes of the launch; write the launch's id if it is free. Return success."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        mark.truncate(0)
        mark.write(launch_id)
        mark.flush()
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(mark, fcntl.LOCK_SH | fcntl.LOCK_NB)
        mark.seek(0)
        return mark.read(len(launch_id) + 1) == launch_id
    return False


def _is_at(mark: TextIO, path: Path) -> bool:
    """Return whether an open file still is the one at a path."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(mark.fileno()), path.stat())
    return False


def _remove(folder: Path) -> None:
    """Remove a folder, its mark last: what a rank still writes meanwhile is left to the next run with the mark."""
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name != _MARK:
            entry.unlink()
    if [entry.name for entry in folder.iterdir()] == [_MARK]:
        (folder / _MARK).unlink()
        folder.rmdir()
