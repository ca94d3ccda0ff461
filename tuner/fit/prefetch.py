"""Which weights ZeRO-3 has gathered while the loss's backward runs, and while that of each layer does.

It follows DeepSpeed 0.19.8 (runtime/zero/partitioned_param_coordinator.py), which knows from the first step in which
order weights are used. It gathers ahead in this order, a bucket at a time, until `max_live_parameters` are there. What
is used again within `max_reuse_distance` stays. Both count elements; two 4-bit weights are one. A module is in the
backward pass if its output has a gradient. This module knows no activations.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from tuner.fit.families import Experts, Layer, Linear, layer_of_tower, pixels_of_patch, projector
from tuner.fit.levels import Level
from tuner.fit.parameters import Built, adapted, built, on_experts, rank_on_tower, trains_projector, trains_tower
from tuner.recipes.schema import RecipeConfig
from tuner.recipes.schema.architecture import LARGEST_IN_4_BITS, Architecture


class _Weight(NamedTuple):
    elements: int
    size: float
    is_saved: bool = False
    """Autograd saves it for the backward pass. ZeRO-3 cannot free it then, and gathers a second copy."""


class Gathered(NamedTuple):
    """Bytes of gathered weights while the loss's backward runs, and while the layers' do, from the last layer on."""

    at_loss: float
    at_layers: tuple[float, ...]


def gathered(
    recipe: RecipeConfig, architecture: Architecture, level: Level, weight_bytes: int, *, is_shared: bool = True
) -> Gathered:
    """Return the bytes of the weights that are gathered at the two moments of a step.

    Args:
        recipe: The recipe.
        architecture: Of the model.
        level: The DeepSpeed config.
        weight_bytes: Of a number of the compute type.
        is_shared: Several ranks have shards. One alone copies each weight from the host, without buckets
            (partition_parameters.py, `NoGatherCoalescedHandle`).
    """
    model = built(architecture)
    # The loss reads the head outside of its module. DeepSpeed then gathers it with the whole model and keeps it.
    head = 0 if recipe.objective.facts.scores else model.head.weights
    heads = weight_bytes * head * (2 if recipe.objective.loads_reference and recipe.adapter is None else 1)
    all_parts = _in_order(recipe, architecture, model, weight_bytes)
    # Weights that are too small to shard again stay too.
    always = heads + sum(weight.size for part in all_parts for weight in part if weight.elements <= level.persistence)
    parts = [
        [weight for weight in part if weight.elements > level.persistence]
        for part in _of_backward(recipe, model, all_parts, weight_bytes)
    ]
    # ZeRO-3 keeps weights from the forward to the backward pass if few elements come in between. These are the layers
    # behind a layer: in the forward pass, in the backward pass, and while they are computed again; and the head.
    reused = max(0, level.max_reuse - head) // (2 if recipe.split.keeps_layers else 3)
    live = max(level.max_live - head, reused, 1)
    order = [weight for part in parts for weight in part]
    elements = [*accumulate((weight.elements for weight in order), initial=0)]
    sizes = [*accumulate((weight.size for weight in order), initial=0.0)]
    saved = [*accumulate((weight.size * weight.is_saved for weight in order), initial=0.0)]
    begins = [*accumulate((len(part) for part in parts), initial=0)][: len(parts) - 1]
    # Gathering stops when there are enough: the last weight may be more than enough.
    ends = [min(bisect_left(elements, elements[begin] + live), len(order)) for begin in begins]
    # The loss finds the first weights as the forward pass left them. Later ones are second copies of saved weights.
    beside = [saved[-1] - saved[max(begin, min(end, ends[0]))] for begin, end in zip(begins, ends, strict=True)]
    # If all fit at once, each is gathered once, and the forward pass has used all members of each bucket.
    has_buckets = is_shared and elements[-1] > live
    # Where as many are live as allowed, a bucket takes the place of what a module has just released: of one weight.
    least = min(level.prefetch, max((weight.elements for part in parts[:-1] for weight in part), default=0))
    buckets = _shared_buckets(parts, least) if has_buckets else [0.0] * len(parts)
    if ends[0] == len(order):
        # The forward pass gathers the last weight too, in one bucket with weights that it uses itself.
        buckets = [max(buckets)] * len(parts)
    of_layers = [
        always + sizes[end] - sizes[begin] + of_saved + bucket
        for begin, end, of_saved, bucket in zip(begins, ends, beside, buckets, strict=False)
    ]
    return Gathered(of_layers[0], tuple(of_layers))


def _in_order(recipe: RecipeConfig, architecture: Architecture, model: Built, weight_bytes: int) -> list[list[_Weight]]:
    """Return the weights of each layer from the last one on, and then the others, as a backward pass uses them."""
    of_kind = {layer: [*_of_layer(recipe, model, layer, weight_bytes)] for layer in set(model.layers)}
    others = [*_of_tower(recipe, architecture, weight_bytes), *_outside(recipe, model, weight_bytes)]
    return [*(of_kind[layer] for layer in reversed(model.layers)), others]


def _of_backward(
    recipe: RecipeConfig, model: Built, all_parts: list[list[_Weight]], weight_bytes: int
) -> list[list[_Weight]]:
    """Return the parts without the weights that the backward pass of this recipe does not reach."""
    if _reaches_inputs(recipe, model):
        return all_parts
    if last := recipe.train_cfg.trainable_layers:
        return [*all_parts[:last], []]
    if recipe.split.recompute:  # a layer is computed again from its input on
        return [*all_parts[:-1], []]
    first = [*_of_layer(recipe, model, _without_inputs(model), weight_bytes)]
    return [*all_parts[:-2], first, []]


def _shared_buckets(parts: list[list[_Weight]], least: int) -> list[float]:
    """Return the bytes of the largest bucket of several weights that begins in each part.

    A bucket gets weights in their order until it has `least` elements. It stays beside its members until all of them
    have been used (partition_parameters.py, `AllGatherCoalescedHandle`).
    """
    largest = [0.0] * len(parts)
    order = [(number, weight) for number, part in enumerate(parts) for weight in part]
    num_members, elements, size, begin = 0, 0, 0.0, 0
    for left, (number, weight) in zip(range(len(order) - 1, -1, -1), order, strict=True):
        begin = begin if num_members else number
        num_members, elements, size = num_members + 1, elements + weight.elements, size + weight.size
        if elements >= least or not left:
            largest[begin] = max(largest[begin], size * (num_members > 1))
            num_members, elements, size = 0, 0, 0.0
    return largest


def _of_layer(recipe: RecipeConfig, model: Built, layer: Layer, weight_bytes: int) -> Iterator[_Weight]:
    """Yield a layer's weights in the order of their use in its backward pass; recomputation begins at its input."""
    rank = recipe.adapter.r if recipe.adapter else 0
    targets = {linear.name for linear in adapted(recipe, layer.linears)} if rank else set()
    weights = [
        part for linear in layer.linears for part in _of_linear(recipe, linear, linear.name in targets, weight_bytes)
    ]
    if experts := layer.experts:
        of_adapter = on_experts(recipe.adapter, model.family, experts) if recipe.adapter else 0
        # `grouped_mm` saves its weights. Those with an adapter are copies, which are among the activations.
        is_saved = recipe.split.keeps_layers and not of_adapter
        for weight in _of_experts(recipe, experts, weight_bytes):
            weights.append(weight._replace(is_saved=is_saved))
        weights.append(_whole(of_adapter, weight_bytes))
    yield from weights if recipe.split.recompute else reversed(weights)


def _without_inputs(model: Built) -> Layer:
    """Return the first layer without those of its linear layers that take its input."""
    first, inputs = model.layers[0], model.family.attention[:-1]
    return first._replace(linears=tuple(linear for linear in first.linears if linear.name not in inputs))


def _of_experts(recipe: RecipeConfig, experts: Experts, weight_bytes: int) -> Iterator[_Weight]:
    """Yield the two fused weights of a layer, each with its bias; two weights in 4 bits are one byte."""
    for count, size in zip((experts.parameters - experts.down, experts.down), experts.tensors, strict=True):
        is_packed = recipe.packs_experts and size <= LARGEST_IN_4_BITS
        yield _Weight(count // 2, count / 2) if is_packed else _whole(count, weight_bytes)


def _of_linear(recipe: RecipeConfig, linear: Linear, has_adapter: bool, weight_bytes: int) -> Iterator[_Weight]:
    bits = recipe.quantization.bits if recipe.quantization and linear.quantizable else 8 * weight_bytes
    # bitsandbytes 0.50 saves a view of a 4-bit weight (`MatMul4Bit`).
    is_saved = bits == 4 and recipe.split.keeps_layers
    yield _Weight(linear.weights // (2 if bits == 4 else 1), linear.weights * bits / 8, is_saved)
    if has_adapter and recipe.adapter:
        yield _whole(recipe.adapter.r * linear.inputs, weight_bytes)
        yield _whole(recipe.adapter.r * linear.outputs, weight_bytes)


def _of_tower(recipe: RecipeConfig, architecture: Architecture, weight_bytes: int) -> Iterator[_Weight]:
    """Yield the weights of the projector and of the tower through which gradients pass."""
    tower = architecture.vision_config
    if tower is None or not tower.hidden_size:
        return
    if trains_tower(recipe) or trains_projector(recipe):
        for linear in reversed(projector(architecture, tower)):
            yield _whole(linear.weights, weight_bytes)
    if not trains_tower(recipe):
        return
    rank = rank_on_tower(recipe)
    linears = [*layer_of_tower(tower)]
    for _ in range(tower.num_hidden_layers or 0):
        for linear in linears if recipe.split.recompute else linears[::-1]:
            yield _whole(linear.weights, weight_bytes)
            if rank:
                yield _whole(rank * linear.inputs, weight_bytes)
                yield _whole(rank * linear.outputs, weight_bytes)
    yield _whole(pixels_of_patch(tower) * tower.hidden_size, weight_bytes)


def _outside(recipe: RecipeConfig, model: Built, weight_bytes: int) -> Iterator[_Weight]:
    """Yield what the model uses before its layers."""
    for linear in model.linears:
        yield _whole(linear.weights, weight_bytes)
    yield _whole(model.others, weight_bytes)
    if not model.tied or recipe.objective.facts.scores:
        yield _whole(model.embeddings, weight_bytes)


def _reaches_inputs(recipe: RecipeConfig, model: Built) -> bool:
    """Return whether the inputs of the layers have gradients.

    With an adapter they do for reentrant checkpoints: TRL 1.16 (sft_trainer.py), `enable_input_require_grads`.
    """
    if trains_tower(recipe) or trains_projector(recipe):
        return True
    if adapter := recipe.adapter:
        return _is_reentrant(recipe, model) or bool(adapter.modules_to_save)
    return not recipe.train_cfg.trainable_layers


def _is_reentrant(recipe: RecipeConfig, model: Built) -> bool:
    has_experts = any(layer.experts for layer in model.layers)
    return recipe.split.recompute and recipe.recomputes_reentrantly(shards=True, has_experts=has_experts)


def _whole(elements: int, weight_bytes: int) -> _Weight:
    return _Weight(elements, float(weight_bytes * elements))
