"""Flags and variables -> the topology of a run: how many nodes and ranks there are, and who starts them.

It starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from tuner.errors import MachineError, Option, UsageError
from tuner.machine import clusters, slurm, variables
from tuner.machine.topology import DEFAULT_PORT, LaunchFlags, Topology, local
from tuner.machine.variables import LaunchSettings, count, node_counts, settings_of, text


def without_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables that say where a run is to be launched."""
    names = set().union(*variables.VARIABLES.values())
    return {name: value for name, value in environ.items() if name not in names}


def filled(flags: LaunchFlags, file: LaunchFlags | None, environ: Mapping[str, str]) -> LaunchFlags:
    """Return the flags with what a file says where neither they nor the variables say it.

    Slurm's tasks and a single process are what they are, so only `local` asks the file.
    """
    if file is None or flags.launcher != "local":
        return flags
    settings = settings_of(flags._asdict(), environ)
    is_open = {name.removeprefix("--").replace("-", "_"): not values for name, values in settings.items()}
    is_open["node_rank"] &= is_open["nnodes"]  # which of other nodes this is, the file does not know
    from_file = {field: getattr(file, field) for field, is_taken in is_open.items() if is_taken}
    return flags._replace(**from_file, file=file.file if is_open["nproc_per_node"] else "")


def contradiction(file: LaunchFlags | None, topology: Topology) -> str | None:
    """Return one line about what a file says of the launch where something else won, or None."""
    if file is None:
        return None
    is_node = topology.is_supervised and topology.num_nodes > 1 and file.nnodes != 1
    pairs = [
        ("processes on a machine", file.nproc_per_node, topology.nproc_per_node),
        ("machines", file.nnodes, topology.num_nodes),
        *((("machine rank", file.node_rank, topology.node_rank),) if is_node else ()),
        *((("address", file.master_addr, topology.master_addr),) if is_node else ()),
        *((("port", file.master_port, topology.master_port),) if is_node else ()),
    ]
    differ = [(word, in_file, used) for word, in_file, used in pairs if in_file not in (None, used)]
    differences = ", ".join(f"{word} = {used}, not {in_file} as {file.file} says" for word, in_file, used in differ)
    return f"{differences}: flags and variables override the file." if differences else None


def resolve(flags: LaunchFlags, environ: Mapping[str, str], num_gpus: int) -> Topology:
    """Decide the topology from flags and environment.

    Raises:
        UsageError: a value that is no count, a flag and a variable that contradict, no address for several nodes,
            or a launcher that does not fit where this process runs.
        MachineError: more processes than GPUs.
    """
    topology = _topology(flags, environ, num_gpus)
    if num_gpus and topology.nproc_per_node > num_gpus and not _one_gpu_a_task(topology, environ, num_gpus):
        where = flags.file or f"{Option('nproc_per_node')} / NPROC_PER_NODE"
        fix = f"Start at most {num_gpus}, one per GPU: {Option('nproc_per_node', num_gpus)}."
        if topology.launcher == "slurm":
            where, fix = "srun", f"Use srun --ntasks-per-node={num_gpus}."
        elif not topology.is_supervised:
            where, fix = f"--launcher {topology.launcher}", f"Start at most {num_gpus}, one per GPU."
        problem = f"{topology.nproc_per_node} processes on a node with {num_gpus} visible GPU{'s' * (num_gpus > 1)}"
        raise MachineError(problem, where=where, fix=fix)
    return topology


def _topology(flags: LaunchFlags, environ: Mapping[str, str], num_gpus: int) -> Topology:
    if flags.launcher == "local":
        _refuse_inside_a_launcher(flags, environ)
        return _nodes(settings_of(flags._asdict(), environ), num_gpus)
    if flags.launcher == "none":
        return _one_process(flags, environ)
    if flags.launcher == "env" and clusters.of_rank(environ) is None and (of_cluster := clusters.nodes(environ)):
        return _nodes(settings_of(flags._asdict(), environ, of_cluster), num_gpus)
    started = {"slurm": _slurm, "mpi": _mpi, "env": _env}[flags.launcher]
    return started(flags, environ, num_gpus)


def _one_gpu_a_task(topology: Topology, environ: Mapping[str, str], num_gpus: int) -> bool:
    # --gpus-per-task=1 shows one GPU to every task, so fewer are visible than there are tasks. Slurm counts the
    # node's GPUs: where they are too few, tasks share one, which NCCL refuses. Other launchers leave that to scripts,
    # which set CUDA_VISIBLE_DEVICES.
    if topology.is_supervised or num_gpus > 1:
        return False
    if topology.launcher != "slurm":
        return bool(environ.get("CUDA_VISIBLE_DEVICES"))
    on_node = environ.get("SLURM_GPUS_ON_NODE", "")
    return not on_node.isdecimal() or int(on_node) >= topology.nproc_per_node


def _nodes(settings: LaunchSettings, num_gpus: int) -> Topology:
    """Return one node of some, each of which starts its own ranks."""
    nproc, (least, nodes) = count(settings, "--nproc-per-node"), node_counts(settings)
    rank, port = count(settings, "--node-rank", minimum=0), count(settings, "--master-port", maximum=65535)
    address = text(settings, "--master-addr")
    if nodes > 1 and address is None:
        fix = "Set the same --master-addr (and --master-port) on every node, and a different --node-rank on each."
        raise UsageError(f"{nodes} nodes, but no address of node 0", where="--master-addr / ADDR", fix=fix)
    if nodes > 1 and rank is None:
        fix = f"Set it on each node, from 0 to {nodes - 1}."
        raise UsageError(f"{nodes} nodes, but no number for this one", where="--node-rank / NODE_RANK", fix=fix)
    if (rank or 0) >= nodes:
        fix = f"Node ranks run from 0 to {nodes - 1}."
        raise UsageError(f"node rank {rank} of {nodes} nodes", where="--node-rank / NODE_RANK", fix=fix)
    nproc = nproc or max(num_gpus, 1)
    if nodes == 1:
        return local(nproc)
    port = port or DEFAULT_PORT
    every = Topology("local", nodes, rank or 0, nproc, nodes * nproc, master_addr=address, master_port=port)
    return every._replace(min_nodes=least, max_nodes=nodes) if least < nodes else every


def _one_process(flags: LaunchFlags, environ: Mapping[str, str]) -> Topology:
    _refuse_inside_a_launcher(flags, environ)
    settings = settings_of(flags._asdict(), environ)
    for name, only in (("--nproc-per-node", 1), ("--nnodes", 1), ("--node-rank", 0)):
        value = count(settings, name, minimum=only)
        if value not in (None, only):
            fix = "Remove it, or remove --launcher none."
            problem = f"{value} with --launcher none, which uses one process"
            raise UsageError(problem, where=variables.where(name), fix=fix)
    port = count(settings, "--master-port", maximum=65535)
    address = text(settings, "--master-addr") or "127.0.0.1"
    # At port 0 torch's store listens on a free one; nobody else has to find it.
    return Topology("none", 1, 0, 1, 1, rank=0, local_rank=0, master_addr=address, master_port=port or 0)


def _refuse_inside_a_launcher(flags: LaunchFlags, environ: Mapping[str, str]) -> None:
    if "TORCHELASTIC_RUN_ID" in environ or {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= environ.keys():
        fix = (
            "Run `tuner train` without torchrun: it starts the ranks. Or add --launcher env "
            "to run as one of these ranks, or unset RANK, WORLD_SIZE and LOCAL_RANK."
        )
        raise UsageError("already inside torchrun (RANK and WORLD_SIZE are set)", fix=fix)
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if "SLURM_STEP_ID" in environ and variables.COUNT.fullmatch(tasks) and int(tasks) > 1:
        fix = "Add --launcher slurm; otherwise every task would start a run of its own."
        raise UsageError(f"inside srun with {tasks} tasks", where="--launcher", fix=fix)
    # After Slurm, which sets the same for MPIs that ask for it. An mpirun may start one node each, if it is told to.
    size = variables.mpi_size(environ)
    if size > 1 and not text(settings_of(flags._asdict(), environ), "--nnodes"):
        fix = "Add --launcher mpi; otherwise every process would start a run of its own."
        raise UsageError(f"inside mpirun with {size} processes", where="--launcher", fix=fix)


# --- Ranks that another launcher has started, of which this process is one: srun, mpirun, torchrun, a cluster ---


def _slurm(flags: LaunchFlags, environ: Mapping[str, str], num_gpus: int) -> Topology:
    # The batch shell has SLURM_PROCID=0 as rank 0 has; only a task of srun has a step.
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        fix = "Start it with: srun ... tuner train ... --launcher slurm."
        raise UsageError("not inside srun", where="--launcher slurm", fix=fix)
    world = slurm.count(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    nodes = slurm.count(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    node_rank, local_rank = slurm.count(environ, "SLURM_NODEID"), slurm.count(environ, "SLURM_LOCALID")
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or str(world)
    spread = slurm.expand_tasks(tasks)
    if node_rank >= len(spread):
        raise UsageError(f"node {node_rank} of {tasks!r}, which are {len(spread)} nodes", where="SLURM_NODEID")
    nproc = spread[node_rank]
    _refuse_other_geometry(settings_of(flags._asdict(), environ), nproc, nodes, "srun")
    job, step = slurm.number(environ, "SLURM_JOB_ID"), slurm.number(environ, "SLURM_STEP_ID")
    port = count(settings_of(flags._asdict(), {}), "--master-port", maximum=65535)
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


def _mpi(flags: LaunchFlags, environ: Mapping[str, str], num_gpus: int) -> Topology:
    variables = clusters.of_mpi(environ)
    if variables is None:
        fix = "Start it with: mpirun -np 2 tuner train ... --launcher mpi."
        if "PMIX_RANK" in environ:  # srun --mpi=pmix: PMIx's variables do not say how many ranks there are
            fix += " Under srun: --launcher slurm."
        raise UsageError("not inside mpirun", where="--launcher mpi", fix=fix)
    # The same for all ranks of one mpirun alone: two at once on a machine meet at different ports.
    job = environ.get("PMIX_NAMESPACE")
    port = slurm.port(job, "mpi") if job else DEFAULT_PORT
    return _rank("mpi", variables, settings_of(flags._asdict(), environ), num_gpus, port)


def _env(flags: LaunchFlags, environ: Mapping[str, str], num_gpus: int) -> Topology:
    variables = clusters.of_rank(environ)
    if variables is None:
        fix = "It reads RANK, WORLD_SIZE and LOCAL_RANK, or the variables of Kubeflow, Volcano or SkyPilot."
        problem = "no environment variable sets the number of this rank or node"
        raise UsageError(problem, where="--launcher env", fix=fix)
    return _rank("env", variables, settings_of(flags._asdict(), environ), num_gpus, DEFAULT_PORT)


def _rank(
    launcher: Literal["mpi", "env"],
    variables: clusters.RankVariables,
    settings: LaunchSettings,
    num_gpus: int,
    port: int,
) -> Topology:
    """Return one rank of some that another launcher has started; a flag wins over where those meet, as under Slurm."""
    meeting: LaunchSettings = {
        name: {name: settings[name][name]} for name in ("--master-addr", "--master-port") if name in settings[name]
    }
    settings = {**settings, **meeting}
    address = text(settings, "--master-addr")
    nproc = variables.local_world_size or count(settings, "--nproc-per-node")
    if nproc is None:
        if variables.world_size > 1 and address not in ("127.0.0.1", "localhost"):
            fix = f"Set LOCAL_WORLD_SIZE or {Option('nproc_per_node')}."
            raise UsageError("the number of ranks per node is unknown", where=variables.launcher, fix=fix)
        nproc = variables.world_size
    nodes = -(-variables.world_size // nproc)
    _refuse_other_geometry(settings, nproc, nodes, "mpirun" if launcher == "mpi" else variables.launcher)
    if nodes > 1 and address is None:
        fix = "Set the host of rank 0 on all ranks: --master-addr HOST or MASTER_ADDR."
        raise UsageError(f"{nodes} nodes, but no address of node 0", where="--master-addr / ADDR", fix=fix)
    return Topology(
        launcher,
        nodes,
        variables.rank // nproc,
        nproc,
        variables.world_size,
        rank=variables.rank,
        local_rank=variables.local_rank % num_gpus if num_gpus else variables.local_rank,
        master_addr=address or "127.0.0.1",
        master_port=count(settings, "--master-port", maximum=65535) or port,
    )


def _refuse_other_geometry(settings: LaunchSettings, nproc: int, nodes: int, starter: str) -> None:
    for name, started, unit, option in (
        ("--nproc-per-node", nproc, "processes per node", "--ntasks-per-node"),
        ("--nnodes", nodes, "nodes", "--nodes"),
    ):
        wanted = count(settings, name)
        if wanted not in (None, started):
            fix = f"Remove it, or use srun {option}={wanted}." if starter == "srun" else "Remove it."
            raise UsageError(f"{wanted} {unit}, but {starter} started {started}", where=variables.where(name), fix=fix)
