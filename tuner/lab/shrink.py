"""Shrinks an architecture to a small one of the same kind, and makes transformers configs from architectures.

It builds no model.
"""

from __future__ import annotations

from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import logging

import tuner.models  # noqa: F401  registers InternLM
from tuner.files import JsonObject
from tuner.recipes.schema.architecture import Architecture

_HEAD, _ROPE_HEAD, _RANK = 16, 8, 16
_MAX_KEY_VALUE_HEADS, _MAX_GROUP = 2, 8
# DeepSeek-V3 picks 8 experts per token from 4 of 8 groups; with 16 experts, 4 groups hold exactly 8.
_MAX_EXPERTS = 16
_STEP = 16
"""Widths are multiples of this number, so that heads, half heads and 4-bit blocks divide them."""
_TOKENS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
"""Token ids that every vocabulary has, since a padding token must be a row of the embeddings."""
_INNER = (
    "intermediate_size",
    "intermediate_size_mlp",
    "moe_intermediate_size",
    "ffn_dim",
    "ffn_hidden_size",
    "n_inner",
    "word_embed_proj_dim",
)
"""Widths that shrink by the same factor as the hidden size."""


def config_of(architecture: Architecture) -> PreTrainedConfig:
    """Return the config of the model.

    Raises:
        ValueError: transformers has no such model_type.
    """
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # no warnings about rope factors, which do not match small configs
    try:
        config: PreTrainedConfig = AutoConfig.for_model(**architecture.model_dump(), **_TOKENS)
    finally:
        logging.set_verbosity(level)
    return config


def shrink(architecture: Architecture, vocab_size: int) -> Architecture:
    """Return a small architecture of the same model_type, with the same ratios and every kind of layer.

    Args:
        vocab_size: Vocabulary size of the small model, from its tokenizer.

    Raises:
        ValueError: transformers has no such model_type.
    """
    config, heads = architecture.model_dump(), _heads(architecture)
    head_dim = _HEAD + _ROPE_HEAD if architecture.kv_lora_rank else _HEAD
    own_width = architecture.num_attention_heads * architecture.head_dim
    hidden = _scaled(architecture.hidden_size, heads["num_attention_heads"] * head_dim, own_width)
    small = {key: _scaled(config[key], hidden, architecture.hidden_size) for key in _INNER if config.get(key)}
    small |= {"hidden_size": hidden, "head_dim": head_dim, "vocab_size": vocab_size, **heads}
    small |= _layers(architecture) | _experts(architecture, config, small) | _fixed(architecture, vocab_size)
    # Only keys in the large model's config: a missing key is derived from others, or belongs to another family.
    return Architecture.model_validate(config | {key: value for key, value in small.items() if key in config})


def _scaled(width: int, new: int, old: int) -> int:
    return max(_STEP, round(width * new / old / _STEP) * _STEP)


def _heads(architecture: Architecture) -> dict[str, int]:
    groups = min(architecture.num_key_value_heads, _MAX_KEY_VALUE_HEADS)
    heads = groups * min(architecture.num_attention_heads // architecture.num_key_value_heads, _MAX_GROUP)
    full = min(architecture.num_global_key_value_heads or groups, groups)
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "num_kv_heads": groups,
        "num_global_key_value_heads": full,
    }


def _layers(architecture: Architecture) -> JsonObject:
    """Return enough layers to have each kind once, or twice if later layers share keys and values."""
    # Families with only one kind of layer have no layer_types.
    names = getattr(config_of(architecture), "layer_types", None) or [""] * architecture.num_hidden_layers
    kinds = [(name, architecture.has_experts(layer)) for layer, name in enumerate(names)]
    period = max(kinds.index(kind) for kind in set(kinds)) + 1
    num = min(max(2, period), architecture.num_hidden_layers)
    if architecture.num_kv_shared_layers:
        num = 2 * period
    return {
        "num_hidden_layers": num,
        "first_k_dense_replace": min(architecture.first_k_dense_replace, num - 1),
        "num_kv_shared_layers": period if architecture.num_kv_shared_layers else 0,
        "layer_types": (names * 2)[:num],
        "mlp_layer_types": list(architecture.mlp_layer_types[:num]),
        "mlp_only_layers": [layer for layer in architecture.mlp_only_layers if layer < num],
    }


def _experts(architecture: Architecture, config: JsonObject, small: dict[str, int]) -> dict[str, int]:
    if not (architecture.num_experts and architecture.num_experts_per_tok and architecture.moe_intermediate_size):
        return {}
    count = min(architecture.num_experts, _MAX_EXPERTS)
    experts_per_token = min(architecture.num_experts_per_tok, count)
    width = small["moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"]
    of_all_shared = architecture.shared_expert_intermediate_size or 0
    shared = max(1, of_all_shared // architecture.moe_intermediate_size) * width if of_all_shared else 0
    return {
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), count),
        **dict.fromkeys(("num_experts_per_tok", "top_k_experts"), experts_per_token),
        **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), shared),
    }


def _fixed(architecture: Architecture, vocab_size: int) -> dict[str, int]:
    """Return sizes that do not depend on the hidden size: for latent and linear attention, and for Gemma."""
    value_heads, key_heads = architecture.linear_num_value_heads or 1, architecture.linear_num_key_heads or 1
    sizes = {
        **{"kv_lora_rank": _RANK, "qk_nope_head_dim": _HEAD, "qk_rope_head_dim": _ROPE_HEAD, "v_head_dim": _HEAD},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 2 * (value_heads // key_heads)},
        **{"linear_key_head_dim": _HEAD, "linear_value_head_dim": _HEAD},
        **{"laurel_rank": _RANK, "vocab_size_per_layer_input": vocab_size},
        "global_head_dim": _scaled(architecture.global_head_dim or 0, _HEAD, architecture.head_dim),
    }
    if architecture.q_lora_rank:
        sizes["q_lora_rank"] = _RANK
    if architecture.hidden_size_per_layer_input:
        sizes["hidden_size_per_layer_input"] = _STEP
    return sizes
