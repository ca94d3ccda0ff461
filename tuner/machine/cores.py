"""The cores of a node shared out to its ranks, so that a rank's threads stay beside each other and their memory."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")


def bind(local_rank: int, num_ranks: int) -> None:
    """Bind every thread of this process, and all that it starts from now on, to its rank's share of the cores."""
    cores = share(os.sched_getaffinity(0), local_rank, num_ranks)
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread.name), cores)


def share(cores: set[int], local_rank: int, num_ranks: int, cpus: Path = _CPUS) -> set[int]:
    """Return a rank's share of the cores: neighbours of one NUMA node as far as the numbers allow.

    Args:
        cores: The logical CPUs that the node's ranks may use; where they are fewer than the ranks, ranks share one.
        cpus: Where Linux describes them.
    """
    ordered = sorted(cores, key=lambda cpu: _place(cpus / f"cpu{cpu}", cpu))
    first, last = (len(ordered) * rank // num_ranks for rank in (local_rank, local_rank + 1))
    return set(ordered[first : max(last, first + 1)])


def _place(folder: Path, cpu: int) -> tuple[int, int, int, int]:
    """Return what sorts a logical CPU: NUMA node, socket, physical core, and its own number."""
    nodes = [int(found[1]) for path in folder.glob("node*") if (found := re.fullmatch(r"node(\d+)", path.name))]
    socket, core = (_number(folder / "topology" / name) for name in ("physical_package_id", "core_id"))
    return min(nodes, default=0), socket, core, cpu


def _number(path: Path) -> int:
    with suppress(OSError, ValueError):
        return int(path.read_text(encoding="ascii"))
    return 0
