"""The command of one torchrun agent, on one machine or on each of several."""

from __future__ import annotations

import sys
from pathlib import Path

from tuner.machine.topology import Topology
from tuner.runs.lock import WORKER

GRACE_S = 300.0
"""What ranks that are told to stop have by default, to finish the step and save."""
_ORPHANED_S = 3600


def environment(grace_s: float) -> dict[str, str]:
    """Return torchrun's seconds from SIGTERM to SIGKILL, where its own default is 30.

    The supervisor ends ranks after `grace_s`, or later where a save takes longer, so torchrun must not do it before;
    its own time is for a torchrun that has lost the supervisor. A variable, because torchrun before 2.12 has no such
    flag and would not start; it ignores the variable.
    """
    return {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(round(grace_s) + _ORPHANED_S)}


def torchrun(topology: Topology, run_path: Path) -> list[str]:
    """Return the argv that starts every rank of this node."""
    if topology.num_nodes == 1:
        rendezvous = ["--standalone"]  # the rendezvous itself picks a free port
    else:
        rendezvous = [
            f"--nnodes={topology.num_nodes}",
            f"--node-rank={topology.node_rank}",
            f"--master-addr={topology.master_addr}",
            f"--master-port={topology.master_port}",
        ]
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *rendezvous,
        f"--nproc-per-node={topology.nproc_per_node}",
        "--module",
        # Without it torchrun takes the script's arguments for its own.
        "--",
        WORKER,
        # torchrun puts ranks in the place of ${...} and one $ in the place of two.
        str(run_path).replace("$", "$$"),
    ]
