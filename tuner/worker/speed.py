"""How fast each rank computes and all reduce, compared with the others: a matrix product, and all-reduces.

`python -m tuner.worker.speed` is one of the ranks of `tuner doctor --nodes`, which sets the variables of `Rank` and
those of the meeting, and `WAIT_S`. Rank 0 prints the figures of all ranks, or the nodes that did not join, as its last
line. After a failure, the ranks of a restart measure the same before they load the model.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from statistics import median, median_low
from typing import TYPE_CHECKING, NamedTuple

from tuner.machine.topology import Rank
from tuner.progress import POLL_S
from tuner.worker.quiet import quiet_libraries

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

WAIT = "TUNER_DOCTOR_WAIT_S"
"""The variable that says how long ranks wait for others."""
_REPEATS = 5
_SIDE, _GPU_SIDE = 1024, 8192
"""Of the matrices: 2 and 1,100 GFLOP a product."""
_NUMBERS, _GPU_NUMBERS = 1 << 20, 1 << 26
"""What is reduced: 4 and 256 MiB."""
SLOW = 1.3
"""A rank or node that takes this many times the median is named."""


PARTS = ("a matrix product", "an all-reduce within this node", "an all-reduce over all nodes")
"""What is measured. Each rests on the one before, so of several that are wrong the first is named."""


class Figures(NamedTuple):
    """What one rank measured, in seconds: a matrix product, and all-reduces within its node and over all."""

    rank: int
    node: int
    host: str
    product_s: float
    node_reduce_s: float
    all_reduce_s: float
    wrong: str = ""
    """What has given wrong numbers, one of `PARTS`; empty: nothing."""


class Slow(NamedTuple):
    """What is slow or wrong on a host, in words."""

    host: str
    text: str
    fix: str
    is_wrong: bool = False


def main() -> None:
    quiet_libraries()
    import torch  # heavy
    import torch.distributed as dist

    rank, wait_s = Rank.of(os.environ), float(os.environ[WAIT])
    kind = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device(kind.type if kind else "cpu", rank.local_rank if kind else None)
    if kind:
        torch.accelerator.set_device_index(rank.local_rank)
    where, limit = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timedelta(seconds=wait_s)
    store = dist.TCPStore(*where, is_master=rank.rank == 0, wait_for_workers=False, timeout=limit)
    store.set(f"here-{rank.rank}", socket.gethostname())
    if rank.rank == 0 and (missing := _missing(store, rank.world_size, wait_s)):
        print("\n" + json.dumps({"missing": missing}), flush=True)
        sys.exit(1)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, store=store, rank=rank.rank, world_size=rank.world_size, timeout=limit)
    of_all = measured(device, rank)
    if rank.rank == 0:
        print("\n" + json.dumps({"ranks": [rank._asdict() for rank in of_all]}), flush=True)
    dist.barrier()
    os._exit(0)  # gloo may abort in its destructors


def measured(device: torch.device, rank: Rank, begin: Callable[[str], object] = lambda part: None) -> list[Figures]:
    """Return what each rank measures; all ranks of the process group call it.

    Args:
        begin: Called before each product and each all-reduce with its name in `PARTS`, equally often on all ranks.
    """
    import torch
    import torch.distributed as dist

    num_ranks = dist.get_world_size()
    nodes = _nodes(rank, num_ranks)
    groups = [dist.new_group(ranks) for ranks in nodes]  # each rank makes all of them
    node = next(number for number, ranks in enumerate(nodes) if rank.rank in ranks)
    node_group = groups[node]
    numbers = torch.zeros(_NUMBERS if device.type == "cpu" else _GPU_NUMBERS, device=device)
    of_product, of_node, of_all_nodes = (partial(begin, part) for part in PARTS)
    product_s, has_multiplied = _product(device, of_product)
    node_reduce_s = _timed(lambda: dist.all_reduce(numbers, group=node_group), device, of_node)
    all_reduce_s = _timed(lambda: dist.all_reduce(numbers), device, of_all_nodes)
    are_right = [
        has_multiplied,
        _sums(numbers, nodes[node], node_group, of_node),
        _sums(numbers, range(num_ranks), None, of_all_nodes),
    ]
    wrong = next((part for part, is_right in zip(PARTS, are_right, strict=True) if not is_right), "")
    figures = Figures(rank.rank, node, socket.gethostname(), product_s, node_reduce_s, all_reduce_s, wrong)
    of_all: list[Figures] = [figures] * num_ranks
    dist.all_gather_object(of_all, figures)
    dist.destroy_process_group(node_group)
    return of_all


def _nodes(rank: Rank, num_ranks: int) -> list[list[int]]:
    """Return the ranks of each node, of which one may have more than another where srun or mpirun has started them."""
    import torch.distributed as dist

    places: list[object] = [None] * num_ranks
    # Nodes that supervisors of ours start have equally many ranks, and two of them may be on one machine.
    dist.all_gather_object(places, rank.rank // rank.ranks_here if rank.supervised else socket.gethostname())
    return [[rank for rank in range(num_ranks) if places[rank] == place] for place in dict.fromkeys(places)]


def slow(ranks: Sequence[Figures], times: float = SLOW) -> Iterator[Slow]:
    """Name the ranks that compute wrong or slowly, and the nodes that reduce slowly.

    Args:
        times: Of the median of all, from which on a time is slow.
    """
    first = min((PARTS.index(rank.wrong) for rank in ranks if rank.wrong), default=None)
    for rank in ranks:
        if first is not None and rank.wrong == PARTS[first]:
            text = f"rank {rank.rank}: {rank.wrong} gives wrong numbers"
            yield Slow(rank.host, text, "Leave this node out, and have its GPUs and links tested.", is_wrong=True)
    usual_s = median_low([rank.product_s for rank in ranks])
    for rank in ranks:
        if rank.product_s >= times * usual_s:
            text = f"rank {rank.rank}: a matrix product takes {rank.product_s / usual_s:.1f} x the median of all ranks"
            yield Slow(rank.host, text, "Look at its clocks, temperature and other programs.")
    nodes = by_node(ranks)
    counts = Counter(rank.node for rank in ranks)
    # A rank alone on its node reduces nothing there, and fewer ranks are faster: only nodes alike are compared.
    max_ranks = max(counts.values())
    alike = [node for node in nodes if counts[node.node] == max_ranks > 1]
    usual_reduce_s = median_low([node.node_reduce_s for node in alike or nodes])
    for node in alike if len(alike) > 1 else ():
        if node.node_reduce_s >= times * usual_reduce_s:
            ratio = f"{node.node_reduce_s / usual_reduce_s:.1f} x"
            text = f"an all-reduce within this node takes {ratio} the median of all nodes"
            yield Slow(node.host, text, "Look at its links: nvidia-smi topo -m, nvidia-smi nvlink --status.")


def by_node(ranks: Sequence[Figures]) -> list[Figures]:
    """Return the figures of each node's first rank, which stands for it."""
    return list({rank.node: rank for rank in reversed(ranks)}.values())


def _missing(store: torch.distributed.TCPStore, num_ranks: int, wait_s: float) -> list[int]:
    deadline_s, missing = time.monotonic() + wait_s, list(range(num_ranks))
    while missing and time.monotonic() < deadline_s:
        missing = [rank for rank in missing if not store.check([f"here-{rank}"])]
        time.sleep(POLL_S if missing else 0)
    return missing


def _product(device: torch.device, begin: Callable[[], object]) -> tuple[float, bool]:
    """Return the time of a matrix product in seconds, and whether its numbers are right."""
    import torch

    side, dtype = (_SIDE, torch.float32) if device.type == "cpu" else (_GPU_SIDE, torch.bfloat16)
    left, right = torch.ones(2, side, side, device=device, dtype=dtype)
    seconds = _timed(lambda: left @ right, device, begin)
    return seconds, bool((left @ right == side).all())  # a power of two: exact in each type


def _sums(
    numbers: torch.Tensor, ranks: Sequence[int], group: dist.ProcessGroup | None, begin: Callable[[], object]
) -> bool:
    """Return whether an all-reduce of the ranks' numbers, each its own from 1, gives their sum."""
    import torch.distributed as dist

    numbers.fill_(dist.get_rank() + 1)
    begin()
    dist.all_reduce(numbers, group=group)
    return bool((numbers == sum(ranks) + len(ranks)).all())


def _timed(work: Callable[[], object], device: torch.device, begin: Callable[[], object]) -> float:
    """Return the median time of a piece of work, after one that warms up, in seconds."""
    import torch

    times = []
    for _ in range(_REPEATS + 1):
        begin()
        began_s = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - began_s)
    return median(times[1:])


if __name__ == "__main__":
    main()
