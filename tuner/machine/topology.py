"""Nodes, processes and ranks of a run, its batch arithmetic, and the warning that it makes too few steps.

`launchers` reads a topology from flags and variables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from tuner.errors import Key, Option, Text

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
    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    file: str = ""


class Topology(NamedTuple):
    """Where this process stands among all. A process that starts the ranks has no rank and no local_rank."""

    launcher: Launcher | Literal["torchrun"]
    """`local` of one machine starts its ranks itself; of several nodes it is `torchrun`, which takes a second more."""
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

    @property
    def leads(self) -> bool:
        """This process writes the run directory: the first task of Slurm, or the launcher on node 0."""
        return self.rank == 0 if self.rank is not None else self.node_rank == 0

    @property
    def is_supervised(self) -> bool:
        """This process starts its ranks and watches them; by all other launchers it becomes a rank itself."""
        return self.launcher in ("local", "torchrun")

    @property
    def local_ranks(self) -> range:
        """The ranks that this process starts itself; none where torchrun does, or where it becomes one."""
        return range(self.nproc_per_node if self.launcher == "local" else 0)

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
    return local(num_ranks) if num_nodes == 1 else Topology("torchrun", num_nodes, 0, num_ranks, num_nodes * num_ranks)


class Rank(NamedTuple):
    """Which rank a worker process is."""

    rank: int
    local_rank: int
    world_size: int
    supervised: bool
    """A supervisor of ours reads this rank's report and prints it; under srun no process does."""
    of_srun: bool = False
    """A task of Slurm's, which ends it by itself (SIGKILL) when it does not end in time."""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Rank:
        """Read the variables that torchrun, or `launch.render`, has set."""
        rank, local_rank = int(environ.get("RANK", "0")), int(environ.get("LOCAL_RANK", "0"))
        world_size, supervised = int(environ.get("WORLD_SIZE", "1")), SUPERVISED in environ
        return cls(rank, local_rank, world_size, supervised, not supervised and "SLURM_STEP_ID" in environ)


class Batch(NamedTuple):
    """micro_batch x accumulation x ranks = global_batch, in samples (packed rows, with packing)."""

    micro_batch: int
    accumulation: int
    ranks: int

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.accumulation * self.ranks

    def steps_per_epoch(self, num_samples: int) -> int:
        """Return the optimizer steps that one pass over `num_samples` samples takes."""
        micro_batches = -(-num_samples // (self.micro_batch * self.ranks))
        return -(-micro_batches // self.accumulation)

    def steps(self, num_samples: int, epochs: float) -> int:
        """Return the optimizer steps of so many passes over `num_samples` samples, as transformers 5.23 counts them."""
        return math.ceil(epochs * self.steps_per_epoch(num_samples))


# --- Runs with so few optimizer steps that they learn little ---

MIN_STEPS = 30
"""Fewer optimizer steps than this teach little at the default learning rates (docs/learning.md): on 135 rows, 12 steps
reached a held-out loss of 3.70, 51 steps 3.08 and 105 steps 3.00."""

ENOUGH = 1000
"""A global batch of our choice is made smaller until a run takes as many: on 1,000 rows 1,000 steps reached a held-out
loss of 2.72, 131 steps 2.89 (docs/learning.md). On a GPU so many small steps cost minutes."""


def long_warm_up_warning(warm_up: int, total: int) -> str | None:
    """Return that a warm-up of `warm_up` steps ends behind the last of `total` steps; None if it does not."""
    if warm_up <= total:
        return None
    return (
        f"The warm-up takes {warm_up:,} steps and the run {total:,}: the learning rate only rises, to "
        f"{total / warm_up:.0%} of lr. Use a smaller warmup_steps, or warmup_ratio"
    )


def few_steps_warning(
    batch: Batch, epochs: float, rows: int, description: str, *, unpacked: int | None = None
) -> str | None:
    """Return that a run takes too few steps, with the arithmetic and what changes it; None if it takes enough.

    Args:
        batch: Of all ranks.
        epochs: Passes over the rows.
        rows: Those that the batch counts: packed rows, with packing.
        description: Those rows in words.
        unpacked: The samples that were packed into these rows, if any were.
    """
    if not rows:
        return f"{description}: there is nothing to train on"
    total = batch.steps(rows, epochs)
    if total >= MIN_STEPS:
        return None
    steps = f"{total} optimizer step{'s' * (total > 1)}"
    why = f"{description}, global batch {batch.global_batch}, {epochs:g} epoch{'s' * (epochs != 1)}"
    ways = " or ".join(_ways(batch, epochs, rows, unpacked))
    return Text(f"This run makes only {steps} ({why}) and will learn very little. Try {ways}")


def _ways(batch: Batch, epochs: float, rows: int, unpacked: int | None) -> list[str]:
    """Return the options that give more steps, each with how many."""
    each, ways = batch.steps_per_epoch(rows), []
    smaller = max(batch.ranks, batch.global_batch // 2 ** math.ceil(math.log2(MIN_STEPS / batch.steps(rows, epochs))))
    smaller -= smaller % batch.ranks
    if smaller < batch.global_batch:
        steps = Batch(1, smaller // batch.ranks, batch.ranks).steps(rows, epochs)
        ways.append(f"{Option('batch_size', smaller)} ({steps} steps)")
    if unpacked and batch.steps_per_epoch(unpacked) > each:
        key = Key("train_dataloader.dataset.packing", False)
        ways.append(f"{key} ({batch.steps(unpacked, epochs)} steps)")
    enough = -(-MIN_STEPS // each)
    return [*ways, f"{Option('epochs', enough)} ({enough * each} steps)"]
