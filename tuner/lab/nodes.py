"""`tuner doctor --nodes`: whether each node is well, and as fast as the others.

Each node runs this command and starts short-lived ranks, which meet as those of a run would. Node 0 compares them all.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median_low
from typing import IO, Any

from tuner.files import sized
from tuner.lab.probes import Row, last_object, text_in
from tuner.machine import health
from tuner.machine.hardware import Hardware
from tuner.machine.topology import SUPERVISED, Topology
from tuner.worker.speed import WAIT, Figures, by_node, slow

WAIT_S = 60.0
"""How long nodes wait for each other: they load torch meanwhile."""
_MEASURING_S = 30.0
_FEW_BYTES = 10 * 1024**3


def examine(
    this_machine: Hardware, topology: Topology, folder: Path, environ: Mapping[str, str], wait_s: float = WAIT_S
) -> list[Row]:
    """Return what is wrong with this node, and on node 0 also how fast all ranks are.

    Args:
        folder: The one that nodes share.
    """
    return [*_of_this_node(this_machine, folder), *_of_speed(this_machine, topology, environ, wait_s)]


def _of_this_node(this_machine: Hardware, folder: Path) -> Iterator[Row]:
    node = socket.gethostname()
    try:
        ailments = health.folder(folder)
    except OSError as error:
        yield Row(node, "failed", f"{folder} cannot be written: {error.strerror}", "Choose another folder.")
        ailments = []
    ailments += health.gpus([gpu.uuid for gpu in this_machine.gpus])
    for ailment in ailments:
        yield Row(node, "failed" if ailment.is_fatal else "warning", ailment.what, ailment.fix)
    hangs = any(ailment.is_fatal for ailment in ailments)
    free = None if hangs else shutil.disk_usage(folder).free
    if free is not None and free < _FEW_BYTES:
        yield Row(node, "warning", f"{folder} has {sized(free)} free", "Free space.")
    if not ailments:
        yield Row(node, "ok", f"{this_machine.describe()}; {folder} is written and read; its clock is right")


def _of_speed(this_machine: Hardware, topology: Topology, environ: Mapping[str, str], wait_s: float) -> Iterator[Row]:
    local_ranks = range(topology.nproc_per_node) if topology.rank is None else (topology.local_rank or 0,)
    first = topology.node_rank * topology.nproc_per_node
    meeting = {
        "WORLD_SIZE": str(topology.world_size),
        "LOCAL_WORLD_SIZE": str(topology.nproc_per_node),
        "MASTER_ADDR": topology.master_addr or "127.0.0.1",
        "MASTER_PORT": str(topology.master_port or _free_port()),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": this_machine.device,
        "PYTHONSAFEPATH": "1",
        WAIT: str(wait_s),
        **({SUPERVISED: "1"} if topology.is_supervised else {}),
    }
    children = []
    for local_rank in local_ranks:
        rank = first + local_rank if topology.rank is None else topology.rank
        env = {**environ, **meeting, "RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 (an unread pipe would fill)
        argv = [sys.executable, "-m", "tuner.worker.speed"]
        children.append((rank, subprocess.Popen(argv, env=env, stdout=out, stderr=err), out, err))
    answer, errors = _ended(children, wait_s + _MEASURING_S)
    node = socket.gethostname()
    if missing := answer.get("missing"):
        spread = topology.tasks or (topology.nproc_per_node,) * topology.num_nodes
        node_of = [number for number, count in enumerate(spread) for _ in range(count)]
        names = ", ".join(dict.fromkeys(f"node {node_of[rank]}" for rank in missing))
        yield Row("nodes", "failed", f"{names} did not join within {wait_s:g} s", "Start the same command there.")
    elif errors:
        rank, text = errors[0]
        yield Row(node, "failed", f"rank {rank} cannot measure: {text}", "NCCL_DEBUG=INFO shows what it tried.")
    if "ranks" in answer:
        yield from compared([Figures(**rank) for rank in answer["ranks"]])


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


Child = tuple[int, "subprocess.Popen[bytes]", IO[bytes], IO[bytes]]


def _ended(children: Sequence[Child], limit_s: float) -> tuple[dict[str, Any], list[tuple[int, str]]]:
    """Wait for the ranks of this node, and return what rank 0 printed, and the last words of those that failed."""
    answer: dict[str, Any] = {}
    errors = []
    for rank, child, out, err in children:
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            child.kill()
            code = child.wait()
        with out, err:
            if rank == 0:
                answer = last_object(out)
            if code:
                words = text_in(err).strip().splitlines()
                errors.append((rank, words[-1] if words else f"no answer within {limit_s:g} s"))
    return answer, errors


def compared(ranks: Sequence[Figures]) -> Iterator[Row]:
    """Name the ranks that compute wrong or slowly and the nodes that reduce slowly, by the median of all."""
    for host, text, fix, is_wrong in slow(ranks):
        yield Row(host, "failed" if is_wrong else "warning", text, fix)
    nodes = by_node(ranks)
    product_s = median_low([rank.product_s for rank in ranks])
    times = [("a matrix product", product_s), ("an all-reduce over all", ranks[0].all_reduce_s)]
    if len(ranks) > len(nodes):
        times.insert(1, ("an all-reduce within a node", median_low([rank.node_reduce_s for rank in nodes])))
    shown = ", ".join(f"{operation} {seconds * 1000:,.2f} ms" for operation, seconds in times)
    yield Row("speed", "ok", f"ranks: {len(ranks)}, nodes: {len(nodes)}; {shown}")
