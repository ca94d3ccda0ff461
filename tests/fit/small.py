"""Made configs of every model_type that has a formula: two small models each, of widths that no formula can mix up."""

from __future__ import annotations

from typing import Any

from tuner.recipes.schema.architecture import Architecture

_BASE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "tie_word_embeddings": False,
    "max_position_embeddings": 37,
}
_TIED = {"tie_word_embeddings": True}
_HEAD = {"head_dim": 8}  # where it is not worked out
_WIDE = {"head_dim": 10}  # heads that together are wider than the model
_ALL_HEADS = {"num_key_value_heads": 6}
_OWN_INNER = {"intermediate_size": None}
_FOUR_TIMES = {**_OWN_INNER, "num_key_value_heads": None}
_OPT = {"intermediate_size": None, "num_key_value_heads": None, "ffn_dim": 80}
_OF_EACH_TOKEN = {"num_experts_per_tok": 2}
_EXPERTS = {**_OF_EACH_TOKEN, "num_experts": 3, "moe_intermediate_size": 17}
_LOCAL_EXPERTS = {**_OF_EACH_TOKEN, "num_local_experts": 3, "intermediate_size": 17}
_ROUTED_EXPERTS = {**_OF_EACH_TOKEN, "n_routed_experts": 3, "moe_intermediate_size": 17}
_ONE_SHARED, _TWO_SHARED = {"n_shared_experts": 1}, {"n_shared_experts": 2}
_NONE_SHARED = {"n_shared_experts": 0, "first_k_dense_replace": 0}
_SHARED = {"shared_expert_intermediate_size": 34}
_LATENT = {
    "num_key_value_heads": 6,
    "q_lora_rank": None,
    "kv_lora_rank": 13,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
}
_QUERY_RANK = {"q_lora_rank": 11, "attention_bias": True}
_LINEAR = {
    "full_attention_interval": 2,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 7,
    "linear_value_head_dim": 5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_OWN_INPUTS = {"hidden_size_per_layer_input": 11, "vocab_size_per_layer_input": 99}
_GEMMA_4 = {
    **_HEAD,
    "global_head_dim": 12,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}

_PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **dict.fromkeys(("mistral", "ministral", "ministral3"), (_WIDE, {**_HEAD, **_TIED})),
    **dict.fromkeys(("llama", "granite"), (_WIDE, {**_TIED, "attention_bias": True, "mlp_bias": True})),
    **dict.fromkeys(("internlm2", "cwm"), (_WIDE, {**_HEAD, **_TIED})),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), (_WIDE, {**_HEAD, **_TIED, "attention_bias": True})),
    **dict.fromkeys(("smollm3", "qwen3", "exaone4", "hunyuan_v1_dense"), (_WIDE, {**_HEAD, **_TIED})),
    **dict.fromkeys(("olmo", "olmo2", "olmo3", "cohere2"), ({}, {**_TIED, "attention_bias": True})),
    "apertus": (_WIDE, _TIED),
    "arcee": (_WIDE, {**_HEAD, **_TIED, "attention_bias": True, "mlp_bias": True}),
    "bloom": (_FOUR_TIMES, {**_FOUR_TIMES, **_TIED}),
    "cohere": (_TIED, {"use_qk_norm": True, "attention_bias": True}),
    "deepseek_v2": (
        {**_LATENT, **_ROUTED_EXPERTS, **_NONE_SHARED},
        {**_LATENT, **_ROUTED_EXPERTS, **_TWO_SHARED, **_TIED, **_QUERY_RANK, "first_k_dense_replace": 1},
    ),
    "deepseek_v3": (
        {**_LATENT, **_ROUTED_EXPERTS, **_TWO_SHARED, "first_k_dense_replace": 2},
        {**_LATENT, **_ROUTED_EXPERTS, **_NONE_SHARED, **_TIED, **_QUERY_RANK},
    ),
    "ernie4_5": (_WIDE, {**_HEAD, **_TIED, "use_bias": True}),
    "falcon": (
        {**_FOUR_TIMES, "multi_query": True, "parallel_attn": True, "bias": False},
        {**_FOUR_TIMES, **_TIED, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    ),
    "gemma3n_text": (
        {**_HEAD, **_OWN_INPUTS, "laurel_rank": 3, "altup_num_inputs": 4, "num_kv_shared_layers": 0},
        {**_HEAD, **_OWN_INPUTS, **_TIED, "laurel_rank": 5, "altup_num_inputs": 2, "num_kv_shared_layers": 2},
    ),
    "gemma4_text": (
        {**_GEMMA_4, "num_experts": 3, "top_k_experts": 2, "moe_intermediate_size": 17, "enable_moe_block": True}
        | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 3},
        {**_GEMMA_4, **_OWN_INPUTS, **_TIED, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    ),
    "glm": ({**_WIDE, "attention_bias": True}, {**_HEAD, **_TIED, "attention_bias": False}),
    "glm4": (_WIDE, {**_HEAD, **_TIED, "attention_bias": False}),
    "glm4_moe": (
        {**_ROUTED_EXPERTS, **_TWO_SHARED, "use_qk_norm": True, "first_k_dense_replace": 1},
        {**_ROUTED_EXPERTS, **_NONE_SHARED, **_TIED, "attention_bias": True},
    ),
    "glm4_moe_lite": (
        {**_LATENT, **_ROUTED_EXPERTS, **_TWO_SHARED, "q_lora_rank": 11},
        {**_LATENT, **_ROUTED_EXPERTS, **_TIED, "n_shared_experts": 0, "mlp_layer_types": ["sparse"] * 4},
    ),
    "gpt2": (_FOUR_TIMES, {**_FOUR_TIMES, **_TIED, "n_inner": 80}),
    "gpt_bigcode": (_FOUR_TIMES, {**_FOUR_TIMES, **_TIED, "n_inner": 80, "multi_query": False}),
    "gpt_neox": (_ALL_HEADS, {**_ALL_HEADS, **_TIED, "attention_bias": False}),
    "gpt_oss": ({**_LOCAL_EXPERTS, **_WIDE}, {**_LOCAL_EXPERTS, **_HEAD, **_TIED, "attention_bias": False}),
    "granitemoe": (_LOCAL_EXPERTS, {**_LOCAL_EXPERTS, **_TIED, "attention_bias": True}),
    "granitemoeshared": (
        {**_LOCAL_EXPERTS, "shared_intermediate_size": 34},
        {**_LOCAL_EXPERTS, **_TIED, "shared_intermediate_size": 9},
    ),
    "internlm": ({}, {**_TIED, "bias": False}),
    "internlm3": (_WIDE, {**_HEAD, **_TIED, "qkv_bias": True, "bias": True}),
    "llama4_text": (
        {**_LOCAL_EXPERTS, **_WIDE, "intermediate_size_mlp": 80, "interleave_moe_layer_step": 2},
        {**_LOCAL_EXPERTS, **_HEAD, **_TIED, "intermediate_size_mlp": 80, "attention_bias": True},
    ),
    "minicpm3": ({**_LATENT, "q_lora_rank": 11}, {**_LATENT, **_TIED, "attention_bias": True, "mlp_bias": True}),
    "mixtral": ({**_LOCAL_EXPERTS, **_WIDE}, {**_LOCAL_EXPERTS, **_TIED}),
    "nemotron": (_WIDE, {**_HEAD, **_TIED, "attention_bias": True, "mlp_bias": True}),
    "olmoe": (
        {**_OF_EACH_TOKEN, "num_experts": 3, "intermediate_size": 17},
        {**_OF_EACH_TOKEN, **_TIED, "num_experts": 3, "intermediate_size": 17, "attention_bias": True},
    ),
    "opt": (_OPT, {**_OPT, **_TIED, "word_embed_proj_dim": 33, "do_layer_norm_before": False}),
    "phi": ({}, {**_TIED, "qk_layernorm": True}),
    "phi3": (_HEAD, _TIED),
    "phimoe": (
        {**_LOCAL_EXPERTS, "attention_bias": True, "lm_head_bias": True},
        {**_LOCAL_EXPERTS, **_TIED},
    ),
    "qwen2": ({}, _TIED),
    "qwen2_moe": (
        {**_EXPERTS, **_SHARED, "decoder_sparse_step": 2},
        {**_EXPERTS, **_SHARED, **_TIED, "mlp_only_layers": [1], "qkv_bias": False},
    ),
    "qwen3_5_moe_text": (
        {**_LINEAR, **_OWN_INNER, **_EXPERTS, **_SHARED, **_WIDE},
        {**_LINEAR, **_OWN_INNER, **_EXPERTS, **_SHARED, **_HEAD, **_TIED, "full_attention_interval": 4},
    ),
    "qwen3_5_text": ({**_LINEAR, **_WIDE}, {**_LINEAR, **_HEAD, **_TIED, "full_attention_interval": 4}),
    "qwen3_moe": ({**_EXPERTS, **_WIDE}, {**_EXPERTS, **_HEAD, **_TIED, "mlp_only_layers": [0, 1]}),
    "qwen3_next": (
        {**_LINEAR, **_EXPERTS, **_SHARED, **_WIDE},
        {**_LINEAR, **_EXPERTS, **_SHARED, **_HEAD, **_TIED, "full_attention_interval": 4},
    ),
    "seed_oss": (_WIDE, {**_HEAD, **_TIED}),
    "stablelm": (
        {},
        {**_TIED, "qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": True},
    ),
    "starcoder2": (_HEAD, {**_TIED, "use_bias": False}),
}


def _config(given: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a config.json; one that is None would be worked out, but for the rank of queries."""
    return {key: value for key, value in given.items() if value is not None or key == "q_lora_rank"}


SMALL = [Architecture(**_config({**_BASE, "model_type": kind, **own})) for kind, pair in _PAIRS.items() for own in pair]


def name_of(facts: Architecture) -> str:
    """Return a test's id."""
    return f"{facts.model_type}-{'tied' if facts.tie_word_embeddings else 'untied'}"


def small(model_type: str, *, tied: bool = False, **own: Any) -> Architecture:
    """Return one of the two, with other facts where given."""
    found = next(
        architecture
        for architecture in SMALL
        if (architecture.model_type, architecture.tie_word_embeddings) == (model_type, tied)
    )
    return Architecture(**_config(found.model_dump() | own))
