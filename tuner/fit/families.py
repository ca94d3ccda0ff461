"""How each model_type is built in transformers 5: names of its linear layers, norms, what else it holds.

It holds no number of any model; those are the recipe's `architecture` architecture.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Names = tuple[str, ...]

_QKVO = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_GATED = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_FUSED_GATED = ("mlp.gate_up_proj", "mlp.down_proj")
_UP_DOWN = ("mlp.up_proj", "mlp.down_proj")
_NEOX_MLP = ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
_SHARED = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj")
_ONE_SHARED = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj")


class Family(NamedTuple):
    """What all models of one model_type share. Names are those of modules inside a decoder layer."""

    embeddings: str = "embed_tokens"
    attention: Names = _QKVO
    """Four, or two where queries, keys and values are one layer; the last one is the output's."""
    output_bias: bool = True
    """The output's layer has a bias where the others have one."""
    double_queries: bool = False
    """The queries' layer also makes a gate of the same size."""
    sinks: bool = False
    """One learned number for each head."""
    mlp: Names = _GATED
    gated: bool = True
    mlp_numbers: int = 0
    """Learned numbers of the activation function."""
    norms: int = 2
    norm_bias: bool = False
    qk_norm: Literal["", "head", "whole"] = ""
    """Norms of queries and keys: of a head's size for all heads, or of the size of all heads."""
    qk_norm_optional: bool = False
    """The architecture says whether it is there."""
    qk_norm_bias: bool = False
    embedding_norm: bool = False
    positions: int | None = None
    """How many more than max_position_embeddings are learned; None: none are."""
    linear_attention: tuple[tuple[str, int, int, int], ...] = ()
    """Inputs' layers: name, and how many times it makes the keys, the values, and one number a value head."""
    shared: Names = _SHARED
    """The shared experts' layers: three, or two where gate and up are one."""
    shared_gate: bool = False
    router: str = ""
    """The router's name where it is an nn.Linear."""
    own_linears: Literal["", "router", "all"] = ""
    """Which of its linear layers are of a class of their own below nn.Linear: bitsandbytes leaves them as they are."""
    expert_bias: bool = False
    """Experts and router have biases."""
    experts_beside_mlp: bool = False
    """A layer with experts keeps its dense MLP (Gemma 4)."""
    split_experts: Names = ()
    """Names of the router and of the expert's gate, up and down layers in older files, by which PEFT adapts them."""


_NEXT_LINEAR = (("linear_attn.in_proj_qkvz", 2, 2, 0), ("linear_attn.in_proj_ba", 0, 0, 2))
_SPLIT_LINEAR = (
    ("linear_attn.in_proj_qkv", 2, 1, 0),
    ("linear_attn.in_proj_z", 0, 1, 0),
    ("linear_attn.in_proj_b", 0, 0, 1),
    ("linear_attn.in_proj_a", 0, 0, 1),
)
_LLAMA = Family()
_BLOOM = Family(
    embeddings="word_embeddings",
    attention=("self_attention.query_key_value", "self_attention.dense"),
    mlp=_NEOX_MLP,
    gated=False,
    norm_bias=True,
)
_QWEN3_5 = Family(double_queries=True, qk_norm="head", linear_attention=_SPLIT_LINEAR)
_MIXTRAL_NAMES = ("gate", "w1", "w3", "w2")
_QWEN_NAMES = ("gate", "gate_proj", "up_proj", "down_proj")

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(
        ("llama", "internlm", "internlm2", "internlm3", "mistral", "ministral", "ministral3", "smollm3", "gemma"),
        _LLAMA,
    ),
    **dict.fromkeys(("granite", "granitemoe", "ernie4_5", "cwm", "minicpm3"), _LLAMA),
    "apertus": Family(qk_norm="head", mlp=_UP_DOWN, gated=False, mlp_numbers=2),
    "arcee": Family(mlp=_UP_DOWN, gated=False),
    "bloom": _BLOOM._replace(embedding_norm=True),
    "cohere": Family(norms=1, qk_norm="whole", qk_norm_optional=True),
    "cohere2": Family(norms=1),
    "deepseek_v2": Family(split_experts=_QWEN_NAMES),
    "deepseek_v3": Family(split_experts=_QWEN_NAMES),
    "exaone4": Family(qk_norm="head"),
    "falcon": _BLOOM._replace(norms=1, own_linears="all"),
    "gemma2": Family(norms=4),
    "gemma3_text": Family(norms=4, qk_norm="head"),
    "gemma3n_text": Family(norms=4, qk_norm="head"),
    "gemma4_text": Family(norms=4, qk_norm="head", experts_beside_mlp=True, router="router.proj"),
    "glm": Family(output_bias=False, mlp=_FUSED_GATED),
    "glm4": Family(output_bias=False, mlp=_FUSED_GATED, norms=4),
    "glm4_moe": Family(output_bias=False, qk_norm="head", qk_norm_optional=True, split_experts=_QWEN_NAMES),
    "glm4_moe_lite": Family(split_experts=_QWEN_NAMES),
    "gpt2": Family(
        embeddings="wte",
        attention=("attn.c_attn", "attn.c_proj"),
        mlp=("mlp.c_fc", "mlp.c_proj"),
        gated=False,
        norm_bias=True,
        positions=0,
    ),
    "gpt_neox": _BLOOM._replace(embeddings="embed_in", attention=("attention.query_key_value", "attention.dense")),
    "gpt_oss": Family(sinks=True, expert_bias=True),
    "granitemoeshared": Family(shared=("shared_mlp.input_linear", "shared_mlp.output_linear")),
    "hunyuan_v1_dense": Family(qk_norm="head"),
    "llama4_text": Family(
        mlp=("feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"),
        shared=(
            "feed_forward.shared_expert.gate_proj",
            "feed_forward.shared_expert.up_proj",
            "feed_forward.shared_expert.down_proj",
        ),
        router="feed_forward.router",
        own_linears="router",
    ),
    "mixtral": Family(split_experts=_MIXTRAL_NAMES),
    "nemotron": Family(mlp=_UP_DOWN, gated=False, norm_bias=True),
    "olmo": Family(norms=0),
    "olmo2": Family(qk_norm="whole"),
    "olmo3": Family(qk_norm="whole"),
    "olmoe": Family(qk_norm="whole", split_experts=_QWEN_NAMES),
    "opt": Family(
        attention=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj"),
        mlp=("fc1", "fc2"),
        gated=False,
        norm_bias=True,
        positions=2,
    ),
    "phi": Family(
        attention=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.dense"),
        mlp=("mlp.fc1", "mlp.fc2"),
        gated=False,
        norms=1,
        norm_bias=True,
        qk_norm="head",
        qk_norm_optional=True,
        qk_norm_bias=True,
    ),
    "phi3": Family(attention=("self_attn.qkv_proj", "self_attn.o_proj"), mlp=_FUSED_GATED),
    "phimoe": Family(norm_bias=True, router="mlp.router", own_linears="router"),
    "qwen2": Family(output_bias=False),
    "qwen2_moe": Family(output_bias=False, shared=_ONE_SHARED, shared_gate=True),
    "qwen3": Family(qk_norm="head"),
    "qwen3_5_moe_text": _QWEN3_5._replace(shared=_ONE_SHARED, shared_gate=True),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_moe": Family(qk_norm="head", split_experts=_QWEN_NAMES),
    "qwen3_next": _QWEN3_5._replace(
        linear_attention=_NEXT_LINEAR, shared=_ONE_SHARED, shared_gate=True, split_experts=_QWEN_NAMES
    ),
    "seed_oss": Family(output_bias=False),
    "stablelm": Family(output_bias=False, norm_bias=True, qk_norm="whole", qk_norm_optional=True),
    "starcoder2": Family(mlp=("mlp.c_fc", "mlp.c_proj"), gated=False, norm_bias=True),
}
FAMILIES["gpt_bigcode"] = FAMILIES["gpt2"]
