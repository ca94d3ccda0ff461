"""What kind of disk a folder is on, and how fast it takes what is written around the cache."""

from __future__ import annotations

import os
import time
from pathlib import Path

_NETWORK = (
    *("nfs", "lustre", "gpfs", "cifs", "smb", "ceph", "beegfs", "afs", "9p", "glusterfs", "wekafs", "pvfs", "fuse"),
)
"""Beginnings of file systems' names that are other machines', as a rule."""
_MEMORY = ("tmpfs", "ramfs")
_PIECE_BYTES = 16 * 1024**2
_LEAST_PIECES, _MOST_S = 2, 0.5


def file_system(path: Path) -> str:
    """Return the name of the file system that a path is on, such as 'ext4'; '' where nothing is known."""
    import psutil  # what swaps to no disk, and finds no lock, does without

    real_path = path.resolve()
    mounted = {Path(partition.mountpoint): partition.fstype for partition in psutil.disk_partitions(all=True)}
    return next((mounted[folder] for folder in (real_path, *real_path.parents) if folder in mounted), "")


def is_network(path: Path) -> bool:
    """Return whether a path is on another machine's disk."""
    return file_system(path).startswith(_NETWORK)


def is_memory(path: Path) -> bool:
    """Return whether what is written to a path stays in memory."""
    return file_system(path) in _MEMORY


def write_bytes_per_s(folder: Path) -> float:
    """Return how fast a folder's disk takes large writes around the cache, measured for half a second.

    Raises:
        OSError: the folder takes no file, or none around the cache.
    """
    import mmap  # with tempfile, for the few runs that swap to a disk
    import tempfile

    with tempfile.NamedTemporaryFile(dir=folder) as file, mmap.mmap(-1, _PIECE_BYTES) as piece:  # its pages are aligned
        piece.write(os.urandom(_PIECE_BYTES // 16) * 16)
        target = os.open(file.name, os.O_WRONLY | os.O_DIRECT)
        try:
            began, written = time.perf_counter(), 0
            while written < _LEAST_PIECES * _PIECE_BYTES or time.perf_counter() - began < _MOST_S:
                written += os.pwrite(target, piece, written % (8 * _PIECE_BYTES))
            return written / (time.perf_counter() - began)
        finally:
            os.close(target)
