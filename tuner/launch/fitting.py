"""What is said of a run's memory, and the kernels that it computes with.

The arithmetic is `fit`'s. Installed kernels are looked up, and never imported or downloaded.
"""

from __future__ import annotations

from tuner.errors import MachineError
from tuner.fit import advice
from tuner.fit.activations import default_attention
from tuner.fit.advice import Change
from tuner.fit.candidates import TOLERANCE
from tuner.fit.levels import Fit
from tuner.fit.parameters import active_parameters, backward_share, has_formula, trained_share
from tuner.fit.sizes import gib
from tuner.fit.step_time import flops_of_step
from tuner.launch.level_and_split import LevelAndSplit
from tuner.launch.machine_facts import slowest_gpu
from tuner.machine import libraries
from tuner.machine.hardware import Hardware
from tuner.recipes.merging import Kind, Place
from tuner.recipes.recipe import Recipe
from tuner.recipes.schema import RecipeConfig
from tuner.recipes.schema.architecture import Architecture

_MAX_CHANGES = 3


def arithmetic(config: RecipeConfig, hardware: Hardware, dtype: str) -> dict[str, float] | None:
    """Return the FLOPs of training on one token and the peak FLOP/s of the slowest GPU, to compute a GPU's utilisation.

    The FLOPs of training divided by the peak are the model FLOPs utilisation of Chowdhery et al., PaLM, 2022
    (arXiv:2204.02311), appendix B: 6 FLOPs a parameter and token, 4 where it is frozen, 2 in layers below the trained
    ones; recomputation is not counted. Attention scores and a frozen reference model are left out, so the true use is
    somewhat higher.

    Returns:
        None without GPUs, in fp32, or where the GPU or the model is not known.
    """
    architecture, slowest = config.architecture, slowest_gpu(hardware)
    if slowest is None or dtype == "fp32" or architecture is None or not has_formula(architecture):
        return None
    trained, passed = trained_share(config, architecture), backward_share(config, architecture)
    flops = flops_of_step(active_parameters(architecture), trained, 1, recompute=False, backward_share=passed)
    return {"flops_per_token": flops, "peak_flops_per_gpu": slowest.peak_flops}


def why(chosen: LevelAndSplit) -> str | None:
    """Return why `auto` took the level, with the seconds and the memory that decided; None if the user named it."""
    reason = chosen.choice.describe() if chosen.choice else chosen.level_reason
    return f"{reason}; {describe(chosen.fit)}" if reason and chosen.fit else reason


def describe(fit: Fit) -> str:
    """Return one line: the memory that the run needs, and the memory that is available."""
    machines, needs = fit.machines, fit.peak
    text = f"about {gib(needs.gpu_bytes)} on each GPU (available: {gib(machines.gpu_bytes)})"
    if machines.host_bytes:
        text += f", {gib(needs.host_bytes)} on the host (available: {gib(machines.host_bytes)})"
    return text


def without_offloading(chosen: LevelAndSplit) -> list[str]:
    """Return lines about the changes after which a level that `auto` took needs no offloading; [] if none."""
    fit = chosen.fit
    if chosen.level_reason is None or fit is None or not fit.offloads or not fit.fits:
        return []
    found = _changes(chosen, fit)
    return [advice.WITHOUT_OFFLOADING, *(f"  {change.text}" for change in found[:_MAX_CHANGES])] if found else []


def _changes(chosen: LevelAndSplit, fit: Fit) -> list[Change]:
    """Return the changes after which a level fits, beyond the split with the least memory, which `auto` may take."""
    config = chosen.lightest
    assert config is not None and config.architecture is not None
    return advice.changes(config, config.architecture, fit.machines)


def warning(fit: Fit | None) -> str | None:
    """Return a warning about a run that may not fit, or None."""
    return f"This run may not fit: it needs {describe(fit)}." if fit and not fit.fits else None


def refuse_hopeless(chosen: LevelAndSplit) -> None:
    """Refuse a run that does not fit by more than `TOLERANCE`.

    Raises:
        MachineError: it does not fit its GPUs or hosts.
    """
    if chosen.fit and chosen.fit.room < -TOLERANCE:
        raise _hopeless(chosen, chosen.fit)


def _hopeless(chosen: LevelAndSplit, fit: Fit) -> MachineError:
    ways = [change.text for change in _changes(chosen, fit)[:_MAX_CHANGES]]
    fix = "One of these fits:\n  " + "\n  ".join(ways) if ways else "It needs more or larger GPUs. See tuner plan."
    return MachineError(
        f"this run does not fit: it needs {describe(fit)} at {fit.level}",
        fix=f"{fix}\nTo start anyway: --ignore-fit",
    )


WITHOUT_FLASH = {"bloom", "gpt_oss", "llama4_text"}
"""model_types with attention that flash attention 2 and 3 lack: biases, sinks, chunks (transformers 5.23)."""
_TRITON = ("cuda", "xpu")
"""Devices of NVIDIA, AMD and Intel, for which torch installs the Triton that Liger's kernels are written in."""
_MAX_HEAD = 256
"""Source: Dao-AILab/flash-attention, README: head dimensions up to 256."""


def choose_kernels(loaded: Recipe, hardware: Hardware, dtype: str) -> Recipe:
    """Return the recipe with `attn_implementation` and `use_liger_kernel` for 'auto' on these GPUs."""
    model = loaded.config.model
    if model.attn_implementation == "auto":
        name, why = _attention(loaded.config.architecture, hardware, dtype)
        loaded = loaded.settled({"model.attn_implementation": name}, Place(Kind.DERIVED, f"derived: {why}"))
    if model.use_liger_kernel == "auto":
        why = "no GPU with Triton is visible" if hardware.device not in _TRITON else "liger-kernel is not installed"
        use = hardware.device in _TRITON and libraries.is_installed("liger_kernel")
        place = Place(Kind.DERIVED, f"derived: {'liger-kernel is installed' if use else why}")
        loaded = loaded.settled({"model.use_liger_kernel": use}, place)
    return loaded


def _attention(architecture: Architecture | None, hardware: Hardware, dtype: str) -> tuple[str | None, str]:
    """Return the newest flash attention for this model on these GPUs, or transformers' choice, and why.

    A known choice of transformers is named, so that memory is planned for that attention.
    """
    lacks, other = None, None
    if architecture is not None and has_formula(architecture):
        other = default_attention(architecture)
    if not hardware.gpus:
        lacks = "no GPU is visible"
    elif not hardware.has_nvidia:
        lacks = "flash attention needs NVIDIA GPUs"
    elif dtype == "fp32":
        lacks = "flash attention needs bf16 or fp16"
    elif architecture is None or not has_formula(architecture) or architecture.model_type in WITHOUT_FLASH:
        lacks = "flash attention is not tested with this model"
    elif max(architecture.head_dim, architecture.global_head_dim or 0) > _MAX_HEAD:
        lacks = f"flash attention supports heads up to {_MAX_HEAD}"
    if lacks:
        return other, lacks
    names = libraries.installed_flash_attention([gpu.compute_capability for gpu in hardware.gpus])
    return (names[0], "installed, and these GPUs support it") if names else (other, "flash attention is not installed")
