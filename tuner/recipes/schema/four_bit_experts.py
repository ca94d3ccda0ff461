"""Experts in 4 bits: what a recipe and its DeepSpeed config must be for them.

The plan and the rank use it; it computes no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tuner.errors import Key, RecipeError, TunerError
from tuner.recipes.schema import RecipeConfig

_WITHOUT = Key("quantization.experts", False)
_ALL_AT_ONCE = (
    "experts in 4 bits need recomputation: a layer that is not computed again keeps its experts in 16 bits until its "
    "backward pass"
)


def refuse(config: RecipeConfig) -> None:
    """Refuse what does not work, or was not tried, with experts in 4 bits.

    Raises:
        TunerError: the recipe asks for it.
    """
    if error := next(problems(config), None):
        raise error


def problems(config: RecipeConfig) -> Iterator[TunerError]:
    """Yield what of a recipe does not work, or was not tried, with experts in 4 bits."""
    cfg = config.train_cfg
    if cfg.gradient_checkpointing is False:
        key = "train_cfg.gradient_checkpointing"
        yield RecipeError(_ALL_AT_ONCE, where=key, fix=f"Use {Key('gradient_checkpointing', True)}, or {_WITHOUT}.")
    if isinstance(cfg.recomputed_layers, int):
        key = "train_cfg.recomputed_layers"
        yield RecipeError(_ALL_AT_ONCE, where=key, fix=f"Use {Key('recomputed_layers', None)}, or {_WITHOUT}.")
    for key in ("torch_compile", "activation_offloading"):
        if getattr(cfg, key):
            problem = f"{key} was not tried with experts in 4 bits"
            yield RecipeError(problem, where=f"train_cfg.{key}", fix=f"Use {Key(key, False)}, or {_WITHOUT}.")
    generation = config.objective.generated_by
    if generation is not None and generation.engine == "vllm":
        problem = "generation by vLLM was not tried with experts in 4 bits"
        yield RecipeError(problem, where="objective.generation.engine", fix=f"Use 'transformers', or {_WITHOUT}.")


def refuse_disks(zero: Mapping[str, Any]) -> None:
    """Refuse a block `zero_optimization` of a DeepSpeed config that swaps to disks.

    Raises:
        RecipeError: it does.
    """
    blocks = [key for key in ("offload_optimizer", "offload_param") if (zero.get(key) or {}).get("device") == "nvme"]
    if blocks:
        problem = "swapping to disks was not tried with experts in 4 bits"
        fix = f"Use the device cpu, or {_WITHOUT}."
        raise RecipeError(problem, where=f"zero_optimization.{blocks[0]}.device", fix=fix)
