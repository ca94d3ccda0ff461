"""`python -m tuner.worker.speed`: one of the ranks that measure how fast each computes, and how fast all reduce.

For `tuner doctor --nodes`, which sets the variables of `Rank` and those of the meeting, and `WAIT_S`. Rank 0 prints the
figures of all ranks, or the nodes that did not join, as its last line.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median
from typing import TYPE_CHECKING

from tuner.machine.topology import Rank
from tuner.progress import POLL_S
from tuner.worker.quiet import quiet_libraries

if TYPE_CHECKING:
    import torch

WAIT = "TUNER_DOCTOR_WAIT_S"
"""The variable that says how long ranks wait for others."""
_REPEATS = 5
_SIDE, _GPU_SIDE = 1024, 8192
"""Of the matrices: 2 and 1,100 GFLOP a product."""
_NUMBERS, _GPU_NUMBERS = 1 << 20, 1 << 26
"""What is reduced: 4 and 256 MiB."""


def main() -> None:
    """Measure, and print what rank 0 has gathered."""
    quiet_libraries()
    import torch  # heavy
    import torch.distributed as dist

    rank, wait_s, ranks_here = Rank.of(os.environ), float(os.environ[WAIT]), int(os.environ["LOCAL_WORLD_SIZE"])
    kind = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device(kind.type if kind else "cpu", rank.local_rank if kind else None)
    if kind:
        torch.accelerator.set_device_index(rank.local_rank)
    where, limit = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timedelta(seconds=wait_s)
    store = dist.TCPStore(*where, is_master=rank.rank == 0, wait_for_workers=False, timeout=limit)
    store.set(f"here-{rank.rank}", socket.gethostname())
    if rank.rank == 0 and (missing := _missing(store, rank.world_size, wait_s)):
        print("\n" + json.dumps({"missing_nodes": sorted({rank // ranks_here for rank in missing})}), flush=True)
        sys.exit(1)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, store=store, rank=rank.rank, world_size=rank.world_size, timeout=limit)
    node = rank.rank // ranks_here
    groups = [
        dist.new_group(range(first, first + ranks_here)) for first in range(0, rank.world_size, ranks_here)
    ]  # each rank makes all of them
    numbers = torch.ones(_GPU_NUMBERS if kind else _NUMBERS, device=device)
    own = {
        "rank": rank.rank,
        "node": node,
        "host": socket.gethostname(),
        "product_s": _product_s(device),
        "node_reduce_s": _timed(lambda: dist.all_reduce(numbers, group=groups[node]), device),
        "all_reduce_s": _timed(lambda: dist.all_reduce(numbers), device),
    }
    of_all: list[dict[str, object]] = [{}] * rank.world_size
    dist.all_gather_object(of_all, own)
    if rank.rank == 0:
        print("\n" + json.dumps({"ranks": of_all}), flush=True)
    dist.barrier()
    os._exit(0)  # gloo may abort in its destructors


def _missing(store: torch.distributed.TCPStore, num_ranks: int, wait_s: float) -> list[int]:
    """Return the ranks that have not joined in time."""
    deadline_s, missing = time.monotonic() + wait_s, list(range(num_ranks))
    while missing and time.monotonic() < deadline_s:
        missing = [rank for rank in missing if not store.check([f"here-{rank}"])]
        time.sleep(POLL_S if missing else 0)
    return missing


def _product_s(device: torch.device) -> float:
    import torch

    side, dtype = (_SIDE, torch.float32) if device.type == "cpu" else (_GPU_SIDE, torch.bfloat16)
    left, right = torch.ones(2, side, side, device=device, dtype=dtype)
    return _timed(lambda: left @ right, device)


def _timed(work: Callable[[], object], device: torch.device) -> float:
    """Return the median time of a piece of work, after one that warms up, in seconds."""
    import torch

    times = []
    for _ in range(_REPEATS + 1):
        began_s = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - began_s)
    return median(times[1:])


if __name__ == "__main__":
    main()
