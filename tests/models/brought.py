"""Small configs of families that have no part and no formula: what a user brings is a folder with a config.json."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

_BASE: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 4, "vocab_size": 128}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_DENSE = {**_BASE, **_HEADS, "intermediate_size": 64}
_OF_GPT_2 = {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 128}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DEEPSEEK_EXPERTS = {**_EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_LATENT = {
    **{**_DENSE, **_DEEPSEEK_EXPERTS, "num_key_value_heads": 4, "n_shared_experts": 1},
    **{"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    **{"index_n_heads": 4, "index_head_dim": 16, "index_topk": 8},
}
_MAMBA = {**_BASE, "state_size": 8, "time_step_rank": 4}
_MAMBA_2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
_BOTH = ["mamba", "attention", "mamba", "attention"]
_CONVOLUTIONS = ["conv", "full_attention", "conv", "full_attention"]
_LINEAR_LAYERS = ["linear_attention", "full_attention"] * 2
_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}

BROUGHT: dict[str, dict[str, Any]] = {
    "afmoe": {**_DENSE, **_EXPERTS, "num_experts": 4, "head_dim": 8, "num_dense_layers": 1, "sliding_window": 16},
    "bamba": {**_DENSE, **_MAMBA_2, "attn_layer_indices": [1, 3]},
    "codegen": {**_OF_GPT_2, "rotary_dim": 4},
    "deepseek_v32": _LATENT,
    "deepseek_v4": {
        **{**_DENSE, **_EXPERTS, "num_key_value_heads": 1, "n_routed_experts": 4, "head_dim": 16, "q_lora_rank": 16},
        **{"o_groups": 2, "o_lora_rank": 16, "hc_mult": 2, "sliding_window": 16},
        **{"index_n_heads": 4, "index_head_dim": 16, "index_topk": 8},
    },
    "dots1": {**_DENSE, **_DEEPSEEK_EXPERTS, "n_shared_experts": 1},
    "ernie4_5_moe": {**_DENSE, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "exaone_moe": {**_DENSE, **_EXPERTS, "num_experts": 4, "n_group": 1, "topk_group": 1, "sliding_window": 16},
    "falcon_h1": {**_DENSE, **_MAMBA_2, "mamba_d_ssm": 64},
    "falcon_mamba": _MAMBA,
    "flex_olmo": {**_DENSE, "num_experts": 4, "num_experts_per_tok": 2},
    "glm_moe_dsa": _LATENT,
    "gpt_neo": {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "gptj": {**_OF_GPT_2, "rotary_dim": 4},
    "granitemoehybrid": {**_DENSE, **_MAMBA_2, "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": _BOTH},
    "helium": {**_DENSE, "head_dim": 8},
    "jamba": {**_DENSE, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 8},
    "kimi_linear": {
        **{**_DENSE, "num_key_value_heads": 4},
        **{**_EXPERTS, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_token": 2, "n_shared_experts": 1},
        **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": None},
        **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 16},
        **{"layer_types": _LINEAR_LAYERS, "linear_num_heads": 4, "linear_head_dim": 16},
    },
    "lfm2": {**_DENSE, "layer_types": _CONVOLUTIONS},
    "lfm2_moe": {**_DENSE, **_EXPERTS, "num_experts": 4, "num_dense_layers": 1, "layer_types": _CONVOLUTIONS},
    "mamba": _MAMBA,
    "mamba2": {**_BASE, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "minimax": {**_DENSE, "num_local_experts": 4},
    "minimax_m2": {**_DENSE, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 128},
    "nemotron_h": {
        **_DENSE,
        **_DEEPSEEK_EXPERTS,
        **{"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8},
        **{"layers_block_type": ["mamba", "attention", "moe", "mamba"], "head_dim": 8},
    },
    "olmo_hybrid": {**_DENSE, **_LINEAR},
    "persimmon": {**_BASE, "num_attention_heads": 4, "intermediate_size": 64},
    "recurrent_gemma": {
        **_DENSE,
        **{"block_types": ("recurrent", "attention"), "lru_width": 32, "attention_window_size": 16, "head_dim": 8},
    },
    "zamba2": {
        **_BASE,
        **{"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64, "attention_head_dim": 16},
        **{"n_mamba_heads": 8, "mamba_ngroups": 1, "mamba_d_state": 8, "num_mem_blocks": 1, "chunk_size": 8},
        **{"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "hybrid_layer_ids": [1, 3]},
    },
}
"""A model_type and the words of its config.json that make it small."""


def brought(kind: str, **more: Any) -> PreTrainedConfig:
    """Return a small config of a family, with other values where given."""
    config: PreTrainedConfig = AutoConfig.for_model(kind, **{**BROUGHT[kind], **_TOKENS, **more})
    return config
