"""Which weights ZeRO-3 has gathered while the loss's backward runs, and while that of each layer does.

It follows DeepSpeed 0.19.8 (runtime/zero/partitioned_param_coordinator.py), which knows from the first step in which
order modules are used. Each module gathers its own weights and, a bucket at a time, the next ones in this order, until
`max_live_parameters` are there. What is used again within `max_reuse_distance` stays. All count elements; two 4-bit
weights are one. A module is in the backward pass if its output has a gradient. This module knows no activations.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate, chain, pairwise
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


_Module = tuple[_Weight, ...]
"""What one module uses: its weights are gathered together."""


_SMALL: tuple[str, _Module] = ("", ())
_AT_BEGIN, _AT_MLP = (_SMALL,) * 3, (_SMALL,) * 3
"""The layer, its norm, its attention; the second norm, the MLP, its activation."""


class Gathered(NamedTuple):
    """Bytes of gathered weights while the loss's backward runs, and while the layers' do, from the last layer on."""

    at_loss: float
    at_layers: tuple[float, ...]


class _Order(NamedTuple):
    """The modules of a model, and the numbers of those that a micro-batch uses, in this order.

    `backward` has those of each layer, from the last one on, and then those before the layers.
    """

    modules: tuple[_Module, ...]
    forward: tuple[int, ...]
    backward: tuple[tuple[int, ...], ...]


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
    # The loss reads the head outside of its module. DeepSpeed then gathers it with the whole model and keeps it.
    head = 0 if recipe.objective.facts.scores else built(architecture).head.weights
    heads = weight_bytes * head * (2 if recipe.objective.loads_reference and recipe.adapter is None else 1)
    without_head = _follow(_order(recipe, architecture, weight_bytes), level, head, is_shared=is_shared)
    return Gathered(heads + without_head.at_loss, tuple(heads + size for size in without_head.at_layers))


def _order(recipe: RecipeConfig, architecture: Architecture, weight_bytes: int) -> _Order:
    model = built(architecture)
    of_kind = {layer: [*_of_layer(recipe, model, layer, weight_bytes)] for layer in set(model.layers)}
    modules = [*_outside(recipe, model, weight_bytes), *_of_tower(recipe, architecture, weight_bytes)]
    outside, layers = range(len(modules)), list[range]()
    for layer in model.layers:
        begin = len(modules)
        modules += (module for _, module in of_kind[layer])
        layers.append(range(begin, len(modules)))
    reaches_inputs, is_reentrant = _reaches_inputs(recipe, model), _is_reentrant(recipe, model)
    last, inputs = recipe.train_cfg.trainable_layers or len(layers), model.family.attention[:-1]
    backward = list[tuple[int, ...]]()
    for number, used in enumerate(reversed(layers)):
        if number >= last and not reaches_inputs:
            backward.append(())
        elif recipe.split.recompute and is_reentrant:
            backward.append((*used, *used[::-1]))
        elif recipe.split.recompute:  # its last module's backward begins, and finds that the layer is to be recomputed
            backward.append((*used[-1:], *used, *used[-2::-1]))
        elif number == len(layers) - 1 and not reaches_inputs:
            of_first = zip(used, of_kind[model.layers[0]], strict=True)
            backward.append(tuple(module for module, (name, _) in of_first if name not in inputs)[::-1])
        else:
            backward.append((*used[::-1],))
    backward.append((*outside[::-1],) if reaches_inputs else ())
    return _Order(tuple(modules), tuple(range(len(modules))), tuple(backward))


@lru_cache(maxsize=256)
def _follow(order: _Order, level: Level, head: int, *, is_shared: bool) -> Gathered:
    """Return what is gathered, without the head, by following DeepSpeed through a micro-batch.

    Args:
        order: In which modules are used.
        level: The DeepSpeed config.
        head: Elements of the head, which are among those that are live.
        is_shared: As for `gathered`.
    """
    small = {weight for module in order.modules for weight in module if weight.elements <= level.persistence}
    first = [*accumulate((len(module) for module in order.modules), initial=0)]
    weights = [weight for module in order.modules for weight in module]
    used = [
        [first[number] + place for place, weight in enumerate(module) if weight not in small]
        for number, module in enumerate(order.modules)
    ]
    at_loss = len(order.forward)
    steps = [*(used[number] for number in order.forward), [], *(used[number] for number in chain(*order.backward))]
    gathered_bytes = _Coordinator(weights, steps, at_loss, level, head, is_shared=is_shared).bytes_at()
    ends = [*accumulate((len(layer) for layer in order.backward[:-1]), initial=at_loss + 1)]
    always = sum(weight.size for weight in weights if weight in small)
    at_layers = (max(gathered_bytes[begin:end], default=gathered_bytes[begin - 1]) for begin, end in pairwise(ends))
    return Gathered(always + gathered_bytes[at_loss], tuple(always + size for size in at_layers))


class _Bucket:
    """Weights that are gathered at once, into a buffer that stays until all of them have been used."""

    def __init__(self, members: int, size: float) -> None:
        self.left, self.size, self.has_arrived = members, size, False


class _Coordinator:
    """DeepSpeed's, in one micro-batch: which weights each module finds gathered, gathers ahead and leaves.

    Attributes:
        held: Bytes that are gathered now, with buffers.
        live: Elements, as DeepSpeed counts them.
    """

    def __init__(
        self,
        weights: list[_Weight],
        steps: list[list[int]],
        at_loss: int,
        level: Level,
        head: int,
        *,
        is_shared: bool,
    ) -> None:
        self.weights, self.steps, self.at_loss, self.level = weights, steps, at_loss, level
        self.has_buckets = is_shared
        self.held, self.live = 0.0, head
        self.gathered, self.saved = set[int](), set[int]()
        self.bucket_of = dict[int, _Bucket]()
        self.queue = [(weight, step) for step, module in enumerate(steps) for weight in module]
        self.place = 0
        self.used_until = [-1] * len(weights)
        """The last step for which a weight has been taken from the queue."""
        of_steps = [sum(weights[weight].elements for weight in module) for module in steps]
        of_steps[at_loss] += head
        self.passed = [*accumulate(of_steps, initial=0)]
        self.uses: list[list[int]] = [[] for _ in weights]
        for weight, step in self.queue:
            self.uses[weight].append(step)

    def bytes_at(self) -> list[float]:
        """Return the bytes that are gathered while each module runs."""
        gathered_bytes = list[float]()
        for step, module in enumerate(self.steps):
            buffer = self._gather([weight for weight in module if weight not in self.gathered], ahead=False)
            freed = sum(map(self._arrive, module))
            self._take(step, module)
            self._gather(self._next(), ahead=True)
            gathered_bytes.append(self.held + buffer)
            self.held -= freed
            for weight in module:
                self._leave(weight, step)
        return gathered_bytes

    def _gather(self, weights: list[int], *, ahead: bool) -> float:
        """Gather weights; return the bytes of their buffer if they are used at once."""
        size = sum(self.weights[weight].size for weight in weights)
        self.live += sum(self.weights[weight].elements for weight in weights)
        self.gathered.update(weights)
        self.held += size
        if len(weights) < 2 or not self.has_buckets:
            return 0.0
        if not ahead:
            return size
        bucket = _Bucket(len(weights), size)
        self.bucket_of.update(dict.fromkeys(weights, bucket))
        return 0.0

    def _arrive(self, weight: int) -> float:
        """Let the bucket of a weight be copied into its members; return the bytes of its buffer after the last one."""
        bucket = self.bucket_of.pop(weight, None)
        if bucket is None:
            return 0.0
        self.held += 0 if bucket.has_arrived else bucket.size
        bucket.has_arrived = True
        bucket.left -= 1
        return 0.0 if bucket.left else bucket.size

    def _take(self, step: int, module: list[int]) -> None:
        """Take the weights of a module from the queue, unless it has gone on already."""
        missing = {weight for weight in module if self.used_until[weight] < step}
        while missing and self.place < len(self.queue):
            weight, until = self.queue[self.place]
            self.place += 1
            self.used_until[weight] = until
            missing.discard(weight)

    def _next(self) -> list[int]:
        """Take from the queue what is to be gathered ahead."""
        most, elements, ahead = min(self.level.max_live - self.live, self.level.prefetch), 0, list[int]()
        while elements < most and self.place < len(self.queue):
            weight, until = self.queue[self.place]
            self.place += 1
            self.used_until[weight] = max(self.used_until[weight], until)
            if weight not in self.gathered and weight not in ahead:
                ahead.append(weight)
                elements += self.weights[weight].elements
        return ahead

    def _leave(self, weight: int, step: int) -> None:
        """Free a weight after its use, unless it is used again soon."""
        size, later = self.weights[weight].size, step + 1
        if step > self.at_loss and weight in self.saved:
            self.saved.discard(weight)
            self.held -= size
        uses = self.uses[weight]
        place = bisect_right(uses, step)
        is_soon = place < len(uses) and self.passed[uses[place]] - self.passed[later] < self.level.max_reuse
        if self.used_until[weight] > later or is_soon:
            return
        self.gathered.discard(weight)
        self.live -= self.weights[weight].elements
        if step < self.at_loss and self.weights[weight].is_saved:
            self.saved.add(weight)
        else:
            self.held -= size


def _of_layer(recipe: RecipeConfig, model: Built, layer: Layer, weight_bytes: int) -> Iterator[tuple[str, _Module]]:
    """Yield the modules of a layer in the order of their use in a forward pass, those of linear layers by name.

    DeepSpeed gathers ahead at those without large weights too: the layer, its halves, norms, activations.
    """
    rank = recipe.adapter.r if recipe.adapter else 0
    targets = {linear.name for linear in adapted(recipe, layer.linears)} if rank else set()
    yield from _AT_BEGIN
    # Experts are used before those that all tokens share, but where these have a gate.
    after = [linear for linear in layer.linears if layer.experts and ".shared_experts." in linear.name]
    half = ""
    for linear in layer.linears:
        if linear in after:
            continue
        if half not in ("", linear.name.partition(".")[0]):
            yield from _AT_MLP
        half = linear.name.partition(".")[0]
        yield from _of_linear(recipe, linear, linear.name in targets, weight_bytes)
    if experts := layer.experts:
        yield from _AT_MLP
        of_adapter = on_experts(recipe.adapter, model.family, experts) if recipe.adapter else 0
        # `grouped_mm` saves its weights. Those with an adapter are copies, which are among the activations.
        is_saved = recipe.split.keeps_layers and not of_adapter
        if of_adapter:
            yield "", (_whole(of_adapter, weight_bytes),)
        both = [part._replace(is_saved=is_saved) for part in _of_experts(recipe, experts, weight_bytes)]
        # PEFT's layers and bitsandbytes' parametrizations each use one.
        yield from (("", (part,)) for part in both) if of_adapter or recipe.packs_experts else [("", tuple(both))]
    for linear in after:
        yield from _of_linear(recipe, linear, linear.name in targets, weight_bytes)


def _of_experts(recipe: RecipeConfig, experts: Experts, weight_bytes: int) -> Iterator[_Weight]:
    """Yield the two fused weights of a layer, each with its bias; two weights in 4 bits are one byte."""
    for count, size in zip((experts.parameters - experts.down, experts.down), experts.tensors, strict=True):
        is_packed = recipe.packs_experts and size <= LARGEST_IN_4_BITS
        yield _Weight(count // 2, count / 2) if is_packed else _whole(count, weight_bytes)


def _of_linear(
    recipe: RecipeConfig, linear: Linear, has_adapter: bool, weight_bytes: int
) -> Iterator[tuple[str, _Module]]:
    bits = recipe.quantization.bits if recipe.quantization and linear.quantizable else 8 * weight_bytes
    # bitsandbytes 0.50 saves a view of a 4-bit weight (`MatMul4Bit`).
    is_saved = bits == 4 and recipe.split.keeps_layers
    if has_adapter:
        yield _SMALL
    yield linear.name, (_Weight(linear.weights // (2 if bits == 4 else 1), linear.weights * bits / 8, is_saved),)
    if has_adapter and recipe.adapter:
        yield _SMALL  # its dropout
        yield linear.name, (_whole(recipe.adapter.r * linear.inputs, weight_bytes),)
        yield linear.name, (_whole(recipe.adapter.r * linear.outputs, weight_bytes),)


def _of_tower(recipe: RecipeConfig, architecture: Architecture, weight_bytes: int) -> Iterator[_Module]:
    """Yield the modules of the tower and of the projector through which gradients pass."""
    tower = architecture.vision_config
    if tower is None or not tower.hidden_size or not (trains_tower(recipe) or trains_projector(recipe)):
        return
    if trains_tower(recipe):
        yield (_whole(pixels_of_patch(tower) * tower.hidden_size, weight_bytes),)
        rank, linears = rank_on_tower(recipe), [*layer_of_tower(tower)]
        for linear in linears * (tower.num_hidden_layers or 0):
            yield (_whole(linear.weights, weight_bytes),)
            if rank:
                yield (_whole(rank * linear.inputs, weight_bytes),)
                yield (_whole(rank * linear.outputs, weight_bytes),)
    for linear in projector(architecture, tower):
        yield (_whole(linear.weights, weight_bytes),)


def _outside(recipe: RecipeConfig, model: Built, weight_bytes: int) -> Iterator[_Module]:
    """Yield what the model uses before its layers."""
    if not model.tied or recipe.objective.facts.scores:
        yield (_whole(model.embeddings, weight_bytes),)
    for linear in model.linears:
        yield (_whole(linear.weights, weight_bytes),)
    yield (_whole(model.others, weight_bytes),)


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
