"""The process of one rank: its output, the store that it serves, its launcher's end, and its CPU cores."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import re
import signal
import subprocess  # effect: what ends an mpirun after this rank
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import psutil

from tuner.errors import DiskError
from tuner.files import read_text
from tuner.machine.topology import STORE_FD, Rank
from tuner.runs import beats
from tuner.runs.beats import Phase
from tuner.runs.directory import RunDirectory

if TYPE_CHECKING:
    from torch.distributed import TCPStore
    from typing_extensions import Buffer

_CPUS = Path("/sys/devices/system/cpu")
_LONGEST_PAUSE_S, _MAX_NAMED = 120.0, 4


class _Careless(io.FileIO):
    """A file descriptor that ignores failed writes: a closed terminal or a full disk must not end a rank."""

    def write(self, data: Buffer) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def send_to(log: Path, *, is_drawn: bool = True) -> TextIO | None:
    """Append the output of this process and its children to `log`, also that of C++ libraries and crashes.

    Returns:
        The terminal if standard output was one and `is_drawn` on, for a progress bar; otherwise None.
    """
    terminal = _stream(os.dup(1)) if is_drawn and os.isatty(1) else None
    try:
        log.parent.mkdir(exist_ok=True)
        handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:  # the disk is too full for a log: the output goes where it went before
        pass
    else:
        for number in (1, 2):
            os.dup2(handle, number)
        if handle > 2:
            os.close(handle)
    sys.stdout, sys.stderr = _stream(1), _stream(2)
    faulthandler.enable()
    faulthandler.register(signal.SIGQUIT)  # a user can send it to see in the log what this rank does
    return terminal


def warn(run_dir: RunDirectory, text: str) -> None:
    """Print a warning of rank 0 and store it for the report; a full disk is ignored."""
    print(f"WARNING: {text}", flush=True)
    with contextlib.suppress(DiskError, OSError):
        run_dir.log_warning(text)


@contextlib.contextmanager
def late_ranks_named(run_dir: RunDirectory, rank: Rank, first_s: float = 30.0) -> Iterator[None]:
    """While rank 0 waits for all ranks to join, print which have not come, after `first_s` and with growing pauses.

    Where launchers of ours meet, they have done so. Under srun and mpirun only rank 0 can say it.
    """
    over = threading.Event()

    def look() -> None:
        began_s, pause_s = time.monotonic(), first_s
        while not over.wait(pause_s):
            waited_s = time.monotonic() - began_s
            print(f"waiting for {_late(run_dir, rank.world_size)} since {waited_s:.0f} s", flush=True)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    if rank.rank == 0 and rank.world_size > 1:
        threading.Thread(target=look, daemon=True, name="late-ranks").start()
    try:
        yield
    finally:
        over.set()


def _late(run_dir: RunDirectory, world_size: int) -> str:
    """Return the ranks that have not come to where all join, in words."""
    last_beats = beats.read_beats(run_dir)
    starting = [beat for beat in last_beats.values() if beat.phase == Phase.STARTUP]
    late = [f"rank {beat.rank} ({beat.host}, {beat.doing})" for beat in sorted(starting, key=lambda beat: beat.rank)]
    late += [f"rank {rank} (never seen)" for rank in range(world_size) if rank not in last_beats]
    if late:
        return some(late)
    # A firewall may let the launchers meet, and not their ranks.
    port = os.environ.get("MASTER_PORT")
    return f"ranks that have started and do not reach each other (port {port} of rank 0, or those of gloo or NCCL)"


def some(names: Iterable[str]) -> str:
    """Return the first names, and how many more there are."""
    first, num_more = (listed := list(names))[:_MAX_NAMED], len(listed) - _MAX_NAMED
    return ", ".join(first) + (f" and {num_more} more" if num_more > 0 else "")


def _stream(number: int) -> TextIO:
    raw = io.BufferedWriter(_Careless(number, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)


# The store


def serve_store() -> None:
    """Serve torch's store if the supervisor gave this rank the socket; the ranks of one machine meet there.

    The supervisor already listens on the socket, so no other process can take the port before the ranks start.
    """
    fd = os.environ.pop(STORE_FD, None)
    if fd is not None:
        _store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(fd))


@cache  # the store ends when the last reference to it is gone
def _store(address: str, port: int, fd: int) -> TCPStore:
    from torch.distributed import TCPStore  # heavy: the guard imports this module before torch

    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)


# The launcher

_MPIRUN = ("mpirun", "mpiexec", "orterun", "prterun")
"""What Open MPI's launcher is called."""
_END = 'sleep "$3"; [ "$(cat "/proc/$1/comm" 2>/dev/null)" = "$2" ] && kill -KILL "$1"'
"""Not SIGTERM: Open MPI 4.1.4 says that it aborts already, and crashes."""


def end_mpirun(after_s: float) -> str | None:
    """End the mpirun that has started this rank if it is still there so much later; return its name, or None.

    When a host was cut off it waits for what runs there, though the ranks here have ended (Open MPI 4.1).
    """
    parent = psutil.Process().parent()
    name = str(parent.name()) if parent else ""
    if parent is None or name not in _MPIRUN:
        return None
    none = subprocess.DEVNULL  # mpirun waits until nobody has this rank's streams any more
    subprocess.Popen(
        ["/bin/sh", "-c", _END, "sh", str(parent.pid), name, str(after_s)],
        stdin=none, stdout=none, stderr=none, start_new_session=True,
    )  # fmt: skip
    return name


# The cores


def bind_cores(local_rank: int, num_ranks: int) -> None:
    """Bind every thread of this process, and the threads and processes that it starts later, to this rank's cores."""
    cores = share_of_cores(os.sched_getaffinity(0), local_rank, num_ranks)
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread.name), cores)


def share_of_cores(cores: set[int], local_rank: int, num_ranks: int, cpus: Path = _CPUS) -> set[int]:
    """Return a rank's share of the cores: neighbours of one NUMA node as far as the numbers allow.

    Args:
        cores: The logical CPUs that the node's ranks may use. With fewer CPUs than ranks, several ranks share one.
        cpus: The folder in which Linux describes the CPUs.
    """
    ordered = sorted(cores, key=lambda cpu: _place(cpus / f"cpu{cpu}", cpu))
    first, last = (len(ordered) * rank // num_ranks for rank in (local_rank, local_rank + 1))
    return set(ordered[first : max(last, first + 1)])


def _place(folder: Path, cpu: int) -> tuple[int, int, int, int]:
    """Return what sorts a logical CPU: NUMA node, socket, physical core, and its own number."""
    nodes = [int(match[1]) for path in folder.glob("node*") if (match := re.fullmatch(r"node(\d+)", path.name))]
    socket, core = (_number(folder / "topology" / name) for name in ("physical_package_id", "core_id"))
    return min(nodes, default=0), socket, core, cpu


def _number(path: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(read_text(path))
    return 0
