"""Nodes, processes and ranks of a run, and its batch arithmetic; the only reader of launch variables.

It decides from flags and an environment that it is given, and starts nothing.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tuner.errors import MachineError, UsageError

Launcher = Literal["torchrun", "slurm", "none"]
LAUNCHERS: tuple[Launcher, ...] = ("torchrun", "slurm", "none")
DEFAULT_PORT = 29500


@dataclass(frozen=True)
class LaunchFlags:
    """What the command line says; None where it says nothing."""

    launcher: Launcher = "torchrun"
    nproc_per_node: int | None = None
    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None


@dataclass(frozen=True)
class Topology:
    """Where this process stands among all. rank and local_rank are None where torchrun will assign them."""

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

    @property
    def leads(self) -> bool:
        """This process writes the run directory: the first task of Slurm, or the launcher on node 0."""
        return self.rank == 0 if self.rank is not None else self.node_rank == 0

    def describe(self) -> str:
        nodes = f"{self.num_nodes} nodes" if self.num_nodes > 1 else "1 node"
        return f"{nodes}, {self.world_size} process{'es' * (self.world_size > 1)} ({self.launcher})"


@dataclass(frozen=True)
class Rank:
    """Which rank a worker process is."""

    rank: int
    local_rank: int
    world_size: int
    supervised: bool
    """A supervisor of ours reads this rank's report and prints it; under srun nobody does."""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Rank:
        """Read the variables that torchrun, or the plan of one rank, has set."""
        rank, local_rank = int(environ.get("RANK", "0")), int(environ.get("LOCAL_RANK", "0"))
        return cls(rank, local_rank, int(environ.get("WORLD_SIZE", "1")), "TORCHELASTIC_RUN_ID" in environ)


@dataclass(frozen=True)
class Batch:
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


def speaks(environ: Mapping[str, str]) -> bool:
    """Return whether this process tells the user of a mistake: every task of srun makes the same, the first speaks."""
    return "SLURM_STEP_ID" not in environ or environ.get("SLURM_PROCID", "0") == "0"


def resolve(flags: LaunchFlags, environ: Mapping[str, str], num_gpus: int) -> Topology:
    """Decide the topology from flags and environment.

    Raises:
        UsageError: a value that is no count, a flag and a variable that contradict, no address for several nodes,
            or a launcher that does not fit where this process runs.
        MachineError: more processes than GPUs.
    """
    topology = _RESOLVERS[flags.launcher](flags, environ, num_gpus)
    if num_gpus and topology.nproc_per_node > num_gpus and not _one_gpu_a_task(topology, num_gpus):
        raise MachineError(
            f"{topology.nproc_per_node} processes on a node with {num_gpus} visible GPU{'s' * (num_gpus > 1)}",
            where="--nproc-per-node / NPROC_PER_NODE",
            fix=f"Start at most {num_gpus}, one a GPU.",
        )
    return topology


def _one_gpu_a_task(topology: Topology, num_gpus: int) -> bool:
    # --gpus-per-task=1 shows one GPU to every task, so fewer are visible than there are tasks.
    return topology.launcher == "slurm" and num_gpus == 1


def _torchrun(flags: LaunchFlags, environ: Mapping[str, str], num_gpus: int) -> Topology:
    _refuse_inside_a_launcher(environ)
    nproc = _count(flags.nproc_per_node, "--nproc-per-node", environ, "NPROC_PER_NODE")
    nodes = _count(flags.nnodes, "--nnodes", environ, "NNODES") or 1
    rank = _count(flags.node_rank, "--node-rank", environ, "NODE_RANK", minimum=0)
    address = _text(flags.master_addr, "--master-addr", environ, "ADDR", "MASTER_ADDR")
    port = _count(flags.master_port, "--master-port", environ, "PORT", "MASTER_PORT", maximum=65535)
    if nodes > 1 and address is None:
        raise UsageError(
            f"{nodes} nodes, but no address of the first one",
            where="--master-addr / ADDR",
            fix="Give every node the same --master-addr (and --master-port), and its own --node-rank.",
        )
    if nodes > 1 and rank is None:
        fix = f"Give each node its own, 0 to {nodes - 1}."
        raise UsageError(f"{nodes} nodes, but not which one this is", where="--node-rank / NODE_RANK", fix=fix)
    if (rank or 0) >= nodes:
        fix = f"Node ranks run from 0 to {nodes - 1}."
        raise UsageError(f"node rank {rank} of {nodes} nodes", where="--node-rank / NODE_RANK", fix=fix)
    nproc = nproc or max(num_gpus, 1)
    if nodes == 1:
        return Topology("torchrun", 1, 0, nproc, nproc)
    return Topology(
        "torchrun",
        nodes,
        rank or 0,
        nproc,
        nodes * nproc,
        master_addr=address,
        master_port=port or DEFAULT_PORT,
    )


def _none(flags: LaunchFlags, environ: Mapping[str, str], num_gpus: int) -> Topology:
    _refuse_inside_a_launcher(environ)
    nproc = _count(flags.nproc_per_node, "--nproc-per-node", environ, "NPROC_PER_NODE")
    nodes = _count(flags.nnodes, "--nnodes", environ, "NNODES")
    for value, name in ((nproc, "--nproc-per-node / NPROC_PER_NODE"), (nodes, "--nnodes / NNODES")):
        if value not in (None, 1):
            fix = "Leave it out, or leave out --launcher none."
            raise UsageError(f"{value} with --launcher none, which is one process", where=name, fix=fix)
    rank = _count(flags.node_rank, "--node-rank", environ, "NODE_RANK", minimum=0)
    if rank:
        fix = "Leave it out, or leave out --launcher none."
        raise UsageError(f"node rank {rank} with --launcher none, which is one process", where="--node-rank", fix=fix)
    address = _text(flags.master_addr, "--master-addr", environ, "ADDR", "MASTER_ADDR") or "127.0.0.1"
    port = _count(flags.master_port, "--master-port", environ, "PORT", "MASTER_PORT", maximum=65535)
    return Topology("none", 1, 0, 1, 1, rank=0, local_rank=0, master_addr=address, master_port=port or 0)


def _slurm(flags: LaunchFlags, environ: Mapping[str, str], num_gpus: int) -> Topology:
    # The batch shell has SLURM_PROCID=0 as rank 0 has; only a task of srun has a step.
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        raise UsageError(
            "not inside srun",
            where="--launcher slurm",
            fix="Write: srun ... tuner train ... --launcher slurm.",
        )
    world = _slurm_int(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    nodes = _slurm_int(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    node_rank, local_rank = _slurm_int(environ, "SLURM_NODEID"), _slurm_int(environ, "SLURM_LOCALID")
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or str(world)
    nproc = expand_tasks(tasks)[node_rank]
    _refuse_other_geometry(flags, environ, nproc, nodes)
    job, step = environ["SLURM_JOB_ID"], environ["SLURM_STEP_ID"]
    port = _count(flags.master_port, "--master-port", {}, maximum=65535)
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    return Topology(
        "slurm",
        nodes,
        node_rank,
        nproc,
        world,
        rank=_slurm_int(environ, "SLURM_PROCID"),
        local_rank=local_rank % num_gpus if num_gpus else local_rank,
        master_addr=flags.master_addr or first_host(hosts),
        master_port=port or job_port(job, step),
        job=job,
    )


_RESOLVERS = {"torchrun": _torchrun, "none": _none, "slurm": _slurm}


def first_host(nodelist: str) -> str:
    """Return the first host of Slurm's compressed list: 'n[01-03,7],m2' is n01 ...

    Raises:
        UsageError: no host in it.
    """
    first = re.split(r",(?![^\[]*\])", nodelist)[0]
    host = re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", first)
    if not host:
        raise UsageError(f"no host in {nodelist!r}", where="SLURM_STEP_NODELIST")
    return host


def expand_tasks(tasks: str) -> list[int]:
    """Return the tasks of each node from Slurm's form: '2(x3),1' is [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in tasks.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not match:
            raise UsageError(f"{tasks!r} is not Slurm's form", where="SLURM_STEP_TASKS_PER_NODE")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def job_port(job: str, step: str) -> int:
    """Return a port below the ephemeral range that job and step decide, so that every rank knows it unasked."""
    digest = hashlib.sha256(f"{job}.{step}".encode()).digest()
    return 12_000 + int.from_bytes(digest[:4], "big") % 20_000


def _slurm_int(environ: Mapping[str, str], *names: str) -> int:
    for name in names:
        if environ.get(name, "").isdigit():
            return int(environ[name])
    raise UsageError(f"{names[0]} is {environ.get(names[0])!r}, not a count", where="--launcher slurm")


def _refuse_other_geometry(flags: LaunchFlags, environ: Mapping[str, str], nproc: int, nodes: int) -> None:
    given = _count(flags.nproc_per_node, "--nproc-per-node", environ, "NPROC_PER_NODE")
    if given not in (None, nproc):
        fix = f"Leave it out, or write srun --ntasks-per-node={given}."
        raise UsageError(f"{given} processes a node, but srun started {nproc}", where="--nproc-per-node", fix=fix)
    given = _count(flags.nnodes, "--nnodes", environ, "NNODES")
    if given not in (None, nodes):
        fix = f"Leave it out, or write srun --nodes={given}."
        raise UsageError(f"{given} nodes, but srun started {nodes}", where="--nnodes", fix=fix)


def _refuse_inside_a_launcher(environ: Mapping[str, str]) -> None:
    if "TORCHELASTIC_RUN_ID" in environ or {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= environ.keys():
        fix = "Run `tuner train` by itself: it starts the ranks. Or unset RANK, WORLD_SIZE and LOCAL_RANK."
        raise UsageError("already inside torchrun (RANK and WORLD_SIZE are set)", fix=fix)
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if "SLURM_STEP_ID" in environ and tasks.isdigit() and int(tasks) > 1:
        fix = "Add --launcher slurm; otherwise every task would start a whole run of its own."
        raise UsageError(f"inside srun with {tasks} tasks", where="--launcher", fix=fix)


def _text(flag: str | None, name: str, environ: Mapping[str, str], *variables: str) -> str | None:
    given = {name: flag} if flag else {}
    given |= {variable: environ[variable] for variable in variables if environ.get(variable)}
    if len(set(given.values())) > 1:
        shown = " and ".join(f"{key}={value}" for key, value in given.items())
        raise UsageError(f"{shown} contradict each other", where=name, fix="Keep one of them.")
    return next(iter(given.values()), None)


def _count(
    flag: int | None,
    name: str,
    environ: Mapping[str, str],
    *variables: str,
    minimum: int = 1,
    maximum: int = 1 << 20,
) -> int | None:
    text = _text(None if flag is None else str(flag), name, environ, *variables)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,7}", text) or not minimum <= int(text) <= maximum:
        where = " / ".join((name, *variables))
        fix = f"Write a whole number from {minimum} to {maximum}."
        raise UsageError(f"{text!r} is not a count that fits", where=where, fix=fix)
    return int(text)
