"""Which cores a rank is bound to, on described machines and on this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tuner.worker import process


def _machine(folder: Path, places: dict[int, tuple[int, int]]) -> Path:
    """Describe logical CPUs as Linux does: number -> (NUMA node, physical core)."""
    for cpu, (node, core) in places.items():
        (folder / f"cpu{cpu}" / f"node{node}").mkdir(parents=True)
        (folder / f"cpu{cpu}" / "topology").mkdir()
        (folder / f"cpu{cpu}" / "topology" / "core_id").write_text(f"{core}\n")
    return folder


def test_ranks_get_disjoint_shares_of_one_numa_node_with_both_threads_of_a_core(tmp_path: Path) -> None:
    # Two nodes of two cores with two threads each, numbered as on most servers.
    places = {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1), 4: (0, 0), 5: (0, 1), 6: (1, 0), 7: (1, 1)}
    cpus = _machine(tmp_path, places)

    assert [process.share_of_cores(set(places), rank, 4, cpus) for rank in range(4)] == [{0, 4}, {1, 5}, {2, 6}, {3, 7}]
    assert [process.share_of_cores(set(places), rank, 2, cpus) for rank in range(2)] == [{0, 1, 4, 5}, {2, 3, 6, 7}]


def test_every_rank_has_a_core_where_they_are_few_or_not_described(tmp_path: Path) -> None:
    assert [process.share_of_cores({3, 5}, rank, 3, tmp_path) for rank in range(3)] == [{3}, {3}, {5}]


def test_all_threads_of_a_bound_process_keep_to_its_share() -> None:
    code = (
        "import os, threading, time; from tuner.worker import process;"
        "threading.Thread(target=time.sleep, args=(2,), daemon=True).start();"
        "process.bind_cores(1, 2);"
        "print([sorted(os.sched_getaffinity(int(one))) for one in os.listdir('/proc/self/task')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    share = sorted(process.share_of_cores(os.sched_getaffinity(0), 1, 2))
    assert done.stdout.strip() == str([share, share])
