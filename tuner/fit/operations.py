"""What one rank computes and moves for one optimizer step, counted from a recipe; `step_time` makes seconds of it.

It knows no GPU. FLOPs of matrix products: 2 a weight and token forward, 2 for the gradient of the inputs, 2 for that of
a trained weight (Kaplan et al., 2020, arXiv:2001.08361, section 2.1). Bytes: what each kernel of transformers 5.24 and
PEFT 0.21 reads and writes in 16 bits; `tests/fit/test_operations.py` counts both on the libraries themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal, NamedTuple

from tuner.fit.activations import attention_of, has_liger, has_mask, inner_width
from tuner.fit.estimate import frozen_bytes, state_bytes
from tuner.fit.families import Layer
from tuner.fit.levels import Costs
from tuner.fit.parameters import active_parameters, adapted, backward_share, built, count, trained_share
from tuner.fit.step_time import Attention, Operations
from tuner.recipes.schema import RecipeConfig
from tuner.recipes.schema.architecture import Architecture
from tuner.recipes.schema.long_context import tokens_per_sample
from tuner.recipes.schema.tensor_parallel import of_fullest_rank

Lora = Literal["fused", "compiled", "peft"]
"""How LoRA is computed: as one function (`models.fused_lora`), by a compiler, or kernel by kernel by PEFT."""

_NORM, _ROTARY, _GATE, _RESIDUALS, _ROUTED = 36, 18, 10, 12, 16
"""Bytes a number of the width, forward: an RMS norm (to fp32, square, mean, product, back, weight), a rotary embedding
(two products, a turned copy, a sum), a gate (its function, the product), two residual sums, a token's way to an expert.
"""
_JOINED_NORM, _JOINED_ROTARY, _JOINED_GATE, _NO_GATE = 4, 4, 6, 4
"""The same where one kernel reads and writes once: Liger's, a compiler's, torch's layer norm, a plain activation."""
_BACKWARD = 2.25
"""All of these together move so many times as much in the backward pass."""
_LORA: dict[Lora, tuple[tuple[int, int], tuple[int, int]]] = {
    "fused": ((2, 4), (6, 4)),
    "compiled": ((2, 8), (6, 6)),
    "peft": ((2, 12), (10, 8)),
}
"""Bytes that LoRA moves beside its base for each number of a layer's input and output, forward, and backward.

Forward all read the input; PEFT writes the update, scales it and adds it, one function adds while it multiplies, and a
compiler scales and adds at once. Backward all read the output's gradient twice, and the input once.
"""
_DROPOUT = 5
"""Bytes more of each number of the input, forward and again backward, with dropout: a mask, and a copy."""
_EAGER = 18
"""Bytes that eager attention moves forward for a head and a pair of tokens: scores, mask, softmax in fp32, a copy."""
_FLASH_BACKWARD = 2.5
"""FLOPs of attention's backward pass for one of its forward pass: five products instead of two, scores among them
(Dao, 2023, arXiv:2307.08691, section 4.1)."""
_LOSS = {"whole": (0, 34), "chunked": (2, 14), "once": (0, 10)}
"""Of a loss: FLOPs more a weight of the head and token, and bytes moved a logit.

'whole': logits, their copy in fp32, its log-softmax, and the gradients of all three. 'chunked' computes each tile
twice, and turns it into its own gradient (trl/kernels/chunked_logprob.py); 'once' does not compute it again
(`worker.loss`, which `computes_logits_once` is about)."""
_UNPACKED = 2
"""Bytes written a weight when bitsandbytes unpacks it for a matrix product, beside those that are read."""
_SUM = 6
"""Bytes moved a trained parameter and micro-batch to add its gradient to those before."""
_UPDATE = 20
"""Bytes moved a parameter in its update, beside twice the optimizer's own state: a gradient of 16 bits becomes one of
32 (6), its norm (4), master and weight (10)."""
_OF_SHARD = 16
"""More where ZeRO shards: gradients are copied into one flat tensor (4), scaled in fp32 (8), and looked at (4)."""
_KERNELS = (38, 71)
"""Kernels that a layer's forward and backward pass start."""
_KERNELS_OF_LORA: dict[Lora, tuple[int, int]] = {"fused": (2, 3), "compiled": (3, 4), "peft": (4, 5)}
"""More of them for a linear layer with an adapter."""


class _Pass(NamedTuple):
    """How often a layer is computed: forward (twice with a reference model), backward, and again before that."""

    layer: Layer
    forward: int
    backward: bool
    again: bool

    @property
    def forwards(self) -> int:
        return self.forward + self.again


class _Step(NamedTuple):
    """A step: the recipe, and what all of its layers share. `row`: how many tokens attend to each other."""

    recipe: RecipeConfig
    architecture: Architecture
    tokens: float
    row: float
    attention: Attention
    lora: Lora
    scale: float
    """Bytes for one of 16 bits."""


def of_step(
    recipe: RecipeConfig,
    architecture: Architecture,
    costs: Costs,
    ranks: int,
    weight_bytes: int = 2,
    *,
    lora: Lora | None = None,
    sample_tokens: float | None = None,
) -> Operations:
    """Return what one rank computes and moves for its share of a step, if every row has the full length.

    Left out: towers of images, the generation of completions, teachers.

    Args:
        ranks: All of the run.
        lora: How adapters are computed; None: as the worker computes them.
        sample_tokens: The length of a token's sample in packed rows, the mean over all tokens; None: each row is one
            sample. A mask of all pairs makes no use of it.
    """
    architecture, ranks = of_fullest_rank(recipe, architecture), ranks // recipe.train_cfg.autotp_size
    model, micro_batches = built(architecture), recipe.split.accumulation
    attention = _attention(recipe, architecture)
    row: float = tokens_per_sample(recipe) // recipe.objective.facts.sequences_per_sample
    if sample_tokens is not None and attention.startswith("flash"):
        row = min(row, sample_tokens)
    tokens = recipe.split.samples * tokens_per_sample(recipe) / recipe.train_cfg.sequence_parallel_size
    step = _Step(recipe, architecture, tokens, row, attention, lora or lora_of(recipe, costs), weight_bytes / 2)
    counted = Operations(micro_batches=micro_batches, attention=attention)
    for layer_pass, number in Counter(_passes(recipe, model.layers)).items():
        counted = counted.plus(_of_layer(step, layer_pass).times(number))
    counted = counted.plus(_of_head(step, model.head.weights, model.head.outputs))
    return counted.plus(_of_update(recipe, architecture, costs, ranks, weight_bytes))


def _passes(recipe: RecipeConfig, layers: tuple[Layer, ...]) -> Iterable[_Pass]:
    """Yield each layer with its passes; gradients pass through the last layers alone where only these are trained."""
    forward = 1 + recipe.objective.loads_reference
    first = len(layers) - (recipe.train_cfg.trainable_layers or len(layers))
    recomputed = recipe.split.num_recomputed(len(layers))
    for number, layer in enumerate(layers):
        yield _Pass(layer, forward, number >= first, first <= number < recomputed)


def lora_of(recipe: RecipeConfig, costs: Costs) -> Lora:
    """Return how the worker computes an adapter."""
    if recipe.train_cfg.torch_compile:
        return "compiled"
    return "fused" if recipe.fuses_lora(shards=costs.stage == 3) else "peft"


def _attention(recipe: RecipeConfig, architecture: Architecture) -> Attention:
    name = attention_of(recipe, architecture)
    if name == "sdpa":
        return "masked" if has_mask(recipe, architecture) else "flash"
    if name == "eager":
        return "eager"
    return "flash_attention_3" if name == "flash_attention_3" else "flash"


def _of_layer(step: _Step, layer_pass: _Pass) -> Operations:
    """Return what one layer computes and moves in all micro-batches."""
    recipe, layer, tokens, scale = step.recipe, layer_pass.layer, step.tokens, step.scale
    is_full_tuning, micro_batches = recipe.adapter is None, recipe.split.accumulation
    backwards = layer_pass.backward * (1 + is_full_tuning)
    weights, widths, stored = _products(layer)
    # A checkpoint stops as soon as it has what the backward pass reads: the output of the last product is not read
    # (torch 2.13, early stopping), unless a norm follows, or an adapter, which reads its input after that product.
    of_last = layer.linears[-1].weights if layer.linears and not layer.experts else 0
    skipped = of_last * layer_pass.again * (is_full_tuning and built(step.architecture).family.norms == 2)
    adapters = [*adapted(recipe, layer.linears)] if recipe.adapter else []
    inputs, outputs = (sum(sizes) for sizes in ([a.inputs for a in adapters], [a.outputs for a in adapters]))
    of_lora = 2.0 * (recipe.adapter.r if recipe.adapter else 0) * (inputs + outputs)
    (fwd_in, fwd_out), (bwd_in, bwd_out) = _LORA[step.lora]
    dropped = _DROPOUT * recipe.drops_inputs * inputs
    forward = fwd_in * inputs + fwd_out * outputs + dropped
    on_forward, on_backward = _KERNELS
    of_adapters = tuple(len(adapters) * number for number in _KERNELS_OF_LORA[step.lora])
    unpacked = sum(a.weights for a in layer.linears if a.quantizable) if recipe.quantization else 0
    bits = recipe.quantization.bits if recipe.quantization else 16
    # What a layer's experts are unpacked to is kept for its backward pass.
    of_experts = layer.experts.quantizable if layer.experts and recipe.packs_experts else 0
    unpacks = unpacked * (layer_pass.forwards + layer_pass.backward) + of_experts * layer_pass.forwards
    return Operations(
        matmul_flops=tokens * (2.0 * weights * (layer_pass.forwards + backwards) - 2.0 * skipped)
        + tokens * of_lora * (layer_pass.forwards + 2 * layer_pass.backward),
        forward_flops=tokens * layer_pass.forward * (2.0 * weights + of_lora),
        attention_flops=tokens
        * attention_flops(step.architecture, layer, step.row, step.attention)
        * (layer_pass.forwards + _FLASH_BACKWARD * layer_pass.backward),
        matmul_bytes=2 * scale * (tokens * widths + micro_batches * stored) * (layer_pass.forwards + backwards),
        elementwise_bytes=scale
        * tokens
        * _forward_bytes(step, layer)
        * (layer_pass.forwards + _BACKWARD * layer_pass.backward),
        lora_bytes=scale * tokens * (forward * layer_pass.forwards + (bwd_in * inputs + bwd_out * outputs + dropped)),
        dequantized_bytes=micro_batches * unpacks * (bits / 8 + _UNPACKED),
        kernels=micro_batches * (on_forward + of_adapters[0]) * layer_pass.forwards
        + micro_batches * (on_backward + of_adapters[1]) * layer_pass.backward,
    )


def _products(layer: Layer) -> tuple[float, float, float]:
    """Return the weights that a token is multiplied with, the numbers that it brings and takes, and all weights."""
    weights = sum(linear.weights for linear in layer.linears)
    widths = sum(linear.inputs + linear.outputs for linear in layer.linears)
    if (experts := layer.experts) is None:
        return weights, widths, weights
    of_token = experts.matrices * experts.per_token
    expert_widths = of_token * (experts.hidden + experts.width)
    return weights + of_token * experts.hidden * experts.width, widths + expert_widths, weights + experts.parameters


def attention_flops(architecture: Architecture, layer: Layer, row: float, attention: Attention) -> float:
    """Return a token's FLOPs of scores and of their sum of values in a forward pass.

    A token sees half of its row on average: 2 FLOPs for each number of the query, and 2 for the sum of values. With a
    mask all pairs are computed. Linear attention counts as nothing more than its products.
    """
    if any(linear.name.startswith("linear_attn.") for linear in layer.linears):
        return 0.0
    width = architecture.num_attention_heads * architecture.head_dim
    return (2.0 if attention.startswith("flash") else 4.0) * width * row


def _forward_bytes(step: _Step, layer: Layer) -> float:
    """Return the bytes that a layer moves for one token between its matrix products, in a forward pass."""
    recipe, architecture = step.recipe, step.architecture
    family, hidden = built(architecture).family, architecture.hidden_size
    heads = architecture.head_dim * (architecture.num_attention_heads + architecture.num_key_value_heads)
    is_joined = has_liger(recipe, architecture) or bool(recipe.train_cfg.torch_compile)
    norm = _JOINED_NORM if is_joined or family.norm_bias else _NORM
    normed = family.norms * hidden + (heads if family.qk_norm else 0)
    rotary = 0 if family.positions is not None else _JOINED_ROTARY if is_joined else _ROTARY
    gate = (_JOINED_GATE if is_joined else _GATE) if family.gated else _NO_GATE
    routed = _ROUTED * layer.experts.per_token * hidden if layer.experts else 0
    scores = _EAGER * architecture.num_attention_heads * step.row if step.attention == "eager" else 0
    between = norm * normed + rotary * heads + gate * inner_width(architecture, layer) + _RESIDUALS * hidden
    return float(between + routed + scores)


def _of_head(step: _Step, weights: int, words: int) -> Operations:
    recipe, forward = step.recipe, 1 + step.recipe.objective.loads_reference
    if recipe.objective.facts.scores:
        return Operations()
    kind = recipe.train_cfg.loss if recipe.objective.facts.can_chunk_logits else "whole"
    # `auto` that is not settled yet is chunks.
    again, moved = _LOSS.get("once" if recipe.computes_logits_once else kind, _LOSS["chunked"])
    trained = recipe.adapter is None and not recipe.train_cfg.trainable_layers
    return Operations(
        matmul_flops=step.tokens * weights * (2.0 * (forward + 1 + trained) + again),
        forward_flops=step.tokens * weights * 2.0 * forward,
        matmul_bytes=2 * step.scale * weights * recipe.split.accumulation * (forward + 1 + trained),
        loss_bytes=step.scale * step.tokens * words * moved,
    )


def _of_update(
    recipe: RecipeConfig, architecture: Architecture, costs: Costs, ranks: int, weight_bytes: int
) -> Operations:
    """Return what the update moves, and what passes between GPU and host where it is offloaded.

    The host gets the gradients of every micro-batch, gives back the new weights, and where it has the weights, gives
    these forward and backward.
    """
    parameters, micro_batches = count(recipe, architecture), recipe.split.accumulation
    shard = parameters.trainable / ranks if costs.stage else parameters.trainable
    sums = _SUM * parameters.trainable * micro_batches
    weights = 0.0
    if costs.offload_param:
        stored = weight_bytes * parameters.trainable + frozen_bytes(parameters, weight_bytes)
        weights = 2 * micro_batches * stored / ranks
    if costs.offload_optimizer:
        passed = weight_bytes * shard * (micro_batches + 1) + weights
        return Operations(update_bytes=sums, host_updates=shard, host_bytes=passed)
    of_parameter = _UPDATE + 2 * costs.state_part * state_bytes(recipe) + _OF_SHARD * (costs.stage > 0 and ranks > 1)
    return Operations(update_bytes=sums + shard * of_parameter, host_bytes=weights)


def model_flops(recipe: RecipeConfig, architecture: Architecture) -> float:
    """Return the FLOPs of training on one token by which a utilisation is told; a step needs others.

    Chowdhery et al., PaLM, 2022 (arXiv:2204.02311), appendix B: 6 a parameter that a token passes through, 4 where it
    is frozen, 2 in layers below the trained ones. Recomputation, attention and a reference model are left out.
    """
    trained, passed = trained_share(recipe, architecture), backward_share(recipe, architecture)
    return active_parameters(architecture) * (2 + 2 * trained + 2 * passed)
