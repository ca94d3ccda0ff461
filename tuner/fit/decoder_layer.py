"""One decoder layer as a model_type has it: its linear layers by name, its experts, and how much else there is.

It knows one layer at a time; `fit.parameters` adds them up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tuner.fit.families import Family
from tuner.recipes.schema.architecture import Architecture


class Linear(NamedTuple):
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


class Experts(NamedTuple):
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


class Layer(NamedTuple):
    """One decoder layer; `others` counts norms, convolutions, routers that are no linear layers, and the like."""

    linears: tuple[Linear, ...]
    experts: Experts | None
    others: int

    @property
    def parameters(self) -> int:
        experts = self.experts.parameters if self.experts else 0
        return sum(linear.parameters for linear in self.linears) + experts + self.others


def layer(family: Family, architecture: Architecture, index: int) -> Layer:
    """Return a layer, counted from 0."""
    experts = _experts(family, architecture) if architecture.has_experts(index) else None
    linears = [*_attention(family, architecture, index)]
    if experts is None or family.experts_beside_mlp:
        linears += _mlp(family.mlp, family.gated, architecture, _inner(architecture, index))
    if experts:
        linears += _beside_experts(family, architecture, experts)
    linears += _of_gemma(architecture)
    if family.own_linears == "all":
        linears = [linear._replace(quantizable=False) for linear in linears]
    norms = _norms(family, architecture, index) + _of_gemma_norms(architecture)
    return Layer(tuple(linears), experts, norms + _router(family, experts) + family.mlp_numbers)


def _attention(family: Family, architecture: Architecture, index: int) -> Iterator[Linear]:
    if architecture.kv_lora_rank:
        return _latent(architecture, architecture.kv_lora_rank)
    if family.linear_attention and not architecture.attends_to_all(index):
        return _linear(family, architecture)
    return _grouped(family, architecture, index)


def _grouped(family: Family, architecture: Architecture, index: int) -> Iterator[Linear]:
    head, key_value_heads = _heads(architecture, index)
    query, key = architecture.num_attention_heads * head, key_value_heads * head
    outputs = [query * (2 if family.double_queries else 1), key, key]
    if _takes_keys(architecture, index):
        outputs = outputs[:1]
    elif architecture.attention_k_eq_v and architecture.attends_to_all(index):
        outputs = outputs[:2]
    *names, last = family.attention
    if len(names) == 1:
        outputs = [sum(outputs)]
    for name, size in zip(names, outputs, strict=False):
        yield Linear(name, architecture.hidden_size, size, architecture.attention_bias)
    yield Linear(last, query, architecture.hidden_size, architecture.attention_bias and family.output_bias)


def _heads(architecture: Architecture, index: int) -> tuple[int, int]:
    """Return a head's size and the number of key-value heads; Gemma 4's full-attention layers have their own."""
    size, num = architecture.head_dim, architecture.num_key_value_heads
    if architecture.attends_to_all(index):
        size = architecture.global_head_dim or size
        num = architecture.num_global_key_value_heads or num
    return size, num


def _takes_keys(architecture: Architecture, index: int) -> bool:
    return index >= architecture.num_hidden_layers - architecture.num_kv_shared_layers


def _latent(architecture: Architecture, rank: int) -> Iterator[Linear]:
    """Yield multi-head latent attention: DeepSeek-V2, 2024 (arXiv:2405.04434), section 2.1."""
    hidden, heads, bias = architecture.hidden_size, architecture.num_attention_heads, architecture.attention_bias
    nope, rope, value = (
        architecture.qk_nope_head_dim or 0,
        architecture.qk_rope_head_dim or 0,
        architecture.v_head_dim or 0,
    )
    if architecture.q_lora_rank:
        yield Linear("self_attn.q_a_proj", hidden, architecture.q_lora_rank, bias)
        yield Linear("self_attn.q_b_proj", architecture.q_lora_rank, heads * architecture.head_dim)
    else:
        yield Linear("self_attn.q_proj", hidden, heads * architecture.head_dim)
    yield Linear("self_attn.kv_a_proj_with_mqa", hidden, rank + rope, bias)
    yield Linear("self_attn.kv_b_proj", rank, heads * (nope + value))
    yield Linear("self_attn.o_proj", heads * value, hidden, bias)


def _linear(family: Family, architecture: Architecture) -> Iterator[Linear]:
    """Yield a gated delta net: Yang et al., 2024 (arXiv:2412.06464), as Qwen3-Next has it."""
    keys, values, value_heads = _linear_widths(architecture)
    for name, of_keys, of_values, of_heads in family.linear_attention:
        yield Linear(name, architecture.hidden_size, of_keys * keys + of_values * values + of_heads * value_heads)
    yield Linear("linear_attn.out_proj", values, architecture.hidden_size)


def _linear_widths(architecture: Architecture) -> tuple[int, int, int]:
    keys = (architecture.linear_num_key_heads or 0) * (architecture.linear_key_head_dim or 0)
    value_heads = architecture.linear_num_value_heads or 0
    return keys, value_heads * (architecture.linear_value_head_dim or 0), value_heads


def _inner(architecture: Architecture, index: int) -> int:
    doubled = architecture.use_double_wide_mlp and _takes_keys(architecture, index)
    return architecture.intermediate_size * (2 if doubled else 1)


def _mlp(names: tuple[str, ...], gated: bool, architecture: Architecture, inner: int) -> Iterator[Linear]:
    *into, out = names
    outputs = inner * (2 if gated else 1) // len(into)
    for name in into:
        yield Linear(name, architecture.hidden_size, outputs, architecture.mlp_bias)
    yield Linear(out, inner, architecture.hidden_size, architecture.mlp_bias)


def _experts(family: Family, architecture: Architecture) -> Experts:
    num, taken = architecture.num_experts or 0, architecture.num_experts_per_tok or 0
    return Experts(num, taken, architecture.hidden_size, architecture.moe_intermediate_size or 0, family.expert_bias)


def _beside_experts(family: Family, architecture: Architecture, experts: Experts) -> Iterator[Linear]:
    if family.router:
        yield Linear(family.router, experts.hidden, experts.num, quantizable=family.own_linears != "router")
    if architecture.shared_expert_intermediate_size:
        yield from _mlp(family.shared, True, architecture, architecture.shared_expert_intermediate_size)
        if family.shared_gate:
            yield Linear("mlp.shared_expert_gate", experts.hidden, 1)


def _router(family: Family, experts: Experts | None) -> int:
    if experts is None:
        return 0
    if family.experts_beside_mlp:  # Gemma 4: a scale of the inputs, one number an expert, three more norms
        return 4 * experts.hidden + experts.num
    return 0 if family.router else experts.num * (experts.hidden + family.expert_bias)


def _norms(family: Family, architecture: Architecture, index: int) -> int:
    num = (architecture.num_ln_in_parallel_attn or family.norms) - architecture.use_parallel_residual
    total = num * architecture.hidden_size * (2 if family.norm_bias else 1)
    if architecture.kv_lora_rank:
        return total + architecture.kv_lora_rank + (architecture.q_lora_rank or 0)
    if family.linear_attention and not architecture.attends_to_all(index):
        keys, values, value_heads = _linear_widths(architecture)
        convolution = (2 * keys + values) * (architecture.linear_conv_kernel_dim or 0)
        return total + convolution + 2 * value_heads + (architecture.linear_value_head_dim or 0)
    return total + _query_key_norms(family, architecture, index) + architecture.num_attention_heads * family.sinks


def _query_key_norms(family: Family, architecture: Architecture, index: int) -> int:
    if not family.qk_norm or (family.qk_norm_optional and not architecture.use_qk_norm):
        return 0
    size, key_value_heads = _heads(architecture, index)
    if family.qk_norm == "whole":
        return (architecture.num_attention_heads + key_value_heads) * size
    return size * (1 if _takes_keys(architecture, index) else 2) * (2 if family.qk_norm_bias else 1)


def _of_gemma(architecture: Architecture) -> Iterator[Linear]:
    """Yield the layer's own input (Gemma 3n, 4), alternating updates and the learned residual (Gemma 3n)."""
    hidden, inputs = architecture.hidden_size, architecture.altup_num_inputs
    if architecture.hidden_size_per_layer_input:
        yield Linear("per_layer_input_gate", hidden, architecture.hidden_size_per_layer_input)
        yield Linear("per_layer_projection", architecture.hidden_size_per_layer_input, hidden)
    if architecture.laurel_rank:
        yield Linear("laurel.linear_left", hidden, architecture.laurel_rank)
        yield Linear("laurel.linear_right", architecture.laurel_rank, hidden)
    if inputs:
        yield Linear("altup.correction_coefs", inputs, inputs)
        yield Linear("altup.prediction_coefs", inputs, inputs**2)
        yield Linear("altup.modality_router", hidden, inputs)


def _of_gemma_norms(architecture: Architecture) -> int:
    own, laurel, updates = (
        architecture.hidden_size_per_layer_input,
        architecture.laurel_rank,
        architecture.altup_num_inputs,
    )
    return architecture.hidden_size * (bool(own) + bool(laurel) + 2 * bool(updates))
