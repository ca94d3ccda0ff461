"""Nodes, processes and ranks of a run, and its batch arithmetic; with `slurm` the only reader of launch variables.

It decides from flags and an environment that it is given, and starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tuner.errors import MachineError, UsageError
from tuner.machine import slurm

Launcher = Literal["torchrun", "slurm", "none"]
LAUNCHERS: tuple[Launcher, ...] = ("torchrun", "slurm", "none")
DEFAULT_PORT = 29500
SUPERVISED = "TUNER_SUPERVISED"
"""The variable by which a supervisor of ours tells its ranks that it is there."""
_VARIABLES = {
    "--nproc-per-node": ("NPROC_PER_NODE",),
    "--nnodes": ("NNODES",),
    "--node-rank": ("NODE_RANK",),
    "--master-addr": ("ADDR", "MASTER_ADDR"),
    "--master-port": ("PORT", "MASTER_PORT"),
}
"""The variables that say the same as a flag."""
_MAX_COUNT = 1 << 20


class LaunchFlags(NamedTuple):
    """What the command line says; None where it says nothing.

    `file` is the config that says so in its place, as accelerate's does: see `filled`.
    """

    launcher: Launcher = "torchrun"
    nproc_per_node: int | None = None
    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    file: str = ""


@dataclass(frozen=True)
class Topology:
    """Where this process stands among all. rank and local_rank are None where torchrun will assign them."""

    launcher: Launcher | Literal["direct"]
    """`direct`: one rank on one machine needs no torchrun in between, which takes seconds to start."""
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
        """This process starts its ranks and watches them; by `slurm` and `none` it becomes a rank itself."""
        return self.launcher in ("torchrun", "direct")

    def describe(self) -> str:
        nodes = f"{self.num_nodes} nodes" if self.num_nodes > 1 else "1 node"
        return f"{nodes}, {self.world_size} process{'es' * (self.world_size > 1)} ({self.launcher})"


class Rank(NamedTuple):
    """Which rank a worker process is."""

    rank: int
    local_rank: int
    world_size: int
    supervised: bool
    """A supervisor of ours reads this rank's report and prints it; under srun nobody does."""
    of_srun: bool = False
    """A task of Slurm's, which ends it by itself (SIGKILL) when it does not end in time."""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Rank:
        """Read the variables that torchrun, or `launch.render` for one rank, has set."""
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


def without_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables that say where a run is to be launched."""
    names = {name for several in _VARIABLES.values() for name in several}
    return {name: value for name, value in environ.items() if name not in names}


def filled(flags: LaunchFlags, file: LaunchFlags | None, environ: Mapping[str, str]) -> LaunchFlags:
    """Return the flags with what a file says where neither they nor the variables say it.

    Slurm's tasks and a single process are what they are, so only torchrun asks the file.
    """
    if file is None or flags.launcher != "torchrun":
        return flags
    fields = {name: name.removeprefix("--").replace("-", "_") for name in _VARIABLES}
    is_open = {
        field: getattr(flags, field) is None and not any(environ.get(variable) for variable in _VARIABLES[name])
        for name, field in fields.items()
    }
    is_open["node_rank"] &= is_open["nnodes"]  # which of other nodes this is, the file does not know
    taken = {field: getattr(file, field) for field, is_taken in is_open.items() if is_taken}
    return flags._replace(**taken, file=file.file if is_open["nproc_per_node"] else "")


def contradiction(file: LaunchFlags | None, topology: Topology) -> str | None:
    """Return one line about what a file says of the launch where something else won, or None."""
    if file is None:
        return None
    is_torchrun = topology.launcher == "torchrun" and topology.num_nodes > 1 and file.nnodes != 1
    pairs = [
        ("processes on a machine", file.nproc_per_node, topology.nproc_per_node),
        ("machines", file.nnodes, topology.num_nodes),
        *((("machine rank", file.node_rank, topology.node_rank),) if is_torchrun else ()),
        *((("address", file.master_addr, topology.master_addr),) if is_torchrun else ()),
        *((("port", file.master_port, topology.master_port),) if is_torchrun else ()),
    ]
    differ = [(word, there, here) for word, there, here in pairs if there not in (None, here)]
    told = ", ".join(f"{word} {here}, not {there} as {file.file} says" for word, there, here in differ)
    return f"{told}: a flag, a variable or the machines named win" if told else None


def resolve(flags: LaunchFlags, environ: Mapping[str, str], num_gpus: int) -> Topology:
    """Decide the topology from flags and environment.

    Raises:
        UsageError: a value that is no count, a flag and a variable that contradict, no address for several nodes,
            or a launcher that does not fit where this process runs.
        MachineError: more processes than GPUs.
    """
    topology = _RESOLVERS[flags.launcher](flags, environ, num_gpus)
    if num_gpus and topology.nproc_per_node > num_gpus and not _one_gpu_a_task(topology, environ, num_gpus):
        of_slurm = topology.launcher == "slurm"
        raise MachineError(
            f"{topology.nproc_per_node} processes on a node with {num_gpus} visible GPU{'s' * (num_gpus > 1)}",
            where="srun" if of_slurm else flags.file or "--nproc-per-node / NPROC_PER_NODE",
            fix=f"Write srun --ntasks-per-node={num_gpus}."
            if of_slurm
            else f"Start at most {num_gpus}, one a GPU: --nproc-per-node {num_gpus}.",
        )
    return topology


def _one_gpu_a_task(topology: Topology, environ: Mapping[str, str], num_gpus: int) -> bool:
    # --gpus-per-task=1 shows one GPU to every task, so fewer are visible than there are tasks. Slurm counts the
    # node's GPUs: where they are too few, tasks share one, which NCCL refuses.
    on_node = environ.get("SLURM_GPUS_ON_NODE", "")
    enough = not on_node.isdecimal() or int(on_node) >= topology.nproc_per_node
    return topology.launcher == "slurm" and num_gpus == 1 and enough


def _torchrun(flags: LaunchFlags, environ: Mapping[str, str], num_gpus: int) -> Topology:
    _refuse_inside_a_launcher(environ)
    nproc = _count(flags.nproc_per_node, "--nproc-per-node", environ)
    nodes = _count(flags.nnodes, "--nnodes", environ) or 1
    rank = _count(flags.node_rank, "--node-rank", environ, minimum=0)
    address = _text(flags.master_addr, "--master-addr", environ)
    port = _count(flags.master_port, "--master-port", environ, maximum=65535)
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
    if nodes == nproc == 1:
        return _alone("direct")
    if nodes == 1:
        return Topology("torchrun", 1, 0, nproc, nproc)
    port = port or DEFAULT_PORT
    return Topology("torchrun", nodes, rank or 0, nproc, nodes * nproc, master_addr=address, master_port=port)


def _none(flags: LaunchFlags, environ: Mapping[str, str], num_gpus: int) -> Topology:
    _refuse_inside_a_launcher(environ)
    for name, given, only in (
        ("--nproc-per-node", flags.nproc_per_node, 1),
        ("--nnodes", flags.nnodes, 1),
        ("--node-rank", flags.node_rank, 0),
    ):
        value = _count(given, name, environ, minimum=only)
        if value not in (None, only):
            fix = "Leave it out, or leave out --launcher none."
            raise UsageError(f"{value} with --launcher none, which is one process", where=_where(name), fix=fix)
    address = _text(flags.master_addr, "--master-addr", environ) or "127.0.0.1"
    port = _count(flags.master_port, "--master-port", environ, maximum=65535)
    return _alone("none", address, port or 0)


def _alone(launcher: Literal["direct", "none"], address: str = "127.0.0.1", port: int = 0) -> Topology:
    # At port 0 torch's store listens on a free one; nobody else has to find it.
    return Topology(launcher, 1, 0, 1, 1, rank=0, local_rank=0, master_addr=address, master_port=port)


def _slurm(flags: LaunchFlags, environ: Mapping[str, str], num_gpus: int) -> Topology:
    # The batch shell has SLURM_PROCID=0 as rank 0 has; only a task of srun has a step.
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        fix = "Write: srun ... tuner train ... --launcher slurm."
        raise UsageError("not inside srun", where="--launcher slurm", fix=fix)
    world = slurm.count(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    nodes = slurm.count(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    node_rank, local_rank = slurm.count(environ, "SLURM_NODEID"), slurm.count(environ, "SLURM_LOCALID")
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or str(world)
    spread = slurm.expand_tasks(tasks)
    if node_rank >= len(spread):
        raise UsageError(f"node {node_rank} of {tasks!r}, which are {len(spread)} nodes", where="SLURM_NODEID")
    nproc = spread[node_rank]
    _refuse_other_geometry(flags, environ, nproc, nodes)
    job, step = slurm.number(environ, "SLURM_JOB_ID"), slurm.number(environ, "SLURM_STEP_ID")
    port = _count(flags.master_port, "--master-port", {}, maximum=65535)
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    return Topology(
        "slurm",
        nodes,
        node_rank,
        nproc,
        world,
        rank=slurm.count(environ, "SLURM_PROCID"),
        local_rank=local_rank % num_gpus if num_gpus else local_rank,
        master_addr=flags.master_addr or slurm.first_host(hosts),
        master_port=port or slurm.port(job, step, environ.get("SLURM_RESTART_COUNT", "0")),
        job=job,
        tasks=tuple(spread),
    )


_RESOLVERS = {"torchrun": _torchrun, "none": _none, "slurm": _slurm}


def _refuse_other_geometry(flags: LaunchFlags, environ: Mapping[str, str], nproc: int, nodes: int) -> None:
    for name, flag, started, what, option in (
        ("--nproc-per-node", flags.nproc_per_node, nproc, "processes a node", "--ntasks-per-node"),
        ("--nnodes", flags.nnodes, nodes, "nodes", "--nodes"),
    ):
        given = _count(flag, name, environ)
        if given not in (None, started):
            fix = f"Leave it out, or write srun {option}={given}."
            raise UsageError(f"{given} {what}, but srun started {started}", where=_where(name), fix=fix)


def _refuse_inside_a_launcher(environ: Mapping[str, str]) -> None:
    if "TORCHELASTIC_RUN_ID" in environ or {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= environ.keys():
        fix = "Run `tuner train` by itself: it starts the ranks. Or unset RANK, WORLD_SIZE and LOCAL_RANK."
        raise UsageError("already inside torchrun (RANK and WORLD_SIZE are set)", fix=fix)
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if "SLURM_STEP_ID" in environ and slurm.COUNT.fullmatch(tasks) and int(tasks) > 1:
        fix = "Add --launcher slurm; otherwise every task would start a whole run of its own."
        raise UsageError(f"inside srun with {tasks} tasks", where="--launcher", fix=fix)


def _text(flag: str | None, name: str, environ: Mapping[str, str]) -> str | None:
    given = {name: flag} if flag else {}
    given |= {variable: environ[variable] for variable in _VARIABLES[name] if environ.get(variable)}
    if len(set(given.values())) > 1:
        shown = " and ".join(f"{key}={value}" for key, value in given.items())
        raise UsageError(f"{shown} contradict each other", where=name, fix="Keep one of them.")
    return next(iter(given.values()), None)


def _count(
    flag: int | None,
    name: str,
    environ: Mapping[str, str],
    *,
    minimum: int = 1,
    maximum: int = _MAX_COUNT,
) -> int | None:
    text = _text(None if flag is None else str(flag), name, environ)
    if text is None:
        return None
    if not slurm.COUNT.fullmatch(text) or not minimum <= int(text) <= maximum:
        fix = f"Write a whole number from {minimum} to {maximum}."
        raise UsageError(f"{text!r} is not a count that fits", where=_where(name), fix=fix)
    return int(text)


def _where(name: str) -> str:
    """Return a flag with the variables that say the same."""
    return " / ".join((name, *_VARIABLES[name]))
