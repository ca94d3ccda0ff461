"""What is said of a run's memory; the arithmetic is `fit`'s."""

from __future__ import annotations

from typing import NamedTuple

from tuner.errors import MachineError, Option
from tuner.files import sized
from tuner.fit import advice
from tuner.fit.advice import Change
from tuner.fit.candidates import TOLERANCE
from tuner.fit.levels import Fit
from tuner.fit.operations import model_flops
from tuner.fit.parameters import has_formula
from tuner.launch.checks.host import host_bytes
from tuner.launch.level_and_split import LevelAndSplit
from tuner.launch.machines import slowest_gpu
from tuner.launch.resolved_run import ResolvedRun
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


def line(run: ResolvedRun) -> str | None:
    """Return the line about the memory that a run needs; None: it is not known, or a warning or a refusal says it."""
    if run.fit:
        bound, needs, purpose = "about", _needs(run.fit), ""
    else:
        needed, ram_bytes = host_bytes(run) or 0.0, 0 if run.hardware.gpus else run.hardware.host_memory_bytes
        bound, needs = "at least", [_Need(needed, "on the host", ram_bytes)] if needed and ram_bytes else []
        purpose = " for weights and optimizer states"
    if not needs or any(need.bytes > need.available for need in needs):
        return None
    sizes = [f"{need.size} ({need.bytes / need.available:.0%} of {sized(need.available)})" for need in needs]
    return f"memory: needs {bound} {', '.join(sizes)}{purpose}"


def describe(fit: Fit) -> str:
    """Return the memory that a run needs of each GPU and of the host, and what is available."""
    return f"about {', '.join(f'{need.size} (available: {sized(need.available)})' for need in _needs(fit))}"


class _Need(NamedTuple):
    """Bytes that a run needs in one place, and that are there."""

    bytes: float
    where: str
    available: int

    @property
    def size(self) -> str:
        return f"{sized(self.bytes)} {self.where}"


def _needs(fit: Fit) -> list[_Need]:
    """Return what a run needs of each memory whose size is known."""
    machines = fit.machines
    needs = (
        _Need(fit.peak.gpu_bytes, "on each GPU", machines.gpu_bytes),
        _Need(fit.peak.host_bytes, "on the host", machines.host_bytes),
    )
    return [need for need in needs if need.available]


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
    message = f"this run does not fit: it needs {describe(fit)} at {fit.level}"
    return MachineError(message, fix=f"{fix}\nTo start anyway: {Option('ignore_fit', True)}")
