"""What MPI's launchers and clusters say of this process: which rank it is, or which node of how many.

It reads the environment that it is given and decides nothing. Slurm's variables are in `slurm`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from tuner.errors import UsageError
from tuner.machine.variables import COUNT, OF_MPI, LaunchSettings

_OF_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OF_TORCHRUN = {
    "--nproc-per-node": "PET_NPROC_PER_NODE",
    "--nnodes": "PET_NNODES",
    "--node-rank": "PET_NODE_RANK",
    "--master-addr": "PET_MASTER_ADDR",
    "--master-port": "PET_MASTER_PORT",
}
"""torchrun's own, which Kubeflow sets for one torchrun a pod.

Source: kubeflow/trainer, pkg/runtime/framework/plugins/torch/torch.go.
"""
_OF_SKYPILOT = {
    "--nproc-per-node": "SKYPILOT_NUM_GPUS_PER_NODE",
    "--nnodes": "SKYPILOT_NUM_NODES",
    "--node-rank": "SKYPILOT_NODE_RANK",
}
_OF_PODS = {"--nnodes": "WORLD_SIZE", "--node-rank": "RANK"}
"""Volcano's and PyTorchJob's, which count pods where nothing says how many processes each has."""
_VOLCANO_HOSTS = re.compile(r"VC_\w+_HOSTS")
_NUM_GPUS = ("0", "auto", "gpu", "cpu")
"""What does not say how many processes: one a GPU, as without it."""


class RankVariables(NamedTuple):
    """Which rank this process is, as another launcher says; `launcher` and `variables` are for messages."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None
    launcher: str
    variables: tuple[str, ...]


def of_mpi(environ: Mapping[str, str]) -> RankVariables | None:
    """Return the place that MPI's launcher has given this process, or None outside of one.

    Raises:
        UsageError: some of its variables are missing, no counts, or contradict each other.
    """
    for launcher, names in OF_MPI.items():
        if names[0] in environ or names[1] in environ:
            return _place(launcher, names, environ)
    return None


def of_rank(environ: Mapping[str, str]) -> RankVariables | None:
    """Return the place that RANK, WORLD_SIZE and LOCAL_RANK name, or None where there is no LOCAL_RANK.

    Raises:
        UsageError: as `of_mpi`, or no address and port of rank 0.
    """
    if "LOCAL_RANK" not in environ:
        return None
    several = environ.get("WORLD_SIZE") != "1"
    needed = (*_OF_RANK[:3], *(("MASTER_ADDR", "MASTER_PORT") if several else ()))
    _refuse_missing(needed, environ)
    return _place("the environment", _OF_RANK if environ.get(_OF_RANK[3]) else _OF_RANK[:3], environ)


def _place(launcher: str, names: tuple[str, ...], environ: Mapping[str, str]) -> RankVariables:
    _refuse_missing(names, environ)
    counts = [int(environ[name]) if COUNT.fullmatch(environ[name]) else -1 for name in names]
    rank, world, local_rank = counts[:3]
    local = counts[3] if len(counts) > 3 else None
    max_ranks = world if local is None else local
    if min(counts) < 0 or rank >= world or local_rank >= max_ranks or max_ranks > world:
        wrong = ", ".join(f"{name}={environ[name]}" for name in names)
        fix = "Ranks count from 0 to the number of ranks minus one, on each node and overall."
        raise UsageError(f"{wrong} are not a valid rank", where="the environment", fix=fix)
    return RankVariables(rank, world, local_rank, local, launcher, names)


def _refuse_missing(names: tuple[str, ...], environ: Mapping[str, str]) -> None:
    missing = [name for name in names if not environ.get(name)]
    if missing:
        present = ", ".join(f"{name}={environ[name]}" for name in names if environ.get(name))
        problem = f"the environment has {present}, but not {', '.join(missing)}"
        raise UsageError(problem, where="--launcher", fix="Set all of them, or none.")


def nodes(environ: Mapping[str, str]) -> LaunchSettings:
    """Return what a cluster says of the nodes, of which this process is one; empty where none does.

    Raises:
        UsageError: it says half of it, or a number of nodes that changes.
    """
    settings: LaunchSettings = {}
    for family in (_OF_TORCHRUN, _OF_SKYPILOT):
        for flag, name in family.items():
            if environ.get(name) and not (flag == "--nproc-per-node" and environ[name] in _NUM_GPUS):
                settings.setdefault(flag, {})[name] = environ[name]
    if ips := environ.get("SKYPILOT_NODE_IPS", "").split():
        settings.setdefault("--master-addr", {})["the first of SKYPILOT_NODE_IPS"] = ips[0]
    if not {"--nnodes", "--node-rank"} & settings.keys():
        settings |= _of_pods(environ) or _of_volcano(environ)
    _refuse_elastic(environ)
    if settings and "--nnodes" not in settings:
        names_set = ", ".join(name for names in settings.values() for name in names)
        fix = "Set PET_NNODES and PET_NODE_RANK, or use --nnodes and --node-rank without --launcher env."
        raise UsageError(f"{names_set} are set, but no number of nodes", where="the environment", fix=fix)
    return settings


def _of_pods(environ: Mapping[str, str]) -> LaunchSettings:
    if not {"RANK", "WORLD_SIZE"} & environ.keys():
        return {}
    _refuse_missing(("RANK", "WORLD_SIZE", "MASTER_ADDR"), environ)
    return {flag: {name: environ[name]} for flag, name in _OF_PODS.items()}


def _of_volcano(environ: Mapping[str, str]) -> LaunchSettings:
    index = environ.get("VC_TASK_INDEX") or environ.get("VK_TASK_INDEX")
    lists = sorted(name for name in environ if _VOLCANO_HOSTS.fullmatch(name))
    if index is None or not lists:
        return {}
    if len(lists) > 1:
        problem = f"{', '.join(lists)}: several groups of pods, and VC_TASK_INDEX counts within one"
        fix = "Add Volcano's pytorch plugin to the job, which numbers all pods (RANK, WORLD_SIZE)."
        raise UsageError(problem, where="the environment", fix=fix)
    hosts = environ[lists[0]].split(",")
    return {
        "--nnodes": {f"the hosts of {lists[0]}": str(len(hosts))},
        "--node-rank": {"VC_TASK_INDEX": index},
        "--master-addr": {f"the first of {lists[0]}": hosts[0]},
    }


def _refuse_elastic(environ: Mapping[str, str]) -> None:
    if ":" in environ.get("PET_NNODES", "") or (environ.get("PET_RDZV_ENDPOINT") and not environ.get("PET_NODE_RANK")):
        names = [name for name in ("PET_NNODES", "PET_RDZV_ENDPOINT") if environ.get(name)]
        problem = f"{', '.join(f'{name}={environ[name]}' for name in names)}: elastic nodes have no fixed rank"
        fix = "Remove the elastic policy: a run has a fixed number of nodes (PET_NNODES, PET_NODE_RANK)."
        raise UsageError(problem, where="the environment", fix=fix)
