"""What other launchers left in the environment and would change a run in silence: named, and kept from the ranks.

It changes no environment; who starts ranks takes the copy that `without` returns.
"""

from __future__ import annotations

from collections.abc import Mapping

_OF_ACCELERATE = "accelerate would shard the model differently"
_OF_DEEPSPEED = "DeepSpeed's launcher set it for its own ranks"
_OF_MPI = "accelerate and DeepSpeed would use it as the rank's number"
_PREFIXES = {
    "PET_": "torchrun would use it as one of its flags",
    "TORCHELASTIC_": "torch would take this process for a rank of another torchrun",
    "ACCELERATE_": "accelerate would train differently",
    "FSDP_": _OF_ACCELERATE,
    "MEGATRON_LM_": _OF_ACCELERATE,
    "PARALLELISM_CONFIG_": _OF_ACCELERATE,
    "DEEPSPEED_": _OF_DEEPSPEED,
    "OMPI_COMM_WORLD_": _OF_MPI,
    "MV2_COMM_WORLD_": _OF_MPI,
}
_NAMES = {
    "PYTHON_EXEC": "torchrun would start the ranks with that Python",
    "LOCAL_SIZE": _OF_DEEPSPEED,
    "CROSS_RANK": _OF_DEEPSPEED,
    "CROSS_SIZE": _OF_DEEPSPEED,
    **dict.fromkeys(("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), _OF_MPI),
}
"""Read by torch 2.13, transformers 5.23, accelerate 1.15 and DeepSpeed 0.19.8 in a rank or on the way to it:
ACCELERATE_DYNAMO_BACKEND compiles the model and so changes its weights, PET_NNODES makes torchrun wait for ever."""
_HARMLESS = {
    *("ACCELERATE_LOG_LEVEL", "ACCELERATE_DEBUG_MODE", "ACCELERATE_CPU_AFFINITY"),
    *("ACCELERATE_ENABLE_RICH", "ACCELERATE_DISABLE_RICH", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
}
"""What only says more, or binds cores."""
_EXPECTED = {
    "mpi": ("OMPI_", "MV2_", "PMI_", "MPI_"),
    "env": ("PET_", "TORCHELASTIC_"),
    "slurm": ("PMI_",),  # of srun's own, on clusters whose MPI asks for it
}
"""What is no leftover where that launcher was asked for: the ranks do not get it, and nobody needs to hear of it."""


def found(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ranks must not see, sorted by name, each with the reason."""
    reasons = {name: _reason(name) for name in sorted(environ) if name not in _HARMLESS}
    return {name: reason for name, reason in reasons.items() if reason}


def _reason(name: str) -> str | None:
    return _NAMES.get(name) or next((why for start, why in _PREFIXES.items() if name.startswith(start)), None)


def without(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without them."""
    left = found(environ)
    return {name: value for name, value in environ.items() if name not in left}


def warning(environ: Mapping[str, str], launcher: str) -> str | None:
    """Return one line that names them and says why the ranks do not get them, or None where there are none."""
    expected = _EXPECTED.get(launcher, ())
    left = {name: reason for name, reason in found(environ).items() if not name.startswith(expected)}
    if not left:
        return None
    reasons = "; ".join(dict.fromkeys(left.values()))
    return f"ignored for the ranks: {', '.join(left)} in the environment, set by another launcher: {reasons}."
