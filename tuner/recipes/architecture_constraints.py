"""What an architecture does not take of the values that the catalog proposes for every model.

A catalog's value gives way aloud; a user's own is refused. It opens no file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tuner.errors import RecipeError
from tuner.recipes.merging import Layer, Merged, nested
from tuner.recipes.origin import Keys, Kind, Place
from tuner.recipes.schema import LOADERS
from tuner.recipes.schema.architecture import KEEPS_APART
from tuner.recipes.schema.objectives import scores

_GROUPED = ("q_proj", "k_proj", "v_proj", "o_proj")
_LATENT = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
FUSED_EXPERTS = {
    **dict.fromkeys(("glm4_moe", "mixtral", "olmoe", "qwen3_moe"), _GROUPED),
    **dict.fromkeys(("afmoe", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "minimax_m2"), _GROUPED),
    "minimax": (*_GROUPED, "qkv_proj", "out_proj"),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), _LATENT),
    "qwen3_next": (*_GROUPED, "in_proj_qkvz", "in_proj_ba", "out_proj"),
}
"""model_types whose experts PEFT 0.21 adapts as one tensor, without dropout and without DoRA; their other layers."""
ODD_LINEARS = {
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2"), ("in_proj",)),
    **dict.fromkeys(("bamba", "falcon_h1", "jamba", "nemotron_h"), (*_GROUPED, "in_proj", *_MLP)),
    "granitemoehybrid": (*_GROUPED, "in_proj", "input_linear", "output_linear"),
    "llama4_text": (*_GROUPED, *_MLP),
    "phimoe": _GROUPED,
    "zamba2": (*_GROUPED, "in_proj", "gate_up_proj", "down_proj"),
}
"""model_types with linear layers that an adapter does not fit, and their others.

A router that returns more than one tensor ends the run. Kernels of a state space take the weights of its layers alone,
and pass the adapter by: PEFT 0.21 refuses some of them.
"""
_NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def settle(merged: Merged, kind: str | None) -> None:
    """Let what the model does not take give way.

    Args:
        merged: The recipe's values.
        kind: The model_type; None: it is not known before the model is loaded.

    Raises:
        RecipeError: the user asked for it.
    """
    for keys, value, why in (*_adapter(merged, kind), *_packing(merged, kind), *_router(merged)):
        _give_way(merged, keys, value, why)


def _adapter(merged: Merged, kind: str | None) -> Iterator[tuple[Keys, Any, str]]:
    adapter = merged.values.get("adapter")
    if kind is None or not isinstance(adapter, dict) or adapter.get("target_modules") != "all-linear":
        return
    if kind in ODD_LINEARS:
        why = f"an adapter does not fit every linear layer of a {kind} model, so the others are adapted"
        yield ("adapter", "target_modules"), ODD_LINEARS[kind], why
    asked = next((key for key in ("lora_dropout", "use_dora") if adapter.get(key)), None)
    if asked and kind in FUSED_EXPERTS:
        why = f"PEFT adapts the fused experts of {kind} only without {asked}, so only attention is adapted"
        yield ("adapter", "target_modules"), FUSED_EXPERTS[kind], why


def _packing(merged: Merged, kind: str | None) -> Iterator[tuple[Keys, Any, str]]:
    if kind is None or kind in KEEPS_APART:
        return
    why = f"packed samples may attend to each other in a {kind} model, so each sample is a padded row of its own"
    for loader in LOADERS:
        keys = (loader, "dataset", "packing")
        if merged.get(keys) is True:
            yield keys, False, why


def _router(merged: Merged) -> Iterator[tuple[Keys, Any, str]]:
    keys, facts = ("model", "router_aux_loss_coef"), merged.values.get("architecture")
    if not merged.get(keys):
        return
    if isinstance(facts, dict) and not any(facts.get(key) for key in _NUMBERS_OF_EXPERTS):
        yield keys, None, "the model has no experts, so it has no router loss"
    if scores(merged.get(("objective", "type"))):
        yield keys, None, "a reward model is trained without router loss"


def _give_way(merged: Merged, keys: Keys, value: Any, why: str) -> None:
    dotted, place, old = ".".join(keys), merged.place_of(keys), merged.get(keys)
    if place.kind is not Kind.PACKAGE:
        raise RecipeError(f"{dotted} = {old!r}: {why}", where=place, fix=f"Set {dotted}={value!r}, or remove it.")
    merged.lay(Layer.at(Place(Kind.DERIVED, f"derived: {why}"), nested(keys, value), note=f"{dotted}={value!r}: {why}"))
