"""What one GPU and one host hold at the peak of a step, line by line, for one recipe at one ZeRO level.

It takes a recipe, an architecture and plain numbers; it looks at no machine and recommends nothing.

Model states: Rajbhandari et al., ZeRO, 2020 (arXiv:1910.02054), section 3. The rest was measured with DeepSpeed 0.19.8
and transformers 5.23 on live tensor storages; CONTEXT_BYTES and FRAGMENTATION are estimates.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from itertools import accumulate

from tuner.fit import activations
from tuner.fit.activations import Work
from tuner.fit.levels import Costs, Fit, Machines, Peak
from tuner.fit.parameters import (
    Parameters,
    built,
    count,
    has_formula,
    largest_weight,
    num_parameters,
    trained_tensors,
)
from tuner.fit.prefetch import Gathered, gathered
from tuner.recipes.schema import TEACHERS, RecipeConfig, expert_parallel
from tuner.recipes.schema.architecture import Architecture
from tuner.recipes.schema.tensor_parallel import of_fullest_rank

CONTEXT_BYTES = 1_200_000_000
"""CUDA context, cuBLAS workspaces and NCCL buffers of one process."""
FRAGMENTATION = 0.05
"""The part of what is allocated that the caching allocator holds without use."""
PROCESS_BYTES = 3_000_000_000
"""Host memory of one rank: interpreter, libraries, data."""


def peak(
    recipe: RecipeConfig,
    architecture: Architecture,
    costs: Costs,
    world_size: int,
    gpus_per_node: int,
    weight_bytes: int = 2,
    *,
    old_gpus: bool = False,
    plain_mixers: bool = False,
    loads: bool = True,
) -> Peak:
    """Return the memory of one step, or of loading experts in 4 bits where that is more.

    Args:
        world_size: Ranks; ZeRO shards over all of them, also where they share samples, but not where they split layers.
        gpus_per_node: Of them on one host.
        weight_bytes: 2 in bf16 and fp16, 4 in fp32.
        old_gpus: As `Machines` says.
        plain_mixers: As `Machines` says.
        loads: False: of a step alone.
    """
    swapped_at_once = costs.param_buffers
    if costs.param_buffers:
        swapped_at_once *= costs.param_buffer or swap_buffer(recipe, architecture, world_size)
    of_whole_model, world_size = count(recipe, architecture), world_size // recipe.train_cfg.autotp_size
    architecture = of_fullest_rank(recipe, architecture)
    shards: float = world_size
    if costs.expert_ranks > 1:
        architecture = expert_parallel.of_rank(architecture, costs.expert_ranks)
        # ZeRO shards what a rank has over the ranks that have the same: each updates as many parameters as without.
        shards *= count(recipe, architecture).trainable / of_whole_model.trainable
    parameters = count(recipe, architecture)
    states = model_states(recipe, parameters, costs, shards, weight_bytes)
    work = activations.of_recipe(recipe, architecture, weight_bytes, old_gpus=old_gpus, plain_mixers=plain_mixers)
    largest = built(architecture).largest
    buffers = _buffers(recipe, parameters, costs, largest, weight_bytes)
    # A single rank that keeps its weights on the GPU copies none: DeepSpeed 0.19.8 hands out the shard itself
    # (partition_parameters.py, `NoGatherHandle`). Measured on an H200: QLoRA of 1B at ZeRO-3 needs 1.05 GB less.
    gathers = world_size > 1 or costs.offload_param
    update = max(0.0, _optimizer_step(parameters, costs, shards, weight_bytes))
    accumulates = recipe.split.accumulation > 1
    # Stage 3 has its buffer of gradients from the start (stage3.py, `__param_id_to_grad_partition`).
    at_loss, at_layer = _backward(states, work, has_gradients=accumulates or costs.stage == 3)
    if costs.stage == 2 and accumulates:
        # A later micro-batch's gradients stand beside the sum of the others (stage_1_and_2.py, `all_grad_tensors`).
        at_layer["gradients"] += states["gradients"]
    without_gradients = buffers
    if costs.stage in (1, 2):
        # The buffers of gradients are made for the first one, and go when gradients are sent: at stage 2 in each
        # backward pass, at stage 1 in the last one (stage_1_and_2.py, `setup_buckets` and `_release_ipg_buffers`).
        left = buffers["buckets"] - _reduce_bytes(parameters, costs, weight_bytes)
        without_gradients = {**buffers, "buckets": left}
        if costs.stage == 2 or not accumulates:
            at_loss |= without_gradients
    at_step, buffers_at_end, while_weights_arrive = dict(without_gradients), dict(buffers), list[dict[str, float]]()
    if costs.stage == 3:
        total = weight_bytes * parameters.trainable + frozen_bytes(parameters, weight_bytes)
        of_node = total / costs.hpz if costs.hpz > 1 else 0.0  # hpZ's second shards
        at_step["gathered_weights"] = of_node  # all other weights are sharded again before it (stage3.py, `step`)
        weights = Gathered(0.0, (0.0,), (0.0,))
        if gathers:
            weights = gathered(recipe, architecture, costs, weight_bytes, is_shared=world_size > 1)
        buffers["gathered_weights"] = weights.at_loss + of_node
        freed, fullest = _fullest_layer(weights.at_layers, work.of_layers)
        if work.freed:  # `at_layer` counts without it already
            freed, fullest = 0.0, max(weights.at_layers)
        at_layer |= {"activations": at_layer["activations"] - freed, "gathered_weights": fullest + of_node}
        freed, fullest = _fullest_layer(weights.arriving, work.of_layers)
        arrived = {"activations": work.kept - freed + work.waiting, "gathered_weights": fullest + of_node}
        while_weights_arrive.append({**buffers, **at_layer, **arrived})
        buffers_at_end["gathered_weights"] = weights.at_end + of_node
    at_end = {**at_layer, "activations": work.at_end, **buffers_at_end}
    moments = [{**buffers, **at_loss}, {**buffers, **at_layer}, {**states, "step": update, **at_step}, at_end]
    if costs.stage == 3 and costs.overlap:
        moments[0]["buckets"] /= 2  # the second buffer is that of gradients on their way, and the loss has none yet
    if costs.stage == 2 and recipe.adapter is None and not costs.offload_optimizer:
        beyond = weight_bytes * _beyond_borders(trained_tensors(recipe, architecture), world_size)
        for moment, times in zip(moments, (accumulates, 1 + accumulates, 1, 1 + accumulates), strict=True):
            moment["buckets"] += beyond * times
    if costs.stage < 3 and costs.offload_optimizer and recipe.adapter is None:
        # The largest gradient is the last one. A rank's part of it is there in fp64 too: DeepSpeed computes the norm of
        # a gradient before it offloads it (stage_1_and_2.py, `set_norm_for_param_grad_in_gpu`).
        gradient = min(largest, parameters.trainable)
        last = weight_bytes * gradient + 8 * min(gradient, parameters.trainable / world_size)
        moments.append({**states, **buffers, "buckets": buffers["buckets"] + last})
    moments += while_weights_arrive
    # Ranks pass on the new weights when all gradients are gone (stage_1_and_2.py, `step`).
    passed_on = weight_bytes * min(costs.allgather_bucket, parameters.trainable) if 0 < costs.stage < 3 else 0
    moments.append({**states, "gradients": 0.0, **at_step, "buckets": at_step.get("buckets", 0.0) + passed_on})
    validates = activations.of_validation(recipe, architecture, weight_bytes)
    moments.append({**states, "gradients": 0.0, "activations": validates, "logits": 0.0, **without_gradients})
    if generates := activations.of_generation(recipe, architecture, weight_bytes, world_size):
        moments.append({**states, "gradients": 0.0, "activations": generates, "logits": 0.0, **without_gradients})
        if costs.stage == 3 and gathers:  # TRL 1.16 gathers all weights on each rank (ds3_gather_for_generation)
            # of the trained model, without a reference model and an adapter
            trained = parameters._replace(frozen=num_parameters(architecture) - parameters.quantized)
            moments[-1]["gathered_weights"] = frozen_bytes(trained, weight_bytes)
    if loads and recipe.packs_experts:
        moments.append(_loading(recipe, architecture, parameters, weight_bytes))
    lines = max(moments, key=_total)
    used = _total(lines)
    gpu = {**lines, "context": CONTEXT_BYTES, "fragmentation": FRAGMENTATION * used}
    if rewards := _reward_models(recipe):
        gpu["rewards"] = rewards
    host = _host(recipe, parameters, costs, world_size, gpus_per_node, weight_bytes, swapped_at_once)
    if costs.stage < 3 and not recipe.quantization:  # ranks split the layers that they have loaded
        loaded = weight_bytes * (of_whole_model.trainable + of_whole_model.frozen) * gpus_per_node
        host["loading"] = max(0.0, loaded - sum(host.values()) + host["processes"])
    if work.offloaded:
        host["activations"] = work.offloaded * gpus_per_node
    return Peak(gpu, host, sum(states.values()))


def swap_buffer(recipe: RecipeConfig, architecture: Architecture, world_size: int) -> int:
    """Return the least `buffer_size` for weights on disks: a rank's part of the largest one, in elements.

    Source: DeepSpeed 0.19.8, partitioned_param_swapper.py, `get_buffer`, and partition_parameters.py, `_aligned_size`.

    Raises:
        ModelError: there is no formula for the model_type.
    """
    ranks = world_size // recipe.train_cfg.autotp_size
    return -(-largest_weight(recipe, of_fullest_rank(recipe, architecture)) // ranks)


def fit_on(recipe: RecipeConfig, architecture: Architecture, name: str, costs: Costs, machines: Machines) -> Fit:
    """Return what one step needs on these machines at a level called `name`."""
    ranks, gpus_per_node, width = machines.world_size, machines.gpus_per_node, machines.weight_bytes
    kernels = {"old_gpus": machines.old_gpus, "plain_mixers": machines.plain_mixers}
    needs = peak(recipe, architecture, costs, ranks, gpus_per_node, width, **kernels)
    generation = recipe.objective.generated_by
    if generation is not None and generation.held_share:
        needs.gpu["vllm"] = generation.held_share * machines.gpu_bytes
    return Fit(name, costs, needs, machines)


_MERGED = 3
"""Copies of a tensor of experts while it is put together: single ones, their stacks, and the whole (transformers 5.24,
`MergeModulelist` and `Concatenate`)."""


def _loading(
    recipe: RecipeConfig, architecture: Architecture, parameters: Parameters, weight_bytes: int
) -> dict[str, float]:
    """Return the lines when the last expert is quantized: each rank has loaded all weights, also at ZeRO-3.

    transformers 5.24 shards weights as they load only if they are not quantized.
    """
    tensors = (size for layer in built(architecture).layers if layer.experts for size in layer.experts.tensors)
    weights = frozen_bytes(parameters, weight_bytes) + _scales(recipe, parameters)
    return {"weights": weights, "loading": float(_MERGED * weight_bytes * max(tensors, default=0))}


def _total(lines: Mapping[str, float]) -> float:
    return sum(lines.values())


def _backward(states: dict[str, float], work: Work, *, has_gradients: bool) -> tuple[dict[str, float], ...]:
    """Return the lines while the loss's backward runs, and while a layer's does.

    Without `has_gradients` none are held at the loss; then they grow as what the layers keep goes.
    """
    all_gradients = states["gradients"]

    def while_a_layer_runs(kept: float, beside: float) -> dict[str, float]:
        gradients = all_gradients if has_gradients else max(0.0, all_gradients - kept)
        return {"gradients": gradients, "activations": kept + beside, "logits": 0.0}

    first = all_gradients if has_gradients else 0.0
    at_loss = {"gradients": first, "activations": work.kept + work.at_loss, "logits": work.logits}
    at_layer = while_a_layer_runs(work.kept, work.at_layer + work.waiting)
    if work.freed:
        at_again = while_a_layer_runs(work.kept - work.freed, work.at_again + work.waiting)
        at_layer = max(at_layer, at_again, key=_total)
    return {**states, **at_loss}, {**states, **at_layer}


def model_states(
    recipe: RecipeConfig, parameters: Parameters, costs: Costs, ranks: float, weight_bytes: int
) -> dict[str, float]:
    """Return the bytes of weights, gradients and optimizer states on one GPU at the end of backward."""
    trained, stage = parameters.trainable, costs.stage
    shard = 1 if stage == 0 else 1 / ranks
    weights = gradients = float(trained * weight_bytes)
    # ZeRO shards frozen weights at stage 3 alone, the scales of a 4-bit base never.
    frozen = frozen_bytes(parameters, weight_bytes) / (ranks if stage == 3 else 1) + _scales(recipe, parameters)
    masters = costs.master_bytes if weight_bytes == 2 or stage else 0  # ZeRO makes one of fp32 weights too
    optimizer = (masters + costs.state_part * state_bytes(recipe)) * trained * shard
    if stage == 3:
        weights, gradients = weights / ranks, gradients / ranks
    elif stage == 2:
        gradients = gradients / ranks
    if costs.offload_optimizer:
        optimizer = gradients = 0.0  # gradients go to the host while backward runs, a bucket at a time
    if costs.offload_param:
        weights, frozen = 0.0, _scales(recipe, parameters)
    return {"weights": weights + frozen, "gradients": gradients, "optimizer_states": optimizer}


def state_bytes(recipe: RecipeConfig) -> int:
    """Return the bytes of the optimizer's own state for one trained parameter."""
    return recipe.optim_wrapper.optimizer.facts.state_bytes


def frozen_bytes(parameters: Parameters, weight_bytes: int) -> float:
    """Return the bytes of all frozen weights without a 4-bit base's scales: what ZeRO-3 shards, and gathers again."""
    return weight_bytes * parameters.frozen + parameters.quantized * parameters.quantized_bits / 8


def _scales(recipe: RecipeConfig, parameters: Parameters) -> float:
    """Return the bytes of a 4-bit base's scales: fp32 for 64 weights, or in 8 bits and those scaled again.

    Source: Dettmers et al., QLoRA, 2023 (arXiv:2305.14314), section 3.
    """
    block = recipe.quantization or TEACHERS
    if block.bits == 8:
        return 0.0
    return parameters.quantized * (1 / 64 + 4 / (64 * 256) if block.double_quant else 4 / 64)


def _buffers(
    recipe: RecipeConfig, parameters: Parameters, costs: Costs, largest_layer: int, weight_bytes: int
) -> dict[str, float]:
    if costs.stage == 0:
        return {}
    reduce = _reduce_bytes(parameters, costs, weight_bytes)
    if costs.stage < 3 and costs.offload_optimizer and recipe.adapter is None:
        # Gradients pass to the host through a buffer as large as the largest of them; an adapter's are small.
        reduce += weight_bytes * min(largest_layer, parameters.trainable)
    return {"buckets": reduce}


def _reduce_bytes(parameters: Parameters, costs: Costs, weight_bytes: int) -> int:
    """Return the bytes of the buffers through which gradients are sent."""
    return weight_bytes * min(costs.reduce_bucket, parameters.trainable) * (2 if costs.overlap else 1)


def _beyond_borders(tensors: Iterable[int], ranks: int) -> float:
    """Return for how many parameters beyond its share a rank keeps gradients at stage 2; the most of any rank.

    A border between two ranks can be inside a tensor. Both ranks then keep its whole gradient (stage_1_and_2.py,
    `get_all_grad_tensors`).
    """
    ends = [*accumulate(tensors)]
    starts = [0, *ends[:-1]]
    share = ends[-1] / ranks if ends else 0.0
    borders = [rank * share for rank in range(ranks + 1)]
    first = [starts[bisect_right(starts, border) - 1] for border in borders[:-1]]
    last = [ends[min(bisect_left(ends, border), len(ends) - 1)] for border in borders[1:]]
    return max((end - start - share for start, end in zip(first, last, strict=True)), default=0.0)


def _fullest_layer(gathered: tuple[float, ...], kept: tuple[float, ...]) -> tuple[float, float]:
    """Return the bytes freed by the layers behind the fullest one, and those gathered in its backward pass.

    A layer near the first one can be the fullest: the embeddings are gathered there.

    Args:
        gathered: Bytes of weights, for each layer from the last one on.
        kept: Bytes of activations, likewise; empty if they are offloaded.
    """
    freed = accumulate(kept or (0.0,) * len(gathered), initial=0.0)
    return max(zip(freed, gathered, strict=False), key=lambda both: both[1] - both[0])


def _reward_models(recipe: RecipeConfig) -> float:
    """Return the bytes of the reward models, each in 16 bits in a process of its own; unknown ones are left out."""
    models = map(Architecture.model_validate, recipe.objective.scoring_models)
    return sum(2.0 * built(model).backbone + CONTEXT_BYTES for model in models if has_formula(model))


def _optimizer_step(parameters: Parameters, costs: Costs, ranks: float, weight_bytes: int) -> float:
    """Return what the optimizer's step holds more than the end of backward: fp32 gradients of what this rank updates.

    Stages 1 and 2 first copy the 16-bit gradients of this rank's share into one flat tensor, and free the others only
    when the fp32 copy is there (stage_1_and_2.py, `step`). Stage 3 goes through its share in groups.
    """
    if costs.offload_optimizer:
        return 0.0
    trained = parameters.trainable
    if costs.stage == 3:
        return costs.master_bytes * min(trained / ranks, costs.sub_group)
    if costs.stage == 0:
        return float(costs.master_bytes * trained)
    kept = weight_bytes * trained * (1.0 if costs.stage == 1 else 1 / ranks)
    return (2 * weight_bytes + costs.master_bytes) * trained / ranks - kept


def _host(
    recipe: RecipeConfig,
    parameters: Parameters,
    costs: Costs,
    ranks: int,
    ranks_here: int,
    weight_bytes: int,
    swapped_at_once: int,
) -> dict[str, float]:
    """Return the bytes on one host. While weights load, each rank holds them all unless ZeRO-3 shards them at once.

    Args:
        swapped_at_once: Elements of the buffers for weights on disks, of one rank.
    """
    lines = {"processes": float(PROCESS_BYTES * ranks_here)}
    trained = parameters.trainable / ranks * ranks_here
    if costs.offload_optimizer:
        sharded, accumulates = costs.stage == 3, recipe.split.accumulation > 1
        # Below stage 3 the new 16-bit weights are staged beside masters and moments.
        master_and_moment_bytes = costs.master_bytes + costs.state_part * state_bytes(recipe)
        lines["optimizer_states"] = trained * (master_and_moment_bytes + (0 if sharded else weight_bytes))
        # In fp32 for the step, and in 16 bits as they arrive, where stage 2 needs that to add them up.
        lines["gradients"] = trained * (costs.master_bytes + (weight_bytes if sharded or accumulates else 0))
    if costs.offload_param:
        lines["weights"] = trained * weight_bytes + frozen_bytes(parameters, weight_bytes) / ranks * ranks_here
    # What is on disks passes through buffers (swap_tensor/optimizer_utils.py and partitioned_param_swapper.py).
    if costs.optimizer_buffers:
        of_group = 4.0 * min(parameters.trainable / ranks, costs.sub_group)
        lines["optimizer_states"] = costs.optimizer_buffers * of_group * ranks_here
        lines["gradients"] = trained * weight_bytes
    if costs.param_buffers:
        kept = min(parameters.trainable / ranks, costs.params_in_host)
        lines["weights"] = weight_bytes * (swapped_at_once + kept) * ranks_here
    return lines
