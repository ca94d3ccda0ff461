"""Bytes of model states per GPU, from a model's facts and a ZeRO level, by the published formulas.

It takes plain numbers and the recipe's blocks; it looks at no machine and opens no file.
"""

from __future__ import annotations

from dataclasses import dataclass

from tuner.fit.adapters import trained_by
from tuner.fit.parameters import built
from tuner.recipes.architecture import Architecture
from tuner.recipes.objective import Dpo, Kto, Objective
from tuner.recipes.schema import RecipeConfig

LEVELS = (
    "none",
    "deepspeed_zero1",
    "deepspeed_zero2",
    "deepspeed_zero2_offload",
    "deepspeed_zero3",
    "deepspeed_zero3_offload",
)
"""From the fastest to the one that needs the least GPU memory, as Hugging Face's DeepSpeed guide orders them."""


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters: `trainable`, `frozen` in 16 bits, and `quantized` (frozen, stored in fewer bits)."""

    trainable: int
    frozen: int = 0
    quantized: int = 0
    quantized_bits: int = 4

    @property
    def frozen_bytes(self) -> float:
        """Bytes of the frozen weights; 4-bit storage carries about 0.016 bytes of scales a weight (double quant)."""
        per_weight = 0.516 if self.quantized_bits == 4 else 1.0
        return 2 * self.frozen + per_weight * self.quantized


def count(recipe: RecipeConfig, facts: Architecture) -> Parameters:
    """Return how many parameters a recipe trains, freezes and quantizes, a frozen reference model included.

    Raises:
        ModelError: there is no formula for the model_type.
    """
    model = built(facts)
    score = model.head.inputs if recipe.objective.type == "reward" else 0
    total = model.backbone + score if score else model.parameters
    if recipe.adapter is None:
        last = recipe.train_cfg.trainable_layers
        trainable = sum(layer.parameters for layer in model.layers[-last:]) + score if last else total
        return Parameters(trainable, total - trainable + (total if _has_reference(recipe.objective) else 0))
    # PEFT keeps the score head as it was beside the copy that it trains.
    trainable = trained_by(recipe.adapter, model) + score
    if recipe.quantization is None:
        return Parameters(trainable, frozen=total)
    quantized = sum(linear.weights for linear in model.all_linears() if linear.quantizable)
    return Parameters(trainable, total - quantized, quantized, recipe.quantization.bits)


def _has_reference(objective: Objective) -> bool:
    """Say whether TRL keeps a second, frozen model; with an adapter it takes the first one without the adapter."""
    return isinstance(objective, Dpo | Kto) and not objective.precompute_ref_log_probs


def model_state_bytes(level: str, parameters: Parameters, world_size: int) -> float:
    """Return the bytes of weights, gradients and Adam states that one GPU holds at the end of backward.

    With T trainable parameters, N ranks and F bytes of frozen weights, mixed precision:
    none 16T + F; ZeRO-1 4T + 12T/N + F; ZeRO-2 2T + 14T/N + F; ZeRO-3 (16T + F)/N; offloading the optimizer leaves
    2T (ZeRO-2) or 2T/N (ZeRO-3); offloading the parameters too leaves 0.

    Source: Rajbhandari et al., ZeRO, 2020 (arXiv:1910.02054), section 3 and figure 1, with K = 12.
    """
    trainable, frozen, ranks = parameters.trainable, parameters.frozen_bytes, world_size
    return {
        "none": 16 * trainable + frozen,
        "deepspeed_zero1": 4 * trainable + 12 * trainable / ranks + frozen,
        "deepspeed_zero2": 2 * trainable + 14 * trainable / ranks + frozen,
        "deepspeed_zero2_offload": 2 * trainable + frozen,
        "deepspeed_zero3": (16 * trainable + frozen) / ranks,
        "deepspeed_zero3_offload": 0,
    }[level]
