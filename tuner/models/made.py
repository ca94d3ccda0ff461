"""Folders of models that are made here: whole or not there at all, and made by one process of a node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

from tuner.files import disk_errors, make_folder, scratch_folder


def made_once(folder: Path, write: Callable[[Path], None], fix: str) -> Path:
    """Return a folder, which `write` fills if it is missing; other processes wait meanwhile.

    Args:
        folder: Its name holds a hash of what it is made of.
        write: Called with an empty folder, which gets the final name afterwards.
        fix: What to do about a disk that is full.

    Raises:
        DiskError: it cannot be written.
    """
    with disk_errors(folder, fix):
        if folder.is_dir():
            return folder
        make_folder(folder.parent)
        with WeakFileLock(folder.with_name(f".{folder.name}.lock")):
            if folder.is_dir():
                return folder
            with scratch_folder(folder.parent, f".{folder.name}.making-") as scratch:
                draft = scratch / folder.name
                draft.mkdir()
                write(draft)
                try:
                    draft.rename(folder)
                except OSError:  # another node, which no lock of this one's keeps out, was faster
                    if not folder.is_dir():
                        raise
    return folder
