"""The topology of a run of which another launcher has started the ranks: srun, mpirun, torchrun or a cluster.

This process is one of these ranks. It reads launch variables, and starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from tuner.errors import Option, UsageError
from tuner.machine import clusters, slurm, variables
from tuner.machine.topology import DEFAULT_PORT, LaunchFlags, Topology
from tuner.machine.variables import LaunchSettings, count, settings_of, text


def resolve(flags: LaunchFlags, environ: Mapping[str, str], num_gpus: int) -> Topology:
    """Return the topology for --launcher slurm, mpi or env.

    Raises:
        UsageError: this process is not a rank of that launcher, or a flag contradicts what it has started.
    """
    return {"slurm": _slurm, "mpi": _mpi, "env": _env}[flags.launcher](flags, environ, num_gpus)


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
        raise UsageError(
            "no environment variable sets the number of this rank or node", where="--launcher env", fix=fix
        )
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
