"""Made facts of every model_type that has a formula: two small models each, of widths that no formula can mix up."""

from __future__ import annotations

from typing import Any

from tuner.recipes.architecture import Architecture

_BASE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 101,
    "tie_word_embeddings": False,
    "max_position_embeddings": 37,
}
_TIED = {"tie_word_embeddings": True}
_WIDE = {"head_dim": 10}  # heads that together are wider than the model
_ALL_HEADS = {"num_key_value_heads": 6}
_FOUR_TIMES = {"intermediate_size": 192}
_EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 17}
_ALL_EXPERTS = {**_EXPERTS, "intermediate_size": 17}
_SHARED = {"shared_expert_intermediate_size": 34}
_LATENT = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 13,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
    "head_dim": 9,
}
_LINEAR = {
    "full_attention_interval": 2,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 7,
    "linear_value_head_dim": 5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_OWN_INPUTS = {"hidden_size_per_layer_input": 11, "vocab_size_per_layer_input": 99}
_GEMMA_4 = {"full_attention_interval": 2, "global_head_dim": 12}

_PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **dict.fromkeys(("mistral", "ministral", "ministral3"), (_WIDE, _TIED)),
    **dict.fromkeys(("llama", "granite"), (_WIDE, {**_TIED, "attention_bias": True, "mlp_bias": True})),
    **dict.fromkeys(("internlm2", "cwm"), (_WIDE, _TIED)),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), (_WIDE, {**_TIED, "attention_bias": True})),
    **dict.fromkeys(("smollm3", "qwen3", "exaone4", "hunyuan_v1_dense"), (_WIDE, _TIED)),
    **dict.fromkeys(("olmo", "olmo2", "olmo3", "cohere2"), ({}, {**_TIED, "attention_bias": True})),
    "apertus": (_WIDE, _TIED),
    "arcee": (_WIDE, {**_TIED, "attention_bias": True, "mlp_bias": True}),
    "bloom": ({**_ALL_HEADS, **_FOUR_TIMES}, {**_ALL_HEADS, **_FOUR_TIMES, **_TIED}),
    "cohere": (_TIED, {"use_qk_norm": True, "attention_bias": True}),
    "deepseek_v2": (
        {**_LATENT, **_EXPERTS},
        {**_LATENT, **_EXPERTS, **_SHARED, **_TIED, "num_dense_layers": 1, "q_lora_rank": 11, "attention_bias": True},
    ),
    "deepseek_v3": (
        {**_LATENT, **_EXPERTS, **_SHARED, "num_dense_layers": 2},
        {**_LATENT, **_EXPERTS, **_TIED, "q_lora_rank": 11, "attention_bias": True},
    ),
    "ernie4_5": (_WIDE, {**_TIED, "attention_bias": True, "mlp_bias": True}),
    "falcon": (
        {**_FOUR_TIMES, "num_key_value_heads": 1},
        {**_FOUR_TIMES, **_TIED, "num_ln_in_parallel_attn": 2, "attention_bias": True, "mlp_bias": True},
    ),
    "gemma3n_text": (
        {**_OWN_INPUTS, "laurel_rank": 3, "altup_num_inputs": 4},
        {**_OWN_INPUTS, **_TIED, "laurel_rank": 5, "altup_num_inputs": 2, "num_kv_shared_layers": 2},
    ),
    "gemma4_text": (
        {**_GEMMA_4, **_EXPERTS, "attention_k_eq_v": True, "num_global_key_value_heads": 3},
        {**_GEMMA_4, **_OWN_INPUTS, **_TIED, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    ),
    "glm": (_WIDE, {**_TIED, "attention_bias": False}),
    "glm4": (_WIDE, {**_TIED, "attention_bias": False}),
    "glm4_moe": (
        {**_EXPERTS, **_SHARED, "use_qk_norm": True, "num_dense_layers": 1},
        {**_EXPERTS, **_TIED, "attention_bias": True},
    ),
    "glm4_moe_lite": (
        {**_LATENT, **_EXPERTS, **_SHARED, "q_lora_rank": 11, "num_dense_layers": 1},
        {**_LATENT, **_EXPERTS, **_TIED},
    ),
    "gpt2": ({**_ALL_HEADS, **_FOUR_TIMES}, {**_ALL_HEADS, **_TIED}),
    "gpt_bigcode": ({**_FOUR_TIMES, "num_key_value_heads": 1}, {**_ALL_HEADS, **_TIED}),
    "gpt_neox": (_ALL_HEADS, {**_ALL_HEADS, **_TIED, "attention_bias": False}),
    "gpt_oss": ({**_ALL_EXPERTS, **_WIDE}, {**_ALL_EXPERTS, **_TIED, "attention_bias": False}),
    "granitemoe": (_ALL_EXPERTS, {**_ALL_EXPERTS, **_TIED, "attention_bias": True}),
    "granitemoeshared": (
        {**_ALL_EXPERTS, **_SHARED},
        {**_ALL_EXPERTS, **_TIED, "shared_expert_intermediate_size": 9},
    ),
    "internlm": ({}, {**_TIED, "attention_bias": False}),
    "internlm3": (_WIDE, {**_TIED, "attention_bias": True, "mlp_bias": True}),
    "llama4_text": (
        {**_EXPERTS, **_WIDE, "shared_expert_intermediate_size": 17, "decoder_sparse_step": 2},
        {**_EXPERTS, **_TIED, "shared_expert_intermediate_size": 17, "attention_bias": True},
    ),
    "minicpm3": ({**_LATENT, "q_lora_rank": 11}, {**_LATENT, **_TIED, "attention_bias": True, "mlp_bias": True}),
    "mixtral": ({**_ALL_EXPERTS, **_WIDE}, {**_ALL_EXPERTS, **_TIED}),
    "nemotron": (_WIDE, {**_TIED, "attention_bias": True, "mlp_bias": True}),
    "olmoe": (_ALL_EXPERTS, {**_ALL_EXPERTS, **_TIED, "attention_bias": True}),
    "opt": (_ALL_HEADS, {**_ALL_HEADS, **_TIED, "word_embed_proj_dim": 33, "do_layer_norm_before": False}),
    "phi": ({}, {**_TIED, "use_qk_norm": True}),
    "phi3": (_WIDE, _TIED),
    "phimoe": (
        {**_ALL_EXPERTS, "attention_bias": True, "lm_head_bias": True},
        {**_ALL_EXPERTS, **_TIED},
    ),
    "qwen2": ({}, _TIED),
    "qwen2_moe": (
        {**_EXPERTS, **_SHARED, "decoder_sparse_step": 2},
        {**_EXPERTS, **_SHARED, **_TIED, "num_dense_layers": 1, "attention_bias": False},
    ),
    "qwen3_5_moe_text": (
        {**_LINEAR, **_ALL_EXPERTS, **_SHARED, **_WIDE},
        {**_LINEAR, **_ALL_EXPERTS, **_SHARED, **_TIED, "full_attention_interval": 4},
    ),
    "qwen3_5_text": ({**_LINEAR, **_WIDE}, {**_LINEAR, **_TIED, "full_attention_interval": 4}),
    "qwen3_moe": ({**_EXPERTS, **_WIDE}, {**_EXPERTS, **_TIED, "num_dense_layers": 2}),
    "qwen3_next": (
        {**_LINEAR, **_EXPERTS, **_SHARED, **_WIDE},
        {**_LINEAR, **_EXPERTS, **_SHARED, **_TIED, "full_attention_interval": 4},
    ),
    "seed_oss": (_WIDE, _TIED),
    "stablelm": (
        {},
        {**_TIED, "use_qk_norm": True, "use_parallel_residual": True, "attention_bias": True},
    ),
    "starcoder2": (_WIDE, {**_TIED, "attention_bias": False, "mlp_bias": False}),
}

SMALL = [Architecture(**{**_BASE, "model_type": kind, **own}) for kind, pair in _PAIRS.items() for own in pair]


def name_of(facts: Architecture) -> str:
    """Return a test's id."""
    return f"{facts.model_type}-{'tied' if facts.tie_word_embeddings else 'untied'}"


def small(model_type: str, *, tied: bool = False, **own: Any) -> Architecture:
    """Return one of the two, with other facts where given."""
    found = next(one for one in SMALL if (one.model_type, one.tie_word_embeddings) == (model_type, tied))
    return Architecture(**{**found.model_dump(), **own})
