"""Nodes, processes and ranks of a run, and its batch.

`launchers` reads a topology from flags and variables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

DEFAULT_PORT = 29500
SUPERVISED = "TUNER_SUPERVISED"
"""The variable by which a supervisor of ours tells its ranks that it is there."""
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""torchrun's: somebody listens at the master port already, where a rank 0 that tried the same would fail."""
STORE_FD = "TUNER_STORE_FD"
"""The variable by which a supervisor of ours hands rank 0 the socket that listens at the master port."""
Launcher = Literal["local", "slurm", "mpi", "env", "none"]
LAUNCHERS: tuple[Launcher, ...] = ("local", "slurm", "mpi", "env", "none")


class LaunchFlags(NamedTuple):
    """What the command line says; None where it says nothing.

    `file` is the config that says so in its place, as accelerate's does: see `filled`.
    """

    launcher: Launcher = "local"
    nproc_per_node: int | None = None
    nnodes: int | str | None = None
    """A number, or MIN:MAX."""
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    file: str = ""


class Topology(NamedTuple):
    """Where this process stands among all. A process that starts the ranks has no rank and no local_rank."""

    launcher: Launcher
    num_nodes: int
    node_rank: int
    nproc_per_node: int
    world_size: int
    rank: int | None = None
    local_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    job: str | None = None
    """Slurm's job id, the same for every rank and every requeue."""
    tasks: tuple[int, ...] = ()
    """Slurm's tasks on each node."""
    min_nodes: int = 0
    """With `--nnodes MIN:MAX`, the fewest nodes that the run goes on with; 0: it needs all of them."""
    max_nodes: int = 0
    """With `--nnodes MIN:MAX`, all of them, of which an attempt may have fewer."""

    def among(self, members: Sequence[int]) -> Topology:
        """Return the place of this node, one of all, in an attempt of some of them.

        Args:
            members: Their ranks among all nodes, in order; this node's is one of them.
        """
        place, count = members.index(self.node_rank), len(members)
        return self._replace(num_nodes=count, node_rank=place, world_size=count * self.nproc_per_node)

    @property
    def nnodes(self) -> str:
        """The value of `--nnodes`."""
        return f"{self.min_nodes}:{self.max_nodes}" if self.min_nodes else str(self.num_nodes)

    @property
    def leads(self) -> bool:
        """This process writes the run directory: the first task of Slurm, or the launcher on node 0."""
        return self.rank == 0 if self.rank is not None else self.node_rank == 0

    @property
    def is_supervised(self) -> bool:
        """This process starts its ranks and watches them; by all other launchers it becomes a rank itself."""
        return self.launcher == "local"

    @property
    def local_ranks(self) -> range:
        """The ranks that this process starts; none where it becomes one."""
        first = self.node_rank * self.nproc_per_node
        return range(first, first + self.nproc_per_node if self.is_supervised else first)

    @property
    def is_shared(self) -> bool:
        """Several launchers or tasks start this run, each for its part, and must find each other unasked."""
        return self.num_nodes > 1 or (not self.is_supervised and self.world_size > 1)

    def describe(self) -> str:
        nodes = f"{self.num_nodes} nodes" if self.num_nodes > 1 else "1 node"
        started = "" if self.launcher == "local" else f" ({self.launcher})"
        return f"{nodes}, {self.world_size} process{'es' * (self.world_size > 1)}{started}"


def local(num_ranks: int) -> Topology:
    """Return this machine with so many ranks, which meet at a port that is free when they start."""
    return Topology("local", 1, 0, num_ranks, num_ranks, master_addr="127.0.0.1", master_port=0)


def planned(num_nodes: int, num_ranks: int) -> Topology:
    """Return the first of some machines that need not be here, each with so many ranks."""
    return local(num_ranks) if num_nodes == 1 else Topology("local", num_nodes, 0, num_ranks, num_nodes * num_ranks)


class Rank(NamedTuple):
    """Which rank a worker process is."""

    rank: int
    local_rank: int
    world_size: int
    supervised: bool
    """A supervisor of ours reads this rank's report and prints it; under srun no process does."""
    of_srun: bool = False
    """A task of Slurm's, which ends it by itself (SIGKILL) when it does not end in time."""
    ranks_here: int = 1
    """The ranks of this node; under Slurm and MPI another one may have more or fewer."""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Rank:
        """Read the variables that `launch.render`, or torchrun, has set."""
        rank, local_rank = int(environ.get("RANK", "0")), int(environ.get("LOCAL_RANK", "0"))
        world_size, supervised = int(environ.get("WORLD_SIZE", "1")), SUPERVISED in environ
        of_srun, ranks_here = not supervised and "SLURM_STEP_ID" in environ, int(environ.get("LOCAL_WORLD_SIZE", "1"))
        return cls(rank, local_rank, world_size, supervised, of_srun, ranks_here)


class Batch(NamedTuple):
    """micro_batch x accumulation x ranks = global_batch, in samples (packed rows, with packing)."""

    micro_batch: int
    accumulation: int
    ranks: int

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.accumulation * self.ranks
