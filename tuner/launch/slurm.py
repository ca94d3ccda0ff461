"""The command of one rank that something else has started: srun, or nobody (--launcher none)."""

from __future__ import annotations

import sys
from pathlib import Path

from tuner.machine.topology import Topology
from tuner.runs.lock import WORKER


def one_rank(topology: Topology, run_path: Path) -> tuple[list[str], dict[str, str]]:
    """Return the argv that this process becomes, and the variables that tell torch which rank it is."""
    env = {
        "RANK": str(topology.rank),
        "WORLD_SIZE": str(topology.world_size),
        "LOCAL_RANK": str(topology.local_rank),
        "LOCAL_WORLD_SIZE": str(topology.nproc_per_node),
        "MASTER_ADDR": str(topology.master_addr),
        "MASTER_PORT": str(topology.master_port),
    }
    return [sys.executable, "-m", WORKER, str(run_path)], env
