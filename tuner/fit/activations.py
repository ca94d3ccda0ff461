"""Bytes that one micro-batch keeps for its backward pass: per layer and token, of the logits, of the loss.

It takes a recipe and facts; it knows no ZeRO level, which does not change activations.

Counted on the tensors that autograd saves in transformers 5.23 (bf16, SDPA): exact for Llama, Qwen 2 and 3, Mistral and
Gemma, within an eighth for the others (tests/fit/test_activations.py holds the measurement). Korthikanti et al., 2022
(arXiv:2205.05198), section 4, counts the same way for another layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from tuner.fit.families import FAMILIES, Family
from tuner.fit.layers import Layer
from tuner.fit.parameters import built
from tuner.recipes.architecture import Architecture
from tuner.recipes.schema import RecipeConfig

_OWN_LAYER_NORM = {"cohere", "cohere2"}
"""A layer norm written out in fp32: its steps are saved one by one."""
_FP32_WEIGHT_NORM = {"gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "olmo2", "olmo3"}
_PAIRED = ("dpo", "orpo", "reward")
_LOGITS_PEAK, _LOGITS_KEPT = 14, 6
"""Bytes a logit in Hugging Face's loss: at its peak, and from the forward's end to the backward's start."""


@dataclass(frozen=True)
class Work:
    """Bytes at the peak of forward and backward: `activations` beside `logits`."""

    activations: float
    logits: float


def tokens_per_sample(recipe: RecipeConfig) -> int:
    """Return the tokens of one sample at most; a pair is two answers."""
    pair = 2 if recipe.objective.type in _PAIRED else 1
    return pair * recipe.train_dataloader.dataset.max_length


def of_recipe(recipe: RecipeConfig, facts: Architecture, weight_bytes: int = 2) -> Work:
    """Return what one micro-batch holds. fp32 (`weight_bytes` 4) doubles what is saved in 16 bits."""
    tokens = recipe.train_dataloader.batch_size * tokens_per_sample(recipe)
    scale = tokens * weight_bytes / 2
    layers = built(facts).layers[-(recipe.train_cfg.trainable_layers or 0) :]
    saved = [scale * layer_bytes(recipe, facts, layer) for layer in layers]
    width = 0 if recipe.objective.type == "reward" else facts.vocab_size
    logits = _LOGITS_PEAK * width * tokens
    if not recipe.train_cfg.gradient_checkpointing:
        return Work(sum(saved), logits)
    kept = scale * len(layers) * 2 * facts.hidden_size
    # One layer is computed again while its backward runs; the logits are gone by then.
    return Work(kept + max(0.0, max(saved) - logits), logits)


def layer_bytes(recipe: RecipeConfig, facts: Architecture, layer: Layer) -> float:
    """Return the bytes that one layer saves for one token."""
    family, trained = FAMILIES[facts.model_type], recipe.adapter is None
    total = _norms(family, facts, trained=trained) + _mlp(family, facts, layer)
    total += _attention(family, facts, layer, trained=trained)
    if recipe.model.attn_implementation == "eager":
        total += 6 * facts.num_attention_heads * recipe.train_dataloader.dataset.max_length
    return total + (_adapter(recipe, facts, layer) if recipe.adapter else 0)


def _norms(family: Family, facts: Architecture, *, trained: bool) -> float:
    # What a norm gives to linear layers is saved once more: one norm's output for attention, another's for the MLP.
    inputs = 2 * 2 * facts.hidden_size if family.norms != 1 else 2 * facts.hidden_size
    return family.norms * _norm(facts.hidden_size, family, facts, trained=trained) + inputs


def _norm(width: int, family: Family, facts: Architecture, *, trained: bool) -> float:
    """Return what a norm saves: its input (RMS norms in fp32) and, where its weight is trained, the scaled input."""
    if facts.model_type in _OWN_LAYER_NORM:
        return 12 * width
    if family.norm_bias or facts.model_type == "olmo":
        return 2 * width + 8
    weighted = 4 if facts.model_type in _FP32_WEIGHT_NORM else 2
    return (4 + (weighted if trained else 0)) * width + 4


def _attention(family: Family, facts: Architecture, layer: Layer, *, trained: bool) -> float:
    heads, groups = facts.num_attention_heads, facts.num_key_value_heads
    query, key = heads * facts.head_dim, groups * facts.head_dim
    if facts.kv_lora_rank:  # keys and values of every head come out of the latent
        value = heads * (facts.v_head_dim or facts.head_dim)
        return 4 * query + 4 * value + 8 * (facts.kv_lora_rank + (facts.q_lora_rank or 0)) + 4 * heads
    linear = [one for one in layer.linears if one.name.startswith("linear_attn.")]
    if linear:  # each projection's output before and after the convolution, and the recurrence's inputs in fp32
        return 6 * sum(one.outputs for one in linear)
    total: float = 4 * query + 4 * key + 4 * heads
    if family.qk_norm and (not family.qk_norm_optional or facts.use_qk_norm):
        weighted = 4 if facts.model_type in _FP32_WEIGHT_NORM else 2
        total += (4 + (weighted if trained else 0)) * (query + key) + 4 * (heads + groups)
    return total


def _mlp(family: Family, facts: Architecture, layer: Layer) -> float:
    each = 8 if family.gated else 4
    downs = (family.mlp[-1], family.shared[-1])
    dense = sum(each * one.inputs for one in layer.linears if one.name in downs)
    experts = layer.experts
    if experts is None:
        return dense
    return dense + experts.per_token * (each * experts.width + 4 * experts.hidden) + 6 * experts.num


def _adapter(recipe: RecipeConfig, facts: Architecture, layer: Layer) -> float:
    """Return what adapters save: the low-rank values, and with dropout a mask (1 byte) and a copy (2) of each input."""
    adapter = recipe.adapter
    assert adapter is not None
    low_rank = 2 * adapter.r * len(layer.linears)
    if not adapter.lora_dropout:
        return low_rank
    copies = 3 * sum(linear.inputs for linear in layer.linears)
    # The undropped inputs of attention, MLP and its last layer are then saved no more.
    downs = max((one.inputs for one in layer.linears), default=0)
    return low_rank + max(0, copies - 4 * facts.hidden_size - 2 * downs)


def largest_layer(facts: Architecture) -> int:
    """Return the parameters of the largest tensor: what ZeRO-3 gathers at once at least."""
    model = built(facts)
    linears = max((linear.weights for layer in model.layers for linear in layer.linears), default=0)
    experts = max((layer.experts.parameters * 2 // 3 for layer in model.layers if layer.experts), default=0)
    return max(linears, experts, model.embeddings)
