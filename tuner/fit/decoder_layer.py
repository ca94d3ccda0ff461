"""One decoder layer as a model_type has it: its linear layers by name, its experts, and how much else there is.

It knows one layer at a time; `fit.parameters` adds them up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tuner.fit.families import Family
from tuner.recipes.architecture import Architecture


@dataclass(frozen=True)
class Linear:
    """One linear layer; `name` is its module's inside the decoder layer, or in the model."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    quantizable: bool = True
    """bitsandbytes stores its weight in fewer bits."""

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs

    @property
    def parameters(self) -> int:
        return self.weights + self.outputs * self.bias


@dataclass(frozen=True)
class Experts:
    """The experts of one layer, fused in transformers 5 into two tensors: [E, 2 * width, H] and [E, H, width]."""

    num: int
    per_token: int
    hidden: int
    width: int
    bias: bool

    @property
    def parameters(self) -> int:
        return self.num * self._of_one

    @property
    def idle(self) -> int:
        """Parameters that one token does not pass through."""
        return (self.num - self.per_token) * self._of_one

    @property
    def _of_one(self) -> int:
        return 3 * self.hidden * self.width + self.bias * (2 * self.width + self.hidden)


@dataclass(frozen=True)
class Layer:
    """One decoder layer; `others` counts norms, convolutions, routers that are no linear layers, and the like."""

    linears: tuple[Linear, ...]
    experts: Experts | None
    others: int

    @property
    def parameters(self) -> int:
        experts = self.experts.parameters if self.experts else 0
        return sum(linear.parameters for linear in self.linears) + experts + self.others


def layer(family: Family, facts: Architecture, index: int) -> Layer:
    """Return a layer, counted from 0."""
    experts = _experts(family, facts) if facts.has_experts(index) else None
    linears = [*_attention(family, facts, index)]
    if experts is None or family.experts_beside_mlp:
        linears += _mlp(family.mlp, family.gated, facts, _inner(facts, index))
    if experts:
        linears += _beside_experts(family, facts, experts)
    linears += _of_gemma(facts)
    if family.own_linears == "all":
        linears = [replace(linear, quantizable=False) for linear in linears]
    norms = _norms(family, facts, index) + _of_gemma_norms(facts)
    return Layer(tuple(linears), experts, norms + _router(family, experts) + family.mlp_numbers)


def _attention(family: Family, facts: Architecture, index: int) -> Iterator[Linear]:
    if facts.kv_lora_rank:
        return _latent(facts, facts.kv_lora_rank)
    if family.linear_attention and not facts.attends_to_all(index):
        return _linear(family, facts)
    return _grouped(family, facts, index)


def _grouped(family: Family, facts: Architecture, index: int) -> Iterator[Linear]:
    head, key_value_heads = _heads(facts, index)
    query, key = facts.num_attention_heads * head, key_value_heads * head
    outputs = [query * (2 if family.double_queries else 1), key, key]
    if _takes_keys(facts, index):
        outputs = outputs[:1]
    elif facts.attention_k_eq_v and facts.attends_to_all(index):
        outputs = outputs[:2]
    *names, last = family.attention
    if len(names) == 1:
        outputs = [sum(outputs)]
    for name, size in zip(names, outputs, strict=False):
        yield Linear(name, facts.hidden_size, size, facts.attention_bias)
    yield Linear(last, query, facts.hidden_size, facts.attention_bias and family.output_bias)


def _heads(facts: Architecture, index: int) -> tuple[int, int]:
    """Return a head's size and the number of key-value heads; Gemma 4's full-attention layers have their own."""
    size, num = facts.head_dim, facts.num_key_value_heads
    if facts.attends_to_all(index):
        size = facts.global_head_dim or size
        num = facts.num_global_key_value_heads or num
    return size, num


def _takes_keys(facts: Architecture, index: int) -> bool:
    return index >= facts.num_hidden_layers - facts.num_kv_shared_layers


def _latent(facts: Architecture, rank: int) -> Iterator[Linear]:
    """Yield multi-head latent attention: DeepSeek-V2, 2024 (arXiv:2405.04434), section 2.1."""
    hidden, heads, bias = facts.hidden_size, facts.num_attention_heads, facts.attention_bias
    nope, rope, value = facts.qk_nope_head_dim or 0, facts.qk_rope_head_dim or 0, facts.v_head_dim or 0
    if facts.q_lora_rank:
        yield Linear("self_attn.q_a_proj", hidden, facts.q_lora_rank, bias)
        yield Linear("self_attn.q_b_proj", facts.q_lora_rank, heads * facts.head_dim)
    else:
        yield Linear("self_attn.q_proj", hidden, heads * facts.head_dim)
    yield Linear("self_attn.kv_a_proj_with_mqa", hidden, rank + rope, bias)
    yield Linear("self_attn.kv_b_proj", rank, heads * (nope + value))
    yield Linear("self_attn.o_proj", heads * value, hidden, bias)


def _linear(family: Family, facts: Architecture) -> Iterator[Linear]:
    """Yield a gated delta net: Yang et al., 2024 (arXiv:2412.06464), as Qwen3-Next has it."""
    keys, values, value_heads = _linear_widths(facts)
    for name, of_keys, of_values, of_heads in family.linear_attention:
        yield Linear(name, facts.hidden_size, of_keys * keys + of_values * values + of_heads * value_heads)
    yield Linear("linear_attn.out_proj", values, facts.hidden_size)


def _linear_widths(facts: Architecture) -> tuple[int, int, int]:
    keys = (facts.linear_num_key_heads or 0) * (facts.linear_key_head_dim or 0)
    value_heads = facts.linear_num_value_heads or 0
    return keys, value_heads * (facts.linear_value_head_dim or 0), value_heads


def _inner(facts: Architecture, index: int) -> int:
    doubled = facts.use_double_wide_mlp and _takes_keys(facts, index)
    return facts.intermediate_size * (2 if doubled else 1)


def _mlp(names: tuple[str, ...], gated: bool, facts: Architecture, inner: int) -> Iterator[Linear]:
    *into, out = names
    outputs = inner * (2 if gated else 1) // len(into)
    for name in into:
        yield Linear(name, facts.hidden_size, outputs, facts.mlp_bias)
    yield Linear(out, inner, facts.hidden_size, facts.mlp_bias)


def _experts(family: Family, facts: Architecture) -> Experts:
    num, taken = facts.num_experts or 0, facts.num_experts_per_tok or 0
    return Experts(num, taken, facts.hidden_size, facts.moe_intermediate_size or 0, family.expert_bias)


def _beside_experts(family: Family, facts: Architecture, experts: Experts) -> Iterator[Linear]:
    if family.router:
        yield Linear(family.router, experts.hidden, experts.num, quantizable=family.own_linears != "router")
    if facts.shared_expert_intermediate_size:
        yield from _mlp(family.shared, True, facts, facts.shared_expert_intermediate_size)
        if family.shared_gate:
            yield Linear("mlp.shared_expert_gate", experts.hidden, 1)


def _router(family: Family, experts: Experts | None) -> int:
    if experts is None:
        return 0
    if family.experts_beside_mlp:  # Gemma 4: a scale of the inputs, one number an expert, three more norms
        return 4 * experts.hidden + experts.num
    return 0 if family.router else experts.num * (experts.hidden + family.expert_bias)


def _norms(family: Family, facts: Architecture, index: int) -> int:
    num = (facts.num_ln_in_parallel_attn or family.norms) - facts.use_parallel_residual
    total = num * facts.hidden_size * (2 if family.norm_bias else 1)
    if facts.kv_lora_rank:
        return total + facts.kv_lora_rank + (facts.q_lora_rank or 0)
    if family.linear_attention and not facts.attends_to_all(index):
        keys, values, value_heads = _linear_widths(facts)
        convolution = (2 * keys + values) * (facts.linear_conv_kernel_dim or 0)
        return total + convolution + 2 * value_heads + (facts.linear_value_head_dim or 0)
    return total + _query_key_norms(family, facts, index) + facts.num_attention_heads * family.sinks


def _query_key_norms(family: Family, facts: Architecture, index: int) -> int:
    if not family.qk_norm or (family.qk_norm_optional and not facts.use_qk_norm):
        return 0
    size, key_value_heads = _heads(facts, index)
    if family.qk_norm == "whole":
        return (facts.num_attention_heads + key_value_heads) * size
    return size * (1 if _takes_keys(facts, index) else 2) * (2 if family.qk_norm_bias else 1)


def _of_gemma(facts: Architecture) -> Iterator[Linear]:
    """Yield the layer's own input (Gemma 3n, 4), alternating updates and the learned residual (Gemma 3n)."""
    hidden, inputs = facts.hidden_size, facts.altup_num_inputs
    if facts.hidden_size_per_layer_input:
        yield Linear("per_layer_input_gate", hidden, facts.hidden_size_per_layer_input)
        yield Linear("per_layer_projection", facts.hidden_size_per_layer_input, hidden)
    if facts.laurel_rank:
        yield Linear("laurel.linear_left", hidden, facts.laurel_rank)
        yield Linear("laurel.linear_right", facts.laurel_rank, hidden)
    if inputs:
        yield Linear("altup.correction_coefs", inputs, inputs)
        yield Linear("altup.prediction_coefs", inputs, inputs**2)
        yield Linear("altup.modality_router", hidden, inputs)


def _of_gemma_norms(facts: Architecture) -> int:
    own, laurel, updates = facts.hidden_size_per_layer_input, facts.laurel_rank, facts.altup_num_inputs
    return facts.hidden_size * (bool(own) + bool(laurel) + 2 * bool(updates))
