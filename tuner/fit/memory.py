"""The levels, and how many parameters a recipe trains, freezes and quantizes.

It takes the recipe and the model's facts; it knows no bytes and looks at no machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from tuner.fit.lora import trained_by
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
