"""What an architecture does not take of the values that the catalog proposes for every model.

A catalog's value gives way aloud; a user's own is refused. It opens no file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tuner.errors import RecipeError
from tuner.recipes.layers import Layer, Merged
from tuner.recipes.origin import Kind, Place
from tuner.recipes.source import Keys

_GROUPED = ("q_proj", "k_proj", "v_proj", "o_proj")
_LATENT = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
FUSED_EXPERTS = {
    **dict.fromkeys(("glm4_moe", "mixtral", "olmoe", "qwen3_moe"), _GROUPED),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), _LATENT),
    "qwen3_next": (*_GROUPED, "in_proj_qkvz", "in_proj_ba", "out_proj"),
}
"""model_types whose experts PEFT 0.21 adapts as one tensor, without dropout and without DoRA; their other layers."""
LEAKS_WHEN_PACKED = frozenset(("bloom", "falcon", "gpt_oss", "opt", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"))
"""model_types in which samples of a packed row see each other in transformers 5.23 (measured): their masks ignore
position_ids, or linear attention takes its state along."""
_LOADERS = ("train_dataloader", "val_dataloader")


def settle(merged: Merged) -> None:
    """Let what the model does not take give way.

    Raises:
        RecipeError: the user asked for it.
    """
    facts = merged.values.get("architecture")
    kind = facts.get("model_type") if isinstance(facts, dict) else None
    for keys, value, why in (*_adapter(merged, str(kind)), *_packing(merged, str(kind))):
        _give_way(merged, keys, value, why)


def _adapter(merged: Merged, kind: str) -> Iterator[tuple[Keys, Any, str]]:
    adapter = merged.values.get("adapter")
    if kind not in FUSED_EXPERTS or not isinstance(adapter, dict) or adapter.get("target_modules") != "all-linear":
        return
    asked = next((key for key in ("lora_dropout", "use_dora") if adapter.get(key)), None)
    if asked:
        why = f"PEFT adapts the fused experts of {kind} only without {asked}, so attention alone is adapted"
        yield ("adapter", "target_modules"), FUSED_EXPERTS[kind], why


def _packing(merged: Merged, kind: str) -> Iterator[tuple[Keys, Any, str]]:
    if kind not in LEAKS_WHEN_PACKED:
        return
    for loader in _LOADERS:
        block = merged.values.get(loader)
        dataset = block.get("dataset") if isinstance(block, dict) else None
        if isinstance(dataset, dict) and dataset.get("packing") is True:
            yield (loader, "dataset", "packing"), False, f"packed samples would see each other in a {kind} model"


def _give_way(merged: Merged, keys: Keys, value: Any, why: str) -> None:
    dotted, place, old = ".".join(keys), merged.place_of(keys), merged.values
    for key in keys:
        old = old[key]
    if place is None or place.kind is not Kind.PACKAGE:
        raise RecipeError(f"{dotted} = {old!r}: {why}", where=place, fix=f"Set {dotted}={value!r}, or leave it out.")
    nested: Any = value
    for key in reversed(keys):
        nested = {key: nested}
    warning = f"{dotted} is {value!r} here, not {old!r} ({place}): {why}."
    merged.lay(Layer.at(Place(Kind.DERIVED, f"derived: {why}"), nested, warning))
