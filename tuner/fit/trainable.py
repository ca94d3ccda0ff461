"""How many parameters a recipe trains, freezes and quantizes; of an adapter, those of PEFT 0.21's LoRA.

It takes the recipe and the model's architecture; it knows no bytes and looks at no machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tuner.fit.decoder_layer import Experts, Linear
from tuner.fit.families import Family
from tuner.fit.parameters import Built, built
from tuner.recipes.schema import Adapter, RecipeConfig
from tuner.recipes.schema.architecture import Architecture


class Parameters(NamedTuple):
    """Numbers of parameters: `trainable`, `frozen` in 16 bits, and `quantized` (frozen, stored in fewer bits)."""

    trainable: int
    frozen: int = 0
    quantized: int = 0
    quantized_bits: int = 4


def count(recipe: RecipeConfig, architecture: Architecture) -> Parameters:
    """Return how many parameters a recipe trains, freezes and quantizes, a frozen reference model included.

    Raises:
        ModelError: there is no formula for the model_type.
    """
    model = built(architecture)
    score = model.head.inputs if recipe.objective.facts.scores else 0
    total = model.backbone + score if score else model.parameters
    if recipe.adapter is None:
        # With an adapter, the reference is the same model without the adapter.
        last = recipe.train_cfg.trainable_layers
        trainable = sum(layer.parameters for layer in model.layers[-last:]) + score if last else total
        return Parameters(trainable, total - trainable + (total if recipe.objective.loads_reference else 0))
    # PEFT keeps the score head as it was beside the copy that it trains.
    trainable = _of_adapter(recipe.adapter, model) + score
    if recipe.quantization is None:
        return Parameters(trainable, frozen=total)
    quantized = sum(linear.weights for linear in model.all_linears() if linear.quantizable)
    return Parameters(trainable, total - quantized, quantized, recipe.quantization.bits)


def _of_adapter(adapter: Adapter, model: Built) -> int:
    """Return the parameters of an adapter, of DoRA's magnitudes and of the copies that `modules_to_save` trains.

    A regular expression in target_modules is taken for 'all-linear', which is no less.
    """
    low_rank = sum(adapter.r * (one.inputs + one.outputs) for one in _targets(adapter, model))
    magnitudes = sum(one.outputs for one in _targets(adapter, model)) if adapter.use_dora else 0
    experts = sum(on_experts(adapter, model.family, layer.experts) for layer in model.layers if layer.experts)
    return low_rank + magnitudes + experts + _copies(adapter.modules_to_save or (), model)


def _targets(adapter: Adapter, model: Built) -> Iterator[Linear]:
    # PEFT 0.21 takes the names of experts that transformers 5 fused for the experts alone: a shared expert's
    # 'gate_proj', or a dense layer's, gets no adapter.
    fused = model.family.split_experts
    if isinstance(adapter.target_modules, str):
        yield from (one for one in model.all_linears() if one.name.rpartition(".")[2] not in fused)
        return
    names = [name for name in adapter.target_modules if name.rpartition(".")[2] not in fused]
    embeddings = Linear(model.family.embeddings, model.embeddings // model.head.inputs, model.head.inputs)
    for one in (*model.all_linears(), model.head, embeddings):
        if any(f".{one.name}".endswith(f".{name}") for name in names):
            yield one


def on_experts(adapter: Adapter, family: Family, experts: Experts) -> int:
    """Return the parameters of an adapter on the experts of one layer and their router."""
    if not family.split_experts:
        return 0
    router, gate, _, down = (
        isinstance(adapter.target_modules, str)
        or any(f".{target}".endswith(f".{name}") for target in adapter.target_modules)
        for name in family.split_experts
    )
    num, hidden, width, rank = experts.num, experts.hidden, experts.width, adapter.r
    gate_up = 2 * rank * num * (hidden + 2 * width)
    return router * rank * (hidden + num) + gate * gate_up + down * rank * num * (width + hidden)


def _copies(names: Iterable[str], model: Built) -> int:
    sizes = {model.family.embeddings: model.embeddings, model.head.name: model.head.parameters}
    return sum(size for module, size in sizes.items() if any(module.endswith(name) for name in names))
