"""What is said of a run's memory; the arithmetic is `fit`'s."""

from __future__ import annotations

from tuner.errors import MachineError, Option
from tuner.fit import advice
from tuner.fit.advice import Change
from tuner.fit.candidates import TOLERANCE
from tuner.fit.levels import Fit
from tuner.fit.operations import model_flops
from tuner.fit.parameters import has_formula
from tuner.fit.sizes import gib
from tuner.launch.level_and_split import LevelAndSplit
from tuner.launch.machines import slowest_gpu
from tuner.machine.hardware import Hardware
from tuner.recipes.schema import RecipeConfig
from tuner.runs.records import Arithmetic

_MAX_CHANGES = 3


def arithmetic(config: RecipeConfig, hardware: Hardware, dtype: str) -> Arithmetic | None:
    """Return the FLOPs of training on one token and the peak FLOP/s of the slowest GPU, to compute a GPU's utilisation.

    Their ratio is the model FLOPs utilisation of `operations.model_flops`; the true use is somewhat higher.

    Returns:
        None without GPUs, in fp32, or where the GPU or the model is not known.
    """
    architecture, slowest = config.architecture, slowest_gpu(hardware)
    if slowest is None or dtype == "fp32" or architecture is None or not has_formula(architecture):
        return None
    flops = model_flops(config, architecture)
    return Arithmetic(flops_per_token=flops, peak_flops_per_gpu=slowest.peak_flops)


def why(level_and_split: LevelAndSplit) -> str | None:
    """Return why `auto` took the level, with the seconds and the memory that decided; None if the user named it."""
    reason = level_and_split.choice.describe() if level_and_split.choice else level_and_split.level_reason
    return f"{reason}; {describe(level_and_split.fit)}" if reason and level_and_split.fit else reason


def describe(fit: Fit) -> str:
    """Return the memory that a run needs of each GPU and of the host, and what is available."""
    machines, needs = fit.machines, fit.peak
    parts = [
        ("on each GPU", needs.gpu_bytes, machines.gpu_bytes),
        ("on the host", needs.host_bytes, machines.host_bytes),
    ]
    sizes = [
        f"{gib(needed)} {where} ({percent(needed, there)} of {gib(there)} available)"
        for where, needed, there in parts
        if there
    ]
    return f"about {', '.join(sizes)}"


def percent(needed: float, available: float) -> str:
    """Return which part of the memory that is there a run needs, such as '11 %'."""
    return f"{100 * needed / available:.0f} %"


def without_offloading(level_and_split: LevelAndSplit) -> list[str]:
    """Return lines about the changes after which a level that `auto` took needs no offloading; [] if none."""
    fit = level_and_split.fit
    if level_and_split.choice is None or fit is None or not fit.offloads or not fit.fits:
        return []
    changes = _changes(level_and_split, fit)
    return [advice.WITHOUT_OFFLOADING, *(f"  {change.text}" for change in changes[:_MAX_CHANGES])] if changes else []


def _changes(level_and_split: LevelAndSplit, fit: Fit) -> list[Change]:
    """Return the changes after which a level fits, beyond the split with the least memory, which `auto` may take."""
    assert level_and_split.compared is not None
    config = level_and_split.compared.candidates[0].config
    assert config.architecture is not None
    return advice.changes(config, config.architecture, fit.machines, level_and_split.refused)


def warning(fit: Fit | None) -> str | None:
    """Return a warning about a run that may not fit, or None."""
    return f"This run may not fit: it needs {describe(fit)}." if fit and not fit.fits else None


def hopeless(level_and_split: LevelAndSplit) -> MachineError | None:
    """Return what is wrong with a run that does not fit by more than `TOLERANCE`; None: it may fit."""
    fit = level_and_split.fit
    if fit is None or fit.room >= -TOLERANCE:
        return None
    ways = [change.text for change in _changes(level_and_split, fit)[:_MAX_CHANGES]]
    fix = "One of these fits:\n  " + "\n  ".join(ways) if ways else "It needs more or larger GPUs. See tuner plan."
    return MachineError(
        f"this run does not fit: it needs {describe(fit)} at {fit.level}",
        fix=f"{fix}\nTo start anyway: {Option('ignore_fit', True)}",
    )
