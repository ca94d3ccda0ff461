"""A model's facts: the recipe's `architecture` block, in the words of config.json, and which of them belong together.

It counts nothing and opens no file; `recipes.config_json` reads these facts from a model's folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from tuner.recipes.block import Block

_MOST = 2**31 - 1
MAX_LAYERS = 10_000
"""They are counted one by one; the deepest published decoder has 126."""
Layers = Annotated[int, Field(gt=0, le=MAX_LAYERS)]
Width = Annotated[int, Field(gt=0, le=_MOST)]
NotNegative = Annotated[int, Field(ge=0, le=_MOST)]

_ATTENTION_BIAS = {"attention_bias": True}
_BIASES = {"attention_bias": True, "mlp_bias": True}
OF_TYPE: dict[str, dict[str, Any]] = {
    "bloom": _BIASES,
    "glm": _ATTENTION_BIAS,
    "glm4": _ATTENTION_BIAS,
    "gpt2": _BIASES,
    "gpt_bigcode": _BIASES,
    "gpt_neox": _BIASES,
    "gpt_oss": _ATTENTION_BIAS,
    "internlm": _ATTENTION_BIAS,
    "opt": _BIASES,
    "phi": {**_BIASES, "lm_head_bias": True},
    "qwen2": _ATTENTION_BIAS,
    "qwen2_moe": _ATTENTION_BIAS,
    "qwen3_5_moe_text": {"full_attention_interval": 4},
    "qwen3_5_text": {"full_attention_interval": 4},
    "qwen3_next": {"full_attention_interval": 4},
    "seed_oss": _ATTENTION_BIAS,
    "starcoder2": _BIASES,
}
"""Facts that a model of a type has unless it says otherwise: transformers' defaults where they are not off."""

EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
OF_EXPERTS = ("shared_expert_intermediate_size", "num_dense_layers", "decoder_sparse_step")
_LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_LINEAR = (
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
_OWN_INPUTS = ("hidden_size_per_layer_input", "vocab_size_per_layer_input")
_ALTERNATING_UPDATES = ("laurel_rank", "altup_num_inputs")
_TOGETHER = (EXPERTS, _LATENT, _LINEAR, _OWN_INPUTS, _ALTERNATING_UPDATES)
_NEEDS = {
    **dict.fromkeys(
        ("mixtral", "phimoe", "olmoe", "gpt_oss", "granitemoe", "qwen2_moe", "qwen3_moe", "glm4_moe", "llama4_text"),
        EXPERTS,
    ),
    "deepseek_v2": _LATENT + EXPERTS,
    "deepseek_v3": _LATENT + EXPERTS,
    "gemma3n_text": _OWN_INPUTS + _ALTERNATING_UPDATES,
    "gemma4_text": ("full_attention_interval", "global_head_dim"),
    "glm4_moe_lite": _LATENT + EXPERTS,
    "granitemoeshared": (*EXPERTS, "shared_expert_intermediate_size"),
    "minicpm3": _LATENT,
    "qwen3_5_moe_text": _LINEAR + EXPERTS,
    "qwen3_5_text": _LINEAR,
    "qwen3_next": _LINEAR + EXPERTS,
}
_MEANS_NOTHING_WITHOUT = {
    **dict.fromkeys(OF_EXPERTS, "num_experts"),
    "q_lora_rank": "kv_lora_rank",
    "global_head_dim": "full_attention_interval",
    # transformers 5.23 builds the other number of heads only where values are keys.
    "num_global_key_value_heads": "attention_k_eq_v",
}


class Architecture(Block):
    """The model's facts in the words of its config.json; of a model that also sees or hears, its text half's.

    A fact left out is as `OF_TYPE` says for the model_type, or means nothing to it.
    """

    model_type: str
    num_hidden_layers: Layers
    hidden_size: Width
    # Width of a dense layer's MLP; where every layer holds experts, config.json's number, from which nothing is built.
    intermediate_size: Width
    num_attention_heads: Width
    num_key_value_heads: Width
    # Of queries and keys; with latent attention qk_nope_head_dim + qk_rope_head_dim.
    head_dim: Width
    vocab_size: Width
    tie_word_embeddings: bool
    max_position_embeddings: Width

    attention_bias: bool = False
    mlp_bias: bool = False
    lm_head_bias: bool = False
    # Norms on queries and keys of types where only some models have them: cohere, glm4_moe, phi, stablelm.
    use_qk_norm: bool = False
    # stablelm: one norm in a layer instead of two.
    use_parallel_residual: bool = False
    # falcon: norms in a layer.
    num_ln_in_parallel_attn: Width | None = None
    # opt: width of the embeddings where it is not hidden_size; False: no norm after the last layer.
    word_embed_proj_dim: Width | None = None
    do_layer_norm_before: bool = True

    # Experts: the width of one, and of all shared ones together.
    num_experts: Width | None = None
    num_experts_per_tok: Width | None = None
    moe_intermediate_size: Width | None = None
    shared_expert_intermediate_size: Width | None = None
    # Layers at the start that have none; of the others, every so many-th has them.
    num_dense_layers: NotNegative = 0
    decoder_sparse_step: Width = 1

    # Latent attention (DeepSeek). q_lora_rank None: queries are not compressed.
    q_lora_rank: Width | None = None
    kv_lora_rank: Width | None = None
    qk_nope_head_dim: Width | None = None
    qk_rope_head_dim: Width | None = None
    v_head_dim: Width | None = None

    # Every so many-th layer attends to all tokens; the others are linear (qwen3_next, qwen3_5) or windows (gemma4).
    full_attention_interval: Width | None = None
    linear_conv_kernel_dim: Width | None = None
    linear_key_head_dim: Width | None = None
    linear_value_head_dim: Width | None = None
    linear_num_key_heads: Width | None = None
    linear_num_value_heads: Width | None = None

    # gemma3n, gemma4: each layer's own embeddings; layers at the end that take keys and values from an earlier one.
    hidden_size_per_layer_input: Width | None = None
    vocab_size_per_layer_input: Width | None = None
    num_kv_shared_layers: NotNegative = 0
    # gemma3n
    laurel_rank: Width | None = None
    altup_num_inputs: Width | None = None
    # gemma4: its full-attention layers have other heads, and values that are the keys; its sharing layers, wider MLPs.
    global_head_dim: Width | None = None
    num_global_key_value_heads: Width | None = None
    attention_k_eq_v: bool = False
    use_double_wide_mlp: bool = False

    @model_validator(mode="before")
    @classmethod
    def _as_the_type_has_it(cls, facts: Any) -> Any:
        return {**OF_TYPE.get(str(facts.get("model_type")), {}), **facts} if isinstance(facts, dict) else facts

    @model_validator(mode="after")
    def _facts_agree(self) -> Architecture:
        for contradiction in _contradictions(self):
            raise ValueError(contradiction)
        return self

    @model_serializer(mode="wrap")
    def _without_what_says_nothing(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in dump(self).items() if says_something(self.model_type, key, value)}

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, holds experts."""
        later = layer >= self.num_dense_layers
        return bool(self.num_experts) and later and (layer + 1) % self.decoder_sparse_step == 0

    def attends_to_all(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, has softmax attention over the whole text."""
        return self.full_attention_interval is None or (layer + 1) % self.full_attention_interval == 0


def says_something(model_type: str, key: str, value: Any) -> bool:
    """Return whether a fact, were it left out, would be another."""
    field = Architecture.model_fields[key]
    return field.is_required() or value != OF_TYPE.get(model_type, {}).get(key, field.default)


def _contradictions(facts: Architecture) -> Iterator[str]:
    given = {key for key, value in facts if value not in (None, False)}
    given -= {key for key in _MEANS_NOTHING_WITHOUT if getattr(facts, key) == Architecture.model_fields[key].default}
    for key in _NEEDS.get(facts.model_type, ()):
        if key not in given:
            yield f"{facts.model_type} needs {key}"
    for group in _TOGETHER:
        found, missing = [key for key in group if key in given], [key for key in group if key not in given]
        if found and missing:
            yield f"{found[0]} = {getattr(facts, found[0])} means nothing without {missing[0]}"
    for key, other in _MEANS_NOTHING_WITHOUT.items():
        if key in given and other not in given:
            yield f"{key} = {getattr(facts, key)} means nothing without {other}"
    yield from _wrong_numbers(facts)


def _wrong_numbers(facts: Architecture) -> Iterator[str]:
    for key in ("num_key_value_heads", "num_global_key_value_heads"):
        shared = getattr(facts, key) or 1
        if facts.num_attention_heads % shared:
            yield f"num_attention_heads = {facts.num_attention_heads} is not a multiple of {key} = {shared}"
    if (facts.num_experts_per_tok or 0) > (facts.num_experts or 0):
        yield f"num_experts_per_tok = {facts.num_experts_per_tok} is more than num_experts = {facts.num_experts}"
    for key in ("num_dense_layers", "num_kv_shared_layers"):
        if getattr(facts, key) > facts.num_hidden_layers:
            yield f"{key} = {getattr(facts, key)} is more than num_hidden_layers = {facts.num_hidden_layers}"
    latent = (facts.qk_nope_head_dim or 0) + (facts.qk_rope_head_dim or 0)
    if latent and facts.head_dim != latent:
        yield f"head_dim = {facts.head_dim} is not qk_nope_head_dim + qk_rope_head_dim = {latent}"
