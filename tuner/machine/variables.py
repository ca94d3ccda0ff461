"""What variables say of where a run is launched: our own beside the flags, those of MPI's launchers and of clusters.

It reads the environment that it is given and decides nothing; what follows from it is `topology`'s work. Slurm's are
in `slurm`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from tuner.errors import UsageError
from tuner.machine.slurm import COUNT

VARIABLES = {
    "--nproc-per-node": ("NPROC_PER_NODE",),
    "--nnodes": ("NNODES",),
    "--node-rank": ("NODE_RANK",),
    "--master-addr": ("ADDR", "MASTER_ADDR"),
    "--master-port": ("PORT", "MASTER_PORT"),
}
"""The variables that say the same as a flag."""
_MAX_COUNT = 1 << 20
_OF_MPI = {
    "Open MPI": (
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    "MVAPICH2": (
        *("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        *("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ),
    # Last: an mpirun that Slurm started for another MPI hands its own on to the ranks.
    "Hydra": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
"""Rank, number of ranks, local rank and number of local ranks. Hydra starts the ranks of Intel MPI and MPICH.

Seen in Open MPI 4.1 and MPICH 4.0; those of Intel MPI and MVAPICH2 as accelerate 1.15 reads them.
"""
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

Settings = dict[str, dict[str, str]]
"""By flag, all that says the same: its name and its value."""


class Place(NamedTuple):
    """Which rank this process is, as another launcher says; `launcher` and `variables` are for messages."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None
    launcher: str
    variables: tuple[str, ...]


def settings_of(flags: Mapping[str, object], environ: Mapping[str, str], cluster: Settings | None = None) -> Settings:
    """Return by flag all that says the same: the flag itself (None: not given), its variables, and a cluster's."""
    settings: Settings = {}
    for name, variables in VARIABLES.items():
        flag = flags[name.removeprefix("--").replace("-", "_")]
        settings[name] = {} if flag in (None, "") else {name: str(flag)}
        settings[name] |= {variable: environ[variable] for variable in variables if environ.get(variable)}
        settings[name] |= (cluster or {}).get(name, {})
    return settings


def text(settings: Settings, name: str) -> str | None:
    """Return the value of a flag.

    Raises:
        UsageError: two contradict each other.
    """
    if len(set(settings[name].values())) > 1:
        shown = " and ".join(f"{key}={value}" for key, value in settings[name].items())
        raise UsageError(f"{shown} contradict each other", where=name, fix="Keep one of them.")
    return next(iter(settings[name].values()), None)


def count(settings: Settings, name: str, *, minimum: int = 1, maximum: int = _MAX_COUNT) -> int | None:
    """Return the value of a flag as a count.

    Raises:
        UsageError: as `text`, or it is no count in these limits.
    """
    value = text(settings, name)
    if value is None:
        return None
    if not COUNT.fullmatch(value) or not minimum <= int(value) <= maximum:
        fix = f"Use a whole number from {minimum} to {maximum}."
        raise UsageError(f"{value!r} is not a valid number", where=where(name, *settings[name]), fix=fix)
    return int(value)


def where(name: str, *others: str) -> str:
    """Return a flag with the variables that say the same."""
    return " / ".join(dict.fromkeys((name, *VARIABLES[name], *others)))


def of_mpi(environ: Mapping[str, str]) -> Place | None:
    """Return the place that MPI's launcher has given this process, or None outside of one.

    Raises:
        UsageError: some of its variables are missing, no counts, or contradict each other.
    """
    for launcher, names in _OF_MPI.items():
        if names[0] in environ or names[1] in environ:
            return _place(launcher, names, environ)
    return None


def mpi_size(environ: Mapping[str, str]) -> int:
    """Return how many processes MPI's launcher has started with this one; 1 outside of one."""
    sizes = [environ.get(names[1], "") for names in _OF_MPI.values() if names[0] in environ]
    return int(sizes[0]) if sizes and COUNT.fullmatch(sizes[0]) else 1


def of_rank(environ: Mapping[str, str]) -> Place | None:
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


def _place(launcher: str, names: tuple[str, ...], environ: Mapping[str, str]) -> Place:
    _refuse_missing(names, environ)
    counts = [int(environ[name]) if COUNT.fullmatch(environ[name]) else -1 for name in names]
    rank, world, local_rank = counts[:3]
    local = counts[3] if len(counts) > 3 else None
    most = world if local is None else local
    if min(counts) < 0 or rank >= world or local_rank >= most or most > world:
        wrong = ", ".join(f"{name}={environ[name]}" for name in names)
        fix = "Ranks count from 0 to the number of ranks minus one, on each node and overall."
        raise UsageError(f"{wrong} are not a valid rank", where="the environment", fix=fix)
    return Place(rank, world, local_rank, local, launcher, names)


def _refuse_missing(names: tuple[str, ...], environ: Mapping[str, str]) -> None:
    missing = [name for name in names if not environ.get(name)]
    if missing:
        there = ", ".join(f"{name}={environ[name]}" for name in names if environ.get(name))
        problem = f"the environment has {there}, but not {', '.join(missing)}"
        raise UsageError(problem, where="--launcher", fix="Set all of them, or none.")


def nodes(environ: Mapping[str, str]) -> Settings:
    """Return what a cluster says of the nodes, of which this process is one; empty where none does.

    Raises:
        UsageError: it says half of it, or a number of nodes that changes.
    """
    settings: Settings = {}
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


def _of_pods(environ: Mapping[str, str]) -> Settings:
    if not {"RANK", "WORLD_SIZE"} & environ.keys():
        return {}
    _refuse_missing(("RANK", "WORLD_SIZE", "MASTER_ADDR"), environ)
    return {flag: {name: environ[name]} for flag, name in _OF_PODS.items()}


def _of_volcano(environ: Mapping[str, str]) -> Settings:
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


def speaks(environ: Mapping[str, str]) -> bool:
    """Return whether this process tells the user of a mistake: all tasks make the same, the first of them speaks."""
    if "SLURM_STEP_ID" in environ:
        return environ.get("SLURM_PROCID", "0") == "0"
    for names in _OF_MPI.values():
        if names[0] in environ:
            return environ[names[0]] == "0"
    return "TORCHELASTIC_RUN_ID" not in environ or environ.get("LOCAL_RANK", "0") == "0"


# --- Variables that other launchers left behind, and that would change a run in silence: kept from the ranks ---

_OF_ACCELERATE = "accelerate would shard the model differently"
_OF_DEEPSPEED = "DeepSpeed's launcher set it for its own ranks"
_OF_MPI_LAUNCHER = "accelerate and DeepSpeed would use it as the rank's number"
_LEFT_PREFIXES = {
    "PET_": "torchrun would use it as one of its flags",
    "TORCHELASTIC_": "torch would take this process for a rank of another torchrun",
    "ACCELERATE_": "accelerate would train differently",
    "FSDP_": _OF_ACCELERATE,
    "MEGATRON_LM_": _OF_ACCELERATE,
    "PARALLELISM_CONFIG_": _OF_ACCELERATE,
    "DEEPSPEED_": _OF_DEEPSPEED,
    "OMPI_COMM_WORLD_": _OF_MPI_LAUNCHER,
    "MV2_COMM_WORLD_": _OF_MPI_LAUNCHER,
}
_LEFT_NAMES = {
    "PYTHON_EXEC": "torchrun would start the ranks with that Python",
    "LOCAL_SIZE": _OF_DEEPSPEED,
    "CROSS_RANK": _OF_DEEPSPEED,
    "CROSS_SIZE": _OF_DEEPSPEED,
    **dict.fromkeys(("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), _OF_MPI_LAUNCHER),
}
"""Read by torch 2.13, transformers 5.23, accelerate 1.15 and DeepSpeed 0.19.8 in a rank or on the way to it:
ACCELERATE_DYNAMO_BACKEND compiles the model and so changes its weights, PET_NNODES makes torchrun wait for ever."""
_HARMLESS = {
    *("ACCELERATE_LOG_LEVEL", "ACCELERATE_DEBUG_MODE", "ACCELERATE_CPU_AFFINITY"),
    *("ACCELERATE_ENABLE_RICH", "ACCELERATE_DISABLE_RICH", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
}
"""They only print more, or bind cores."""
_EXPECTED = {
    "mpi": ("OMPI_", "MV2_", "PMI_", "MPI_"),
    "env": ("PET_", "TORCHELASTIC_"),
    "slurm": ("PMI_",),  # of srun's own, on clusters whose MPI asks for it
}
"""Expected with that launcher: the ranks do not get them, and no warning is needed."""


def leftovers(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ranks must not see, sorted by name, each with the reason."""
    reasons = {name: _reason(name) for name in sorted(environ) if name not in _HARMLESS}
    return {name: reason for name, reason in reasons.items() if reason}


def _reason(name: str) -> str | None:
    return _LEFT_NAMES.get(name) or next((why for start, why in _LEFT_PREFIXES.items() if name.startswith(start)), None)


def without_leftovers(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the leftovers; the caller starts ranks with this copy."""
    left = leftovers(environ)
    return {name: value for name, value in environ.items() if name not in left}


def leftovers_warning(environ: Mapping[str, str], launcher: str) -> str | None:
    """Return one line with the leftovers and the reasons why the ranks do not get them; None without leftovers."""
    expected = _EXPECTED.get(launcher, ())
    left = {name: reason for name, reason in leftovers(environ).items() if not name.startswith(expected)}
    if not left:
        return None
    reasons = "; ".join(dict.fromkeys(left.values()))
    return f"ignored for the ranks: {', '.join(left)} in the environment, set by another launcher: {reasons}."
