"""Flags and variables -> the topology of a run: how many nodes and ranks there are, and who starts them.

`started_ranks` decides it where another launcher has started this process as a rank. It starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from tuner.errors import MachineError, Option, UsageError
from tuner.machine import clusters, started_ranks, variables
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
    taken = {field: getattr(file, field) for field, is_taken in is_open.items() if is_taken}
    return flags._replace(**taken, file=file.file if is_open["nproc_per_node"] else "")


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
    differ = [(word, there, here) for word, there, here in pairs if there not in (None, here)]
    differences = ", ".join(f"{word} = {here}, not {there} as {file.file} says" for word, there, here in differ)
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
    return started_ranks.resolve(flags, environ, num_gpus)


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
            raise UsageError(
                f"{value} with --launcher none, which uses one process", where=variables.where(name), fix=fix
            )
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
