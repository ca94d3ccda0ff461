"""The variables that say where a run is launched: tuner's own beside the flags, and what other launchers left behind.

It reads the environment that it is given and decides nothing; what follows from it is `topology`'s work. Those of
clusters and MPI are in `clusters`, those of Slurm in `slurm`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tuner.errors import UsageError

COUNT = re.compile(r"[0-9]{1,7}")
"""A count that int() takes: str.isdigit() is also true of "²", and of more digits than Python converts."""
VARIABLES = {
    "--nproc-per-node": ("NPROC_PER_NODE",),
    "--nnodes": ("NNODES",),
    "--node-rank": ("NODE_RANK",),
    "--master-addr": ("ADDR", "MASTER_ADDR"),
    "--master-port": ("PORT", "MASTER_PORT"),
}
"""The variables that say the same as a flag."""
_MAX_COUNT = 1 << 20
OF_MPI = {
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
LaunchSettings = dict[str, dict[str, str]]
"""By flag, all that says the same: its name and its value."""


def settings_of(
    flags: Mapping[str, object], environ: Mapping[str, str], cluster: LaunchSettings | None = None
) -> LaunchSettings:
    """Return by flag all that says the same: the flag itself (None: not given), its variables, and a cluster's."""
    settings: LaunchSettings = {}
    for name, variables in VARIABLES.items():
        flag = flags[name.removeprefix("--").replace("-", "_")]
        settings[name] = {} if flag in (None, "") else {name: str(flag)}
        settings[name] |= {variable: environ[variable] for variable in variables if environ.get(variable)}
        settings[name] |= (cluster or {}).get(name, {})
    return settings


def text(settings: LaunchSettings, name: str) -> str | None:
    """Return the value of a flag.

    Raises:
        UsageError: two contradict each other.
    """
    if len(set(settings[name].values())) > 1:
        shown = " and ".join(f"{key}={value}" for key, value in settings[name].items())
        raise UsageError(f"{shown} contradict each other", where=name, fix="Keep one of them.")
    return next(iter(settings[name].values()), None)


def count(settings: LaunchSettings, name: str, *, minimum: int = 1, maximum: int = _MAX_COUNT) -> int | None:
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


def node_counts(settings: LaunchSettings) -> tuple[int, int]:
    """Return the fewest nodes that a run needs, and all of them: `--nnodes` is a number, or MIN:MAX.

    Raises:
        UsageError: as `count`, or MIN is above MAX.
    """
    value = text(settings, "--nnodes") or "1"
    min_nodes, colon, max_nodes = value.partition(":")
    if not colon:
        return (count(settings, "--nnodes") or 1,) * 2
    if not all(COUNT.fullmatch(part) and 1 <= int(part) <= _MAX_COUNT for part in (min_nodes, max_nodes)):
        fix = "Use a number of nodes such as 4, or the fewest and the most, such as 3:4."
        raise UsageError(f"{value!r} is not a valid number", where=where("--nnodes", *settings["--nnodes"]), fix=fix)
    if int(min_nodes) > int(max_nodes):
        fix = f"Use {max_nodes}:{min_nodes}."
        raise UsageError(
            f"{min_nodes} is more than {max_nodes}", where=where("--nnodes", *settings["--nnodes"]), fix=fix
        )
    return int(min_nodes), int(max_nodes)


def where(name: str, *other_names: str) -> str:
    """Return a flag with the variables that say the same."""
    return " / ".join(dict.fromkeys((name, *VARIABLES[name], *other_names)))


def mpi_size(environ: Mapping[str, str]) -> int:
    """Return how many processes MPI's launcher has started with this one; 1 outside of one."""
    sizes = [environ.get(names[1], "") for names in OF_MPI.values() if names[0] in environ]
    return int(sizes[0]) if sizes and COUNT.fullmatch(sizes[0]) else 1


def speaks(environ: Mapping[str, str]) -> bool:
    """Return whether this process tells the user of a mistake: all tasks make the same, the first of them speaks."""
    if "SLURM_STEP_ID" in environ:
        return environ.get("SLURM_PROCID", "0") == "0"
    for names in OF_MPI.values():
        if names[0] in environ:
            return environ[names[0]] == "0"
    return "TORCHELASTIC_RUN_ID" not in environ or environ.get("LOCAL_RANK", "0") == "0"


# --- Variables that other launchers left behind, and that would change a run in silence: kept from the ranks ---

_OF_ACCELERATE = "accelerate would shard the model differently"
_OF_DEEPSPEED = "DeepSpeed's launcher set it for its own ranks"
_OF_MPI_LAUNCHER = "accelerate and DeepSpeed would use it as the rank's number"
_LEFT_PREFIXES = {
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
    "LOCAL_SIZE": _OF_DEEPSPEED,
    "CROSS_RANK": _OF_DEEPSPEED,
    "CROSS_SIZE": _OF_DEEPSPEED,
    **dict.fromkeys(("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), _OF_MPI_LAUNCHER),
}
"""Read by torch 2.13, transformers 5.24, accelerate 1.15 and DeepSpeed 0.19.8 in a rank:
ACCELERATE_DYNAMO_BACKEND compiles the model and so changes its weights."""
_HARMLESS = {
    *("ACCELERATE_LOG_LEVEL", "ACCELERATE_DEBUG_MODE", "ACCELERATE_CPU_AFFINITY"),
    *("ACCELERATE_ENABLE_RICH", "ACCELERATE_DISABLE_RICH", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
}
"""They only print more, or bind cores."""
_EXPECTED = {
    "mpi": ("OMPI_", "MV2_", "PMI_", "MPI_"),
    "env": ("TORCHELASTIC_",),
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
    ignored = leftovers(environ)
    return {name: value for name, value in environ.items() if name not in ignored}


def leftovers_warning(environ: Mapping[str, str], launcher: str) -> str | None:
    """Return one line with the leftovers and the reasons why the ranks do not get them; None without leftovers."""
    expected = _EXPECTED.get(launcher, ())
    ignored = {name: reason for name, reason in leftovers(environ).items() if not name.startswith(expected)}
    if not ignored:
        return None
    reasons = "; ".join(dict.fromkeys(ignored.values()))
    return f"ignored for the ranks: {', '.join(ignored)} in the environment, set by another launcher: {reasons}."
