"""The files of each rank in a checkpoint: a rank writes into a folder of its own, and rank 0 puts all together.

unfinished/
    checkpoint-STEP               what rank 0 writes; the files of the others are moved into it
    rank-N/checkpoint-STEP        what rank N writes
    rank-N/checkpoint-STEP.json   its files with their sizes and hashes, once they are on the disk

A shared folder may show the files of another machine late or not at all (object stores, caches of NFS). So rank 0 waits
until it sees every file as its rank wrote it. There are no collectives here: the ranks train on meanwhile.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from tuner.errors import DiskError, RunDirectoryError
from tuner.files import flush, load_json, read_text, write_json, xxh3_128
from tuner.progress import POLL_S
from tuner.runs.records import ManifestFile, RankFiles

_NUM_THREADS = 8
_PAUSE_S = 2.0
_REPORT = ".json"
_FIX = "Every node must see the files of the others: use a folder of a shared file system."

Arg = TypeVar("Arg")
Result = TypeVar("Result")


def home_of(unfinished: Path, rank: int) -> Path:
    """Return the folder in which a rank makes its folder checkpoint-STEP."""
    return unfinished / f"rank-{rank}" if rank else unfinished


def declare(unfinished: Path, name: str, rank: int, tick: Callable[[int], None] = lambda _: None) -> None:
    """Bring the files of a rank onto the disk, and then their sizes and hashes, which rank 0 waits for."""
    home = home_of(unfinished, rank)
    written = RankFiles(host=socket.gethostname(), files=flushed(home / name, tick))
    home.mkdir(parents=True, exist_ok=True)  # a rank of stage 0 may have written nothing
    write_json(home / f"{name}{_REPORT}", written.to_json())


def flushed(folder: Path, tick: Callable[[int], None] = lambda _: None) -> dict[str, ManifestFile]:
    """Bring everything in a folder onto the disk; return the size and the hash of each file by its path in it.

    Args:
        tick: Called with the bytes of each file that is there.
    """
    paths = sorted(folder.rglob("*"))
    files = [path for path in paths if path.is_file()]
    with in_threads(_flushed_file, files) as entries:
        by_path = {}
        for path, entry in zip(files, entries, strict=True):
            by_path[str(path.relative_to(folder))] = entry
            tick(entry.bytes)
    for path in paths:
        if path.is_dir():
            flush(path)
    if folder.is_dir():
        flush(folder)
    return by_path


def _flushed_file(path: Path) -> ManifestFile:
    flush(path)
    return ManifestFile(bytes=path.stat().st_size, xxh3_128=xxh3_128(path))


def gather(
    unfinished: Path, name: str, num_ranks: int, waits_for: Callable[[str], bool] = lambda _: True
) -> dict[str, ManifestFile]:
    """Move the files of ranks 1 and later into the checkpoint; return their sizes and hashes.

    Args:
        waits_for: Takes what is not seen here as its rank wrote it; returns whether to wait on. Asked again and again.

    Raises:
        DiskError: it does not wait on. The message names the rank, its node and the file.
        FileNotFoundError: the checkpoint was removed meanwhile.
    """
    gathered: dict[str, ManifestFile] = {}
    for rank in range(1, num_ranks):
        began_s = time.monotonic()
        while problem := _moved(home_of(unfinished, rank), unfinished / name, rank, gathered):
            if not (unfinished / name).is_dir():
                raise FileNotFoundError(unfinished / name)
            if not waits_for(problem):
                raise DiskError(f"{name} is not whole: {problem}", where=unfinished.parent, fix=_FIX)
            # Not at once: a look may read gigabytes.
            time.sleep(max(POLL_S, min(time.monotonic() - began_s, _PAUSE_S)))
    for folder in {(unfinished / name / path).parent for path in gathered}:
        flush(folder)
    return gathered


def _moved(home: Path, target: Path, rank: int, gathered: dict[str, ManifestFile]) -> str | None:
    """Move the files of one rank if all of them are seen, and add them to `gathered`; else return what is missing."""
    report = home / f"{target.name}{_REPORT}"
    try:
        declared = RankFiles.of(load_json(read_text(report)), report)
    except (OSError, ValueError, RunDirectoryError):  # not there, or shown in part
        return f"what rank {rank} has written is not seen here"
    source = home / target.name
    for path, file in declared.files.items():
        try:
            num_bytes = (source / path).stat().st_size
        except OSError:
            return f"{path} of rank {rank} on {declared.host} is not seen here"
        if num_bytes != file.bytes:
            return f"{path} of rank {rank} on {declared.host} has {num_bytes} bytes here, and {file.bytes} there"
    with in_threads(lambda path: xxh3_128(source / path), declared.files) as digests:
        for (path, file), digest in zip(declared.files.items(), digests, strict=True):
            if digest != file.xxh3_128:
                return f"{path} of rank {rank} on {declared.host} has another content here than there"
    if twice := [path for path in declared.files if (target / path).exists()]:
        problem = f"{twice[0]} was written by rank {rank} and by an earlier rank too"
        raise DiskError(problem, where=target, fix="Each rank needs names of its own: remove use_node_local_storage.")
    for path in declared.files:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).rename(target / path)
    gathered |= declared.files
    return None


@contextmanager
def in_threads(work: Callable[[Arg], Result], on: Iterable[Arg]) -> Iterator[Iterator[Result]]:
    """Give the results of `work` in the order of its arguments, computed by some threads; those at work are awaited."""
    from concurrent.futures import ThreadPoolExecutor  # it loads logging, and a dry run hashes nothing

    pool = ThreadPoolExecutor(_NUM_THREADS)
    try:
        yield pool.map(work, on)
    finally:
        pool.shutdown(cancel_futures=True)
