"""The attention of a run, and Liger's kernels on its GPUs; they are looked up, and never imported or downloaded."""

from __future__ import annotations

from tuner.fit.activations import default_attention
from tuner.fit.parameters import has_formula
from tuner.machine import libraries
from tuner.machine.hardware import Hardware
from tuner.recipes import model_facts
from tuner.recipes.merging import Kind, Place
from tuner.recipes.recipe import Recipe
from tuner.recipes.schema import RecipeConfig
from tuner.recipes.schema.architecture import VARLEN, Architecture, may_share_row
from tuner.recipes.schema.tensor_parallel import LIGER, NO_LIGER

WITHOUT_FLASH = {"bloom", "gemma3", "gemma4", "gpt_oss", "llama4_text"}
"""model_types with attention that flash attention 2 and 3 lack: biases, sinks, chunks, and images whose tokens see each
other (transformers 5.24)."""
_TRITON = ("cuda", "xpu")
"""Devices of NVIDIA, AMD and Intel, for which torch installs the Triton that Liger's kernels are written in."""
_MAX_HEAD = 256
"""Source: Dao-AILab/flash-attention, README: head dimensions up to 256."""


def choose_kernels(recipe: Recipe, hardware: Hardware, dtype: str, *, divides_experts: bool = False) -> Recipe:
    """Return the recipe with `attn_implementation` and `use_liger_kernel` for 'auto' on this hardware.

    Args:
        divides_experts: Ranks divide the experts of each layer.
    """
    model = recipe.config.model
    if model.attn_implementation == "auto":
        name, why = _attention(recipe.config, hardware, dtype)
        recipe = recipe.settled({"model.attn_implementation": name}, Place(Kind.DERIVED, f"derived: {why}"))
    if model.use_liger_kernel == "auto":
        lacks = _what_liger_lacks(recipe.config, hardware, divides_experts=divides_experts)
        place = Place(Kind.DERIVED, f"derived: {lacks or 'liger-kernel is installed'}")
        recipe = recipe.settled({LIGER: lacks is None}, place)
    return recipe


def _what_liger_lacks(config: RecipeConfig, hardware: Hardware, *, divides_experts: bool) -> str | None:
    """Return why Liger's kernels are not for this run, or None."""
    if hardware.device not in _TRITON:
        return "no GPU with Triton is visible"
    if not libraries.is_installed("liger_kernel"):
        return "liger-kernel is not installed"
    if divides_experts or config.train_cfg.autotp_size > 1:
        return f"ranks share the model, which {NO_LIGER}"
    return None


def _attention(config: RecipeConfig, hardware: Hardware, dtype: str) -> tuple[str | None, str]:
    """Return the attention for this model on this hardware, and why.

    That is the newest flash attention of a package, then `models.attention`, then transformers' choice. A known choice
    of transformers is named, so that memory is planned for that attention.
    """
    architecture, varlen_lacks = config.architecture, what_varlen_lacks(config, hardware, dtype)
    known = architecture if architecture is not None and has_formula(architecture) else None
    other = default_attention(known) if known else None
    if not hardware.gpus:
        if varlen_lacks is None:
            return VARLEN, "samples of a row are computed one by one"
        return other, "no GPU is visible"
    lacks = _what_flash_lacks(known, hardware, dtype)
    if lacks is None and (known is None or has_no_flash(config)):
        lacks = "is not tested with this model"
    names = libraries.installed_flash_attention([gpu.compute_capability for gpu in hardware.gpus])
    if names and not lacks:
        return names[0], "installed, and these GPUs support it"
    if varlen_lacks is None:
        return VARLEN, "torch's flash attention keeps the samples of a row apart"
    return other, f"flash attention {lacks or f'is not installed, and that of torch {varlen_lacks}'}"


def has_no_flash(config: RecipeConfig) -> bool:
    """Return whether the model is known to need what no package's flash attention computes."""
    architecture = config.architecture
    tower = architecture.vision_config if architecture and config.reads_images else None
    return not WITHOUT_FLASH.isdisjoint(part.model_type for part in (architecture, tower) if part)


def what_varlen_lacks(config: RecipeConfig, hardware: Hardware, dtype: str) -> str | None:
    """Return why `models.attention` is not for this run, or None: rows of several samples, which it keeps apart."""
    architecture = config.architecture
    tower = architecture.vision_config if architecture and config.reads_images else None
    is_known = tower is not None or not config.reads_images
    image_type = tower.model_type if tower else None
    if architecture is None or not is_known or not may_share_row(architecture.model_type, image_type, varlen=True):
        return "is not tested with this model"
    if model_facts.runs_own_code(vars(config.model), architecture.model_type):
        return "is not tested with code that comes with a model"
    is_shared = config.train_cfg.sequence_parallel_size > 1
    if not config.objective.facts.packs or (is_shared and default_attention(architecture) == "sdpa"):
        return "is for rows of several samples on one rank"
    if not hardware.gpus:
        return None
    if config.train_cfg.torch_compile:
        return "is not tested with torch.compile"
    if not libraries.has_varlen_attention(gpu.compute_capability for gpu in hardware.gpus):
        return "needs torch 2.12 and GPUs of compute capability 8.0"
    return _what_flash_lacks(architecture, hardware, dtype)


def _what_flash_lacks(architecture: Architecture | None, hardware: Hardware, dtype: str) -> str | None:
    """Return why neither a package's flash attention nor torch's computes this on these GPUs, or None."""
    if not hardware.has_nvidia:
        return "needs NVIDIA GPUs"
    if dtype == "fp32":
        return "needs bf16 or fp16"
    if architecture and max(architecture.head_dim, architecture.global_head_dim or 0) > _MAX_HEAD:
        return f"supports heads up to {_MAX_HEAD}"
    return None
