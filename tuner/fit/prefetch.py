"""Which weights ZeRO-3 has gathered while the loss's backward runs, and while that of each layer does.

It follows DeepSpeed 0.19.8 (runtime/zero/partitioned_param_coordinator.py), which knows from the first step in which
order modules are used. Each module gathers its own weights and, a bucket at a time, the next ones in this order, until
`max_live_parameters` are there. What is used again within `max_reuse_distance` stays. All count elements; two 4-bit
weights are one. A module is in the backward pass if its output has a gradient. This module knows no activations.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

from tuner.fit.families import Layer, layer_of_tower, pixels_of_patch, projector
from tuner.fit.levels import Costs
from tuner.fit.parameters import (
    Built,
    adapted,
    built,
    parts_on_experts,
    rank_on_tower,
    trains_projector,
    trains_tower,
)
from tuner.recipes.schema import RecipeConfig
from tuner.recipes.schema.architecture import Architecture
from tuner.recipes.schema.measured import LARGEST_IN_4_BITS, Experts, Linear


class _Weight(NamedTuple):
    elements: int
    size: float
    is_saved: bool = False
    """Autograd saves it for the backward pass. ZeRO-3 cannot free it then, and gathers a second copy."""


class _Module(NamedTuple):
    """What one module uses: its weights are gathered together."""

    weights: tuple[_Weight, ...] = ()
    name: str = ""
    """That of a linear layer."""
    is_leaf: bool = False
    """The modules in it are hidden from DeepSpeed, which gathers all their weights with it."""
    inside: int = 0
    """Elements of the modules in it, for one that has no weights of its own."""
    has_backward: bool = True
    ends_layer: bool = False
    """Its output is the layer's: its backward begins before that of what is in it, and before a recomputation."""


_SMALL = _Module()
_AT_MLP = (_SMALL,) * 3
"""The second norm, the MLP, its activation."""
_LEAVES = {"mixtral", "qwen2_moe", "qwen3_moe"}
"""model_types whose block of experts is a leaf (DeepSpeed 0.19.8, runtime/zero/leaf_module_config.py)."""


class Gathered(NamedTuple):
    """Bytes of gathered weights while the loss's backward runs, and while the layers' do, from the last layer on.

    `arriving` are those at the fullest moment of each layer at which its activations are not there, or not yet: a
    weight arrives, and the buffer of those that are gathered with it stands beside their copies; or the layer is being
    computed again.
    """

    at_loss: float
    at_layers: tuple[float, ...]
    arriving: tuple[float, ...]
    at_end: float = 0.0
    """While the embeddings' backward runs, the last one."""


class _Order(NamedTuple):
    """The modules of a model in the order of the forward pass, and the numbers of those that the backward pass uses.

    `backward` has those of each layer, from the last one on, and then those before the layers; `computed_again`, for
    each of these, how many of its modules are used before one computes its backward.
    """

    modules: tuple[_Module, ...]
    backward: tuple[tuple[int, ...], ...]
    computed_again: tuple[int, ...]


def gathered(
    recipe: RecipeConfig, architecture: Architecture, costs: Costs, weight_bytes: int, *, is_shared: bool = True
) -> Gathered:
    """Return the bytes of the weights that are gathered at the two moments of a step.

    Args:
        is_shared: Several ranks have shards. One alone copies each weight from the host, without buckets
            (partition_parameters.py, `NoGatherCoalescedHandle`).
    """
    # The loss reads the head outside of its module. DeepSpeed then gathers it with the whole model and keeps it.
    head = 0 if recipe.objective.facts.scores else built(architecture).head.weights
    heads = weight_bytes * head * (2 if recipe.objective.loads_reference and recipe.adapter is None else 1)
    without_head = _follow(_order(recipe, architecture, weight_bytes), costs, head, is_shared=is_shared)
    return Gathered(
        heads + without_head.at_loss,
        tuple(heads + size for size in without_head.at_layers),
        tuple(heads + size for size in without_head.arriving),
        heads + without_head.at_end,
    )


def _order(recipe: RecipeConfig, architecture: Architecture, weight_bytes: int) -> _Order:
    model = built(architecture)
    is_leaf = architecture.model_type in _LEAVES
    of_kind = {layer: [*_of_layer(recipe, model, layer, weight_bytes, is_leaf)] for layer in set(model.layers)}
    modules = [*_outside(recipe, model, weight_bytes), *_of_tower(recipe, architecture, weight_bytes)]
    outside, layers = range(len(modules)), list[range]()
    for layer in model.layers:
        begin = len(modules)
        modules += of_kind[layer]
        layers.append(range(begin, len(modules)))
    reaches_inputs, is_reentrant = _reaches_inputs(recipe, model), _is_reentrant(recipe, model)
    last, inputs = recipe.train_cfg.trainable_layers or len(layers), model.family.attention[:-1]
    backward, computed_again = list[tuple[int, ...]](), list[int]()
    for number, used in enumerate(reversed(layers)):
        with_gradient = [module for module in used if modules[module].has_backward]
        again = 0
        if number >= last and not reaches_inputs:
            backward.append(())
        elif recipe.split.recompute and is_reentrant:
            backward.append((*used, *with_gradient[::-1]))
            again = len(used) - 1
        elif recipe.split.recompute:  # its last module's backward begins, and finds that the layer is to be recomputed
            end = _end_of(modules, with_gradient)
            backward.append(
                (used[0], *end, *used[1:], *(module for module in with_gradient[:0:-1] if module not in end))
            )
            again = len(used) - 1 + len(end)
        else:
            if number == len(layers) - 1 and not reaches_inputs:
                with_gradient = [module for module in used if modules[module].name not in inputs]
            end = _end_of(modules, with_gradient)
            backward.append((*end, *(module for module in with_gradient[::-1] if module not in end)))
            again = len(end) - 1
        computed_again.append(again)
    backward.append((*outside[::-1],) if reaches_inputs else ())
    return _Order(tuple(modules), tuple(backward), tuple(computed_again))


def _end_of(modules: list[_Module], used: list[int]) -> list[int]:
    """Return those of the used modules whose output is the layer's: the last one, with those around it."""
    return [module for module in used if modules[module].ends_layer] if modules[used[-1]].ends_layer else used[-1:]


@lru_cache(maxsize=256)
def _follow(order: _Order, costs: Costs, head: int, *, is_shared: bool) -> Gathered:
    """Return what is gathered, without the head, by following DeepSpeed through a micro-batch.

    Args:
        head: Elements of the head, which are among those that are live.
        is_shared: As for `gathered`.
    """
    weights = [weight for module in order.modules for weight in module.weights]
    small = {weight for weight in weights if weight.elements <= costs.persistence}
    first = [*accumulate((len(module.weights) for module in order.modules), initial=0)]
    used = list[_Step]()
    for number, module in enumerate(order.modules):
        large = [first[number] + place for place, weight in enumerate(module.weights) if weight not in small]
        inside = module.inside or sum(weight.elements for weight in module.weights)
        used.append(_Step(large, large, module.is_leaf, inside, module.ends_layer))
    at_loss = len(used)
    model_step = _Step([], [], inside=sum(weight.elements for weight in weights))
    steps = [*used, model_step, *(used[number] for number in chain(*order.backward))]
    ends = [*accumulate((len(layer) for layer in order.backward[:-1]), initial=at_loss + 1)]
    for (begin, end), again in zip(pairwise(ends), order.computed_again, strict=True):
        _hold_end(steps, range(begin, min(end, begin + again + 1)))
    computing, arriving = _Coordinator(weights, steps, at_loss, costs, head, is_shared=is_shared).bytes_at()
    always = sum(weight.size for weight in weights if weight in small)
    at_layers, at_arrivals = list[float](), list[float]()
    for (begin, end), again in zip(pairwise(ends), order.computed_again, strict=True):
        last = begin + again
        at_layers.append(always + max(computing[last:end], default=computing[begin - 1]))
        at_arrivals.append(always + max((*arriving[begin:end], *computing[begin:last]), default=0.0))
    at_end = computing[-1] if order.backward[-1] else 0.0
    return Gathered(always + computing[at_loss], tuple(at_layers), tuple(at_arrivals), always + at_end)


class _Step(NamedTuple):
    """One use of a module: the weights that it gathers, those that leave after it, and what `_Module` says of it."""

    weights: list[int]
    leave: list[int]
    is_leaf: bool = False
    inside: int = 0
    ends_layer: bool = False


def _hold_end(steps: list[_Step], computed_again: range) -> None:
    """Let the weights at a layer's end, whose backward begins first, stay until that of the innermost module runs."""
    of_end = [number for number in computed_again if steps[number].ends_layer]
    held = [weight for number in of_end for weight in steps[number].weights]
    for number in of_end:
        steps[number] = steps[number]._replace(leave=[] if number < of_end[-1] else [*dict.fromkeys(held)])


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
        steps: list[_Step],
        at_loss: int,
        costs: Costs,
        head: int,
        *,
        is_shared: bool,
    ) -> None:
        self.weights, self.steps, self.at_loss, self.costs = weights, steps, at_loss, costs
        self.has_buckets = is_shared
        self.held, self.live = 0.0, head
        self.gathered, self.saved = set[int](), set[int]()
        self.bucket_of = dict[int, _Bucket]()
        self.queue = [(weight, step) for step, module in enumerate(steps) for weight in module.weights]
        self.place = 0
        self.used_until = [-1] * len(weights)
        """The last step for which a weight has been taken from the queue."""
        # A weight is looked for in the next modules, and in the modules in them only if its own is a leaf
        # (`__params_to_release` takes `recurse` from that). So no other weight finds those of leaves there.
        own_elements = [
            0 if step.is_leaf else sum(weights[weight].elements for weight in step.weights) for step in steps
        ]
        own_elements[at_loss] += head
        self.passed = [*accumulate(own_elements, initial=0)]
        self.passed_inside = [*accumulate((step.inside for step in steps), initial=0)]
        self.uses: list[list[int]] = [[] for _ in weights]
        for weight, number in self.queue:
            self.uses[weight].append(number)
        for weight in {weight for step in steps if step.is_leaf for weight in step.weights}:
            insort(self.uses[weight], at_loss)  # the whole model's backward begins there

    def bytes_at(self) -> tuple[list[float], list[float]]:
        """Return the bytes that are gathered while each module computes, and while its weights arrive."""
        computing, arriving = list[float](), list[float]()
        for number, step in enumerate(self.steps):
            buffer = self._gather([weight for weight in step.weights if weight not in self.gathered], ahead=False)
            freed = sum(map(self._arrive, step.weights))
            arriving.append(self.held + buffer)
            self.held -= freed
            self._take(number, step.weights)
            self._gather(self._next(), ahead=True)
            computing.append(self.held)
            for weight in step.leave:
                self._leave(weight, number)
        return computing, arriving

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
        max_elements, elements, ahead = min(self.costs.max_live - self.live, self.costs.prefetch), 0, list[int]()
        while elements < max_elements and self.place < len(self.queue):
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
        uses, passed = self.uses[weight], self.passed_inside if self.steps[step].is_leaf else self.passed
        if weight in self.saved and step == uses[-1]:
            self.saved.discard(weight)
            self.held -= size
        place = bisect_right(uses, step)
        is_soon = place < len(uses) and passed[uses[place]] - passed[later] < self.costs.max_reuse
        if self.used_until[weight] > later or is_soon:
            return
        self.gathered.discard(weight)
        self.live -= self.weights[weight].elements
        if step < self.at_loss and self.weights[weight].is_saved:
            self.saved.add(weight)
        else:
            self.held -= size


def _of_layer(recipe: RecipeConfig, model: Built, layer: Layer, weight_bytes: int, is_leaf: bool) -> Iterator[_Module]:
    """Yield the modules of a layer in the order of their use in a forward pass.

    DeepSpeed gathers ahead at those without large weights too: the layer, its halves, norms, activations.
    """
    # Experts are used before those that all tokens share, but where these have a gate.
    halves = dict[str, list[_Module]]()
    rank = recipe.adapter.r if recipe.adapter else 0
    targets = {linear.name for linear in adapted(recipe, layer.linears)} if rank else set()
    after = list[_Module]()
    # bitsandbytes 0.50 keeps a 4-bit weight beside the tensors that autograd saves (`MatMul4Bit`, `ctx.tensors`). So
    # recomputation frees it only where its checkpoints are reentrant, and make no graph before.
    is_saved = recipe.split.keeps_layers or not _is_reentrant(recipe, model)
    for linear in layer.linears:
        of_linear = _of_linear(recipe, linear, linear.name in targets, weight_bytes, is_saved=is_saved)
        if layer.experts and ".shared_experts." in linear.name:
            after += of_linear
        else:
            halves.setdefault(linear.name.partition(".")[0], []).extend(of_linear)
    attention, *rest = halves.values() or ([],)
    block = [*_experts_modules(recipe, model, layer.experts, weight_bytes), *after] if layer.experts else after
    if is_leaf and layer.experts:
        weights = (weight for module in (*chain(*rest), *block) for weight in module.weights)
        mlp = [_SMALL, _Module(tuple(weights), is_leaf=True)]
    else:
        mlp = [*chain(*((*_AT_MLP, *half) for half in rest)), *(_AT_MLP if layer.experts else ()), *block]
    inside = _elements(attention)
    yield _Module(inside=inside + _elements(mlp))
    yield _SMALL
    yield _Module(inside=inside)
    yield from attention
    yield from mlp


def _elements(modules: list[_Module]) -> int:
    return sum(weight.elements for module in modules for weight in module.weights)


def _experts_modules(recipe: RecipeConfig, model: Built, experts: Experts, weight_bytes: int) -> Iterator[_Module]:
    on_router, *on_both = parts_on_experts(recipe.adapter, model.family, experts) if recipe.adapter else (0, 0, 0)
    of_adapter = on_router + sum(on_both)
    # `grouped_mm` saves its weights. Those with an adapter are copies, which are among the activations.
    is_saved = recipe.split.keeps_layers and not of_adapter
    both = [part._replace(is_saved=is_saved) for part in _of_experts(recipe, experts, weight_bytes)]
    if recipe.packs_experts:  # a parametrization unpacks each; `worker.compat` gathers it for that alone
        if of_adapter:
            yield _Module((_whole(of_adapter, weight_bytes),))
        yield _SMALL
        yield from (_Module((part,), has_backward=False) for part in both)
        return
    if on_router:
        yield _Module((_whole(on_router, weight_bytes),))
    # PEFT's wrapper of the down layers is around that of the gate and up layers, and each gathers what it adapts.
    wrapped = [(part, on_part) for part, on_part in zip(both, on_both, strict=True) if on_part]
    for part, on_part in wrapped[::-1]:
        yield _Module((part, _whole(on_part, weight_bytes)), ends_layer=True)
    other_parts = (part for part, on_part in zip(both, on_both, strict=True) if not on_part)
    yield _Module((*other_parts,), ends_layer=bool(wrapped))


def _of_experts(recipe: RecipeConfig, experts: Experts, weight_bytes: int) -> Iterator[_Weight]:
    """Yield the two fused weights of a layer, each with its bias; two weights in 4 bits are one byte."""
    for count, size in zip((experts.parameters - experts.down, experts.down), experts.tensors, strict=True):
        is_packed = recipe.packs_experts and size <= LARGEST_IN_4_BITS
        yield _Weight(count // 2, count / 2) if is_packed else _whole(count, weight_bytes)


def _of_linear(
    recipe: RecipeConfig, linear: Linear, has_adapter: bool, weight_bytes: int, *, is_saved: bool
) -> Iterator[_Module]:
    bits = recipe.quantization.bits if recipe.quantization and linear.quantizable else 8 * weight_bytes
    if has_adapter:
        yield _SMALL
    weight = _Weight(linear.weights // (2 if bits == 4 else 1), linear.weights * bits / 8, is_saved and bits == 4)
    yield _Module((weight,), linear.name)
    if has_adapter and recipe.adapter:
        yield _SMALL  # its dropout
        yield _Module((_whole(recipe.adapter.r * linear.inputs, weight_bytes),), linear.name)
        yield _Module((_whole(recipe.adapter.r * linear.outputs, weight_bytes),), linear.name)


def _of_tower(recipe: RecipeConfig, architecture: Architecture, weight_bytes: int) -> Iterator[_Module]:
    """Yield the modules of the tower and of the projector through which gradients pass."""
    tower = architecture.vision_config
    if tower is None or not tower.hidden_size or not (trains_tower(recipe) or trains_projector(recipe)):
        return
    if trains_tower(recipe):
        yield _Module((_whole(pixels_of_patch(tower) * tower.hidden_size, weight_bytes),))
        rank, linears = rank_on_tower(recipe), [*layer_of_tower(tower)]
        for linear in linears * (tower.num_hidden_layers or 0):
            yield _Module((_whole(linear.weights, weight_bytes),))
            if rank:
                yield _Module((_whole(rank * linear.inputs, weight_bytes),))
                yield _Module((_whole(rank * linear.outputs, weight_bytes),))
    for linear in projector(architecture, tower):
        yield _Module((_whole(linear.weights, weight_bytes),))


def _outside(recipe: RecipeConfig, model: Built, weight_bytes: int) -> Iterator[_Module]:
    """Yield what the model uses before its layers."""
    if not model.tied or recipe.objective.facts.scores:
        yield _Module((_whole(model.embeddings, weight_bytes),))
    for linear in model.linears:
        yield _Module((_whole(linear.weights, weight_bytes),))
    yield _Module((_whole(model.others, weight_bytes),))


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
