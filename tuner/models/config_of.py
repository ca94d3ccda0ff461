"""Our facts as a config in the words of a model's family: what AutoModelForCausalLM builds a model from.

It builds none, and `recipes.config_json` does the reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import logging

import tuner.models  # noqa: F401  registers internlm, internlm2
from tuner.recipes.architecture import Architecture

_TOKENS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
"""Inside every vocabulary: a padding token is a row of the embeddings."""


def config_of(facts: Architecture) -> PreTrainedConfig:
    """Return the config that says the same in transformers' words.

    Raises:
        ValueError: transformers has no such model_type.
    """
    words: dict[str, Any] = {key: value for key, value in facts if value is not None} | _TOKENS
    own = _OF_TYPE.get(facts.model_type)
    words |= _experts(facts) | _layer_kinds(facts) | (own(facts) if own else {})
    if facts.kv_lora_rank:
        words["q_lora_rank"] = facts.q_lora_rank
    if facts.kv_lora_rank or facts.model_type == "falcon":
        del words["head_dim"]  # they work it out, and falcon cannot be told
    with _quiet():
        config: PreTrainedConfig = AutoConfig.for_model(**words)
    return config


@contextmanager
def _quiet() -> Iterator[None]:
    """Do without transformers' remarks on rope factors, which small made configs do not match."""
    level = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _experts(facts: Architecture) -> dict[str, Any]:
    if not facts.num_experts:
        return {"enable_moe_block": False} if facts.model_type == "gemma4_text" else {}
    dense, shared, width = (
        facts.num_dense_layers,
        facts.shared_expert_intermediate_size or 0,
        facts.moe_intermediate_size,
    )
    assert width
    words: dict[str, Any] = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), facts.num_experts)
    words |= {"top_k_experts": facts.num_experts_per_tok, "enable_moe_block": True}
    words |= {"n_shared_experts": shared // width, "shared_intermediate_size": shared}
    words |= {"first_k_dense_replace": dense, "interleave_moe_layer_step": facts.decoder_sparse_step}
    kinds = ["dense"] * dense + ["sparse"] * (facts.num_hidden_layers - dense)
    words |= {"mlp_only_layers": list(range(dense))}
    if facts.model_type == "glm4_moe_lite":
        words["mlp_layer_types"] = kinds
    if facts.model_type in ("mixtral", "phimoe", "olmoe", "gpt_oss", "granitemoe", "granitemoeshared"):
        words["intermediate_size"] = width
    return words


def _layer_kinds(facts: Architecture) -> dict[str, Any]:
    if facts.full_attention_interval is None:
        return {}
    other = "sliding_attention" if facts.model_type == "gemma4_text" else "linear_attention"
    layers = range(facts.num_hidden_layers)
    return {"layer_types": ["full_attention" if facts.attends_to_all(layer) else other for layer in layers]}


def _falcon(facts: Architecture) -> dict[str, Any]:
    heads, norms = facts.num_key_value_heads, facts.num_ln_in_parallel_attn or 1
    grouped = 1 < heads < facts.num_attention_heads
    return {
        "ffn_hidden_size": facts.intermediate_size,
        "bias": facts.attention_bias,
        "num_kv_heads": heads,
        "multi_query": heads == 1,
        "new_decoder_architecture": grouped,
        "num_ln_in_parallel_attn": norms if grouped else None,
        "parallel_attn": grouped or norms == 1,
    }


_OF_TYPE: dict[str, Callable[[Architecture], dict[str, Any]]] = {
    "ernie4_5": lambda facts: {"use_bias": facts.attention_bias},
    "falcon": _falcon,
    "gemma4_text": lambda facts: {
        "hidden_size_per_layer_input": facts.hidden_size_per_layer_input or 0,
        "num_global_key_value_heads": facts.num_global_key_value_heads,
    },
    "gpt2": lambda facts: {"n_inner": facts.intermediate_size},
    "gpt_bigcode": lambda facts: {"n_inner": facts.intermediate_size, "multi_query": facts.num_key_value_heads == 1},
    "internlm": lambda facts: {"bias": facts.attention_bias},
    "llama4_text": lambda facts: {
        "intermediate_size": facts.moe_intermediate_size,
        "intermediate_size_mlp": facts.intermediate_size,
    },
    "opt": lambda facts: {"ffn_dim": facts.intermediate_size, "enable_bias": facts.attention_bias},
    "phi": lambda facts: {"qk_layernorm": facts.use_qk_norm},
    "qwen2_moe": lambda facts: {"qkv_bias": facts.attention_bias},
    "stablelm": lambda facts: {"qk_layernorm": facts.use_qk_norm, "use_qkv_bias": facts.attention_bias},
    "starcoder2": lambda facts: {"use_bias": facts.attention_bias},
}
