"""A model folder's config.json read as facts: one name for what the families call differently.

It opens one JSON file and asks no hub; which facts belong together is `recipes.architecture`'s.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tuner.recipes.architecture import EXPERTS, OF_EXPERTS, Architecture, says_something

_SPELLINGS = {
    "num_hidden_layers": ("n_layer",),
    "hidden_size": ("n_embd",),
    "intermediate_size": ("ffn_dim", "ffn_hidden_size", "n_inner", "moe_intermediate_size"),
    "num_attention_heads": ("n_head",),
    "max_position_embeddings": ("n_positions", "seq_length"),
    "attention_bias": ("qkv_bias", "use_qkv_bias", "bias", "use_bias", "enable_bias"),
    "use_qk_norm": ("qk_layernorm",),
    "num_experts": ("num_local_experts", "n_routed_experts"),
    "num_experts_per_tok": ("top_k_experts",),
    "shared_expert_intermediate_size": ("shared_intermediate_size",),
    "num_dense_layers": ("first_k_dense_replace",),
    "decoder_sparse_step": ("interleave_moe_layer_step",),
}
_ONE_KEY_FOR_ALL_BIASES = {
    "ernie4_5": "use_bias",
    "internlm3": "bias",
    "opt": "enable_bias",
    "starcoder2": "use_bias",
}
_LEFT_OUT: dict[str, dict[str, Any]] = {
    "bloom": {"max_position_embeddings": 2048},
    "falcon": {"max_position_embeddings": 2048, "multi_query": True, "parallel_attn": True},
    # Published Gemma 3 configs hold of their text half what differs from transformers' class alone.
    "gemma3_text": {
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262208,
    },
    "gpt_bigcode": {"multi_query": True},
}
"""What published configs leave out because it is their class's default."""
_FOUR_TIMES_HIDDEN = ("bloom", "falcon", "gpt2", "gpt_bigcode")
_LAYERS_OF_TWO_KINDS = ("gemma4_text", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")


def read_facts(folder: Path) -> dict[str, Any] | None:
    """Return the architecture block for a model folder, or None where config.json does not hold all of it."""
    config = _read(folder)
    if config is None:
        return None
    try:
        facts = _facts({**_LEFT_OUT.get(str(config.get("model_type")), {}), **config})
    except (TypeError, ValueError, ZeroDivisionError):  # a text for a number, a list, an order of layers of its own
        return None
    required = (key for key, field in Architecture.model_fields.items() if field.is_required())
    return facts if all(key in facts for key in required) else None


def num_layers(folder: Path) -> int:
    """Return the number of layers that a model folder's config.json says, or 0 where it says none."""
    count = _first(_read(folder) or {}, "num_hidden_layers", *_SPELLINGS["num_hidden_layers"])
    return count if isinstance(count, int) else 0


def _read(folder: Path) -> dict[str, Any] | None:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(config, dict):
        return None
    return {**config, **(config["text_config"] if isinstance(config.get("text_config"), dict) else {})}


def _facts(config: dict[str, Any]) -> dict[str, Any]:
    kind = str(config.get("model_type"))
    found = {key: _first(config, key, *_SPELLINGS.get(key, ())) for key in Architecture.model_fields}
    # transformers 4 left the key out where it was True (Gemma), and wrote every False.
    found["tie_word_embeddings"] = config.get("tie_word_embeddings", True)
    found |= _widths(config, kind, found)
    found |= _experts(config, kind, found)
    found |= _only_of(config, kind)
    if found["word_embed_proj_dim"] == found["hidden_size"]:
        del found["word_embed_proj_dim"]
    given = {key: value for key, value in found.items() if value is not None and (value != 0 or value is False)}
    return {key: value for key, value in given.items() if says_something(kind, key, value)}


def _first(config: dict[str, Any], *keys: str) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)


def _widths(config: dict[str, Any], kind: str, found: dict[str, Any]) -> dict[str, Any]:
    heads, hidden, inner = found["num_attention_heads"], found["hidden_size"], found["intermediate_size"]
    if inner is None and kind in _FOUR_TIMES_HIDDEN:
        inner = 4 * hidden
    if isinstance(inner, list):  # Gemma 3n names each layer's
        inner = inner[0] if len(set(inner)) == 1 else None
    widths = {"intermediate_size": inner, "num_key_value_heads": _key_value_heads(config, kind) or heads}
    if not found["kv_lora_rank"]:
        return {**widths, "head_dim": found["head_dim"] or hidden // heads}
    query = found["qk_nope_head_dim"] + found["qk_rope_head_dim"]
    return {**widths, "head_dim": query, "v_head_dim": found["v_head_dim"] or hidden // heads}


def _key_value_heads(config: dict[str, Any], kind: str) -> Any:
    if kind == "falcon" and config.get("new_decoder_architecture"):
        return config.get("num_kv_heads")
    if kind in ("falcon", "gpt_bigcode"):
        return 1 if config["multi_query"] else None
    return config.get("num_key_value_heads")


def _experts(config: dict[str, Any], kind: str, found: dict[str, Any]) -> dict[str, Any]:
    if not found["num_experts"] or not config.get("enable_moe_block", True):
        return dict.fromkeys((*EXPERTS, *OF_EXPERTS))
    width = found["moe_intermediate_size"] or found["intermediate_size"]
    if kind == "llama4_text":
        dense = config["intermediate_size_mlp"]
        return {"intermediate_size": dense, "moe_intermediate_size": width, "shared_expert_intermediate_size": width}
    shared = found["shared_expert_intermediate_size"] or (config.get("n_shared_experts") or 0) * width
    dense_layers = found["num_dense_layers"] or _dense_at_the_start(config)
    facts = {"moe_intermediate_size": width, "shared_expert_intermediate_size": shared}
    return {**facts, "num_dense_layers": dense_layers}


def _dense_at_the_start(config: dict[str, Any]) -> int:
    """Count the first layers without experts, from either of the two lists that name layers.

    Raises:
        ValueError: a later layer has none, too.
    """
    kinds = config.get("mlp_layer_types") or ()
    dense = config.get("mlp_only_layers") or [layer for layer, kind in enumerate(kinds) if kind == "dense"]
    if dense != list(range(len(dense))):
        raise ValueError("layers without experts in between")
    return len(dense)


def _only_of(config: dict[str, Any], kind: str) -> dict[str, Any]:
    if kind == "falcon":
        own_norms = 2 if config.get("new_decoder_architecture") or not config["parallel_attn"] else 1
        norms = config.get("num_ln_in_parallel_attn") or own_norms
        return {"mlp_bias": config.get("bias"), "num_ln_in_parallel_attn": None if norms == 1 else norms}
    if kind in _ONE_KEY_FOR_ALL_BIASES:
        return {"mlp_bias": config.get(_ONE_KEY_FOR_ALL_BIASES[kind])}
    if kind in _LAYERS_OF_TWO_KINDS:
        interval = _interval(config["layer_types"]) if config.get("layer_types") else None
        return {"full_attention_interval": interval} | (_gemma4(config) if kind == "gemma4_text" else {})
    if kind == "llama4_text":  # its norm of queries and keys has no weights
        return {"use_qk_norm": None}
    return {}


def _gemma4(config: dict[str, Any]) -> dict[str, Any]:
    own = config.get("hidden_size_per_layer_input")
    # transformers 5 writes what differs layer by layer instead of the two keys that publishers write.
    full: dict[str, Any] = next(iter((config.get("per_layer_config") or {}).values()), {})
    groups = config.get("num_global_key_value_heads") or full.get("num_key_value_heads")
    return {
        "global_head_dim": config.get("global_head_dim") or full.get("head_dim"),
        "num_global_key_value_heads": groups if config.get("attention_k_eq_v") else None,
        "vocab_size_per_layer_input": config.get("vocab_size_per_layer_input") if own else None,
    }


def _interval(kinds: list[str]) -> int:
    """Return which n makes every n-th layer one of full attention.

    Raises:
        ValueError: none does.
    """
    interval = kinds.index("full_attention") + 1
    full = [layer for layer, kind in enumerate(kinds, 1) if kind == "full_attention"]
    if full != list(range(interval, len(kinds) + 1, interval)):
        raise ValueError("full attention at no regular interval")
    return interval
