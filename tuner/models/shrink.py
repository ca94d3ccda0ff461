"""The facts of a small model in the shape of a large one: every ratio and every kind of layer, none of the size.

It builds no model.
"""

from __future__ import annotations

from typing import Any

from tuner.models.config_of import config_of
from tuner.recipes.architecture import Architecture

_HEAD, _ROPE_HEAD, _RANK = 16, 8, 16
_MAX_KEY_VALUE_HEADS, _MAX_GROUP = 2, 8
# DeepSeek-V3 picks experts from 4 of 8 groups: of 16, its 8 experts a token are as many as those groups hold.
_MAX_EXPERTS = 16
_STEP = 16
"""Widths are multiples of this, so that heads, halves of heads and 4-bit blocks come out even."""


def shrink(facts: Architecture, vocab_size: int) -> Architecture:
    """Return facts of the same model_type and the same ratios, of few layers and small widths.

    Args:
        facts: The large model's.
        vocab_size: The small one's, which the tokenizer decides.

    Raises:
        ValueError: transformers has no such model_type.
    """
    heads = _heads(facts)
    latent = _latent(facts)
    head_dim = latent.get("head_dim", _HEAD)
    hidden = _scaled(facts.hidden_size, heads["num_attention_heads"] * head_dim, _own_width(facts))
    small: dict[str, Any] = {"hidden_size": hidden, "head_dim": head_dim, "vocab_size": vocab_size, **heads, **latent}
    small["intermediate_size"] = _scaled(facts.intermediate_size, hidden, facts.hidden_size)
    if facts.word_embed_proj_dim:
        small["word_embed_proj_dim"] = _scaled(facts.word_embed_proj_dim, hidden, facts.hidden_size)
    small |= _layers(facts) | _experts(facts, hidden) | _linear(facts) | _of_gemma(facts, vocab_size)
    return Architecture(**{**facts.model_dump(), **small})


def _own_width(facts: Architecture) -> int:
    return facts.num_attention_heads * facts.head_dim


def _scaled(width: int, new: int, old: int) -> int:
    return max(_STEP, round(width * new / old / _STEP) * _STEP)


def _heads(facts: Architecture) -> dict[str, int]:
    groups = min(facts.num_key_value_heads, _MAX_KEY_VALUE_HEADS)
    heads = groups * min(facts.num_attention_heads // facts.num_key_value_heads, _MAX_GROUP)
    found = {"num_attention_heads": heads, "num_key_value_heads": groups}
    if facts.num_global_key_value_heads:
        found["num_global_key_value_heads"] = min(facts.num_global_key_value_heads, groups)
    return found


def _latent(facts: Architecture) -> dict[str, int]:
    if not facts.kv_lora_rank:
        return {}
    widths = {"kv_lora_rank": _RANK, "v_head_dim": _HEAD, "qk_nope_head_dim": _HEAD, "qk_rope_head_dim": _ROPE_HEAD}
    return {**widths, "head_dim": _HEAD + _ROPE_HEAD, **({"q_lora_rank": _RANK} if facts.q_lora_rank else {})}


def _layers(facts: Architecture) -> dict[str, int]:
    """Return as many layers as it takes to have each kind once; twice, where the later ones share keys and values."""
    # A config of a family whose layers are all alike names no kinds.
    names = getattr(config_of(facts), "layer_types", None) or [""] * facts.num_hidden_layers
    kinds = [(name, facts.has_experts(layer)) for layer, name in enumerate(names)]
    period = max(kinds.index(kind) for kind in set(kinds)) + 1
    if facts.num_kv_shared_layers:
        return {"num_hidden_layers": 2 * period, "num_kv_shared_layers": period}
    return {"num_hidden_layers": min(max(2, period), facts.num_hidden_layers)}


def _experts(facts: Architecture, hidden: int) -> dict[str, int]:
    if not (facts.num_experts and facts.num_experts_per_tok and facts.moe_intermediate_size):
        return {}
    count = min(facts.num_experts, _MAX_EXPERTS)
    width = _scaled(facts.moe_intermediate_size, hidden, facts.hidden_size)
    found = {
        "num_experts": count,
        "num_experts_per_tok": min(facts.num_experts_per_tok, count),
        "moe_intermediate_size": width,
    }
    if facts.shared_expert_intermediate_size:
        shared = max(1, facts.shared_expert_intermediate_size // facts.moe_intermediate_size)
        found["shared_expert_intermediate_size"] = shared * width
    return found


def _linear(facts: Architecture) -> dict[str, int]:
    if not (facts.linear_num_key_heads and facts.linear_num_value_heads):
        return {}
    ratio = facts.linear_num_value_heads // facts.linear_num_key_heads
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 2 * ratio}
    return {**heads, "linear_key_head_dim": _HEAD, "linear_value_head_dim": _HEAD}


def _of_gemma(facts: Architecture, vocab_size: int) -> dict[str, int]:
    found: dict[str, int] = {}
    if facts.hidden_size_per_layer_input:
        found |= {"hidden_size_per_layer_input": _STEP, "vocab_size_per_layer_input": vocab_size}
    if facts.laurel_rank:
        found["laurel_rank"] = _RANK
    if facts.global_head_dim:
        found["global_head_dim"] = _scaled(facts.global_head_dim, _HEAD, facts.head_dim)
    return found
