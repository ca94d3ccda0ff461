"""Which split of a rank's share of a step is the fastest that fits: micro-batch, accumulation, recomputation.

None of the three changes what is learned at one global batch, so each may be 'auto'. It takes plain numbers and a
level; what a machine is and where a value came from is `launch.batch_size`'s.
"""

from __future__ import annotations

from tuner.errors import RecipeError
from tuner.fit import communication
from tuner.fit.communication import Cluster
from tuner.fit.estimate import frozen_bytes, peak_on
from tuner.fit.levels import Fit, Level, Machines
from tuner.fit.parameters import active_parameters, num_parameters
from tuner.fit.sequence_parallel import data_parallel_ranks
from tuner.fit.trainable import count
from tuner.recipes.schema import RecipeConfig, Split
from tuner.recipes.schema.architecture import Architecture
from tuner.recipes.schema.long_context import tokens_per_sample

MARGIN = 0.1
"""The part of each GPU that a split of our choice leaves free: fragmentation and contexts are known to a few per cent,
and a step that runs out of memory after an hour costs more than the last tenth would bring (docs/plan.md)."""
UNSAID = Split(1, 16, recompute=True)
"""What 'auto' counts as in the global batch, XTuner's 1 x 16, and what is taken where nothing can be planned."""


def possible(recipe: RecipeConfig, ranks: int) -> list[Split]:
    """Return every split that the recipe leaves open; the one that needs the least memory is first.

    Args:
        ranks: Those that have samples of their own (`data_parallel_ranks`).

    Raises:
        RecipeError: the global batch cannot be shared out so.
    """
    micro, accumulation = recipe.train_dataloader.batch_size, recipe.optim_wrapper.accumulative_counts
    least, samples = recipe.objective.least_batch_size, samples_of_rank(recipe, ranks)
    sizes = [
        size
        for size in range(least, samples + 1)
        if samples % size == 0 and micro in ("auto", size) and accumulation in ("auto", samples // size)
    ]
    if not sizes:
        raise _uneven(recipe, ranks)
    if recipe.objective.depends_on_micro_batch:
        sizes = sizes[:1]
    checkpointing = recipe.train_cfg.gradient_checkpointing
    recomputes = (True, False) if checkpointing == "auto" else (checkpointing,)
    return [Split(size, samples // size, recompute) for size in sizes for recompute in recomputes]


def samples_of_rank(recipe: RecipeConfig, ranks: int) -> int:
    """Return the samples of one rank and step, the most where they are 'auto'; 0 where the ranks do not divide them."""
    micro, accumulation = recipe.train_dataloader.batch_size, recipe.optim_wrapper.accumulative_counts
    wanted = recipe.train_cfg.global_batch_size
    if isinstance(wanted, int):
        return 0 if wanted % ranks else wanted // ranks
    of_micro = UNSAID.micro_batch if micro == "auto" else micro
    return of_micro * (UNSAID.accumulation if accumulation == "auto" else accumulation)


def _uneven(recipe: RecipeConfig, ranks: int) -> RecipeError:
    micro, accumulation = recipe.train_dataloader.batch_size, recipe.optim_wrapper.accumulative_counts
    wanted, least = recipe.train_cfg.global_batch_size, recipe.objective.least_batch_size
    if isinstance(wanted, int) and wanted % ranks:
        divisors = ", ".join(str(one) for one in range(1, wanted + 1) if wanted % one == 0)
        what = f"a global batch of {wanted} cannot be split evenly over {ranks} ranks"
        return RecipeError(what, where="train_cfg.global_batch_size", fix=f"Use one of {divisors} ranks.")
    asked = f"global_batch_size = {wanted}" if wanted else f"{samples_of_rank(recipe, ranks)} samples per rank"
    what = f"{asked} is not {micro} x {accumulation} x {ranks} rank{'s' * (ranks > 1)}"
    what += f", and {recipe.objective.type} needs micro-batches of {least} or more" if least > 1 else ""
    where = "train_cfg.global_batch_size, train_dataloader.batch_size, optim_wrapper.accumulative_counts"
    return RecipeError(
        what, where=where, fix="Make it the product of the three, or set 'auto' for what tuner may choose."
    )


def fastest(
    recipe: RecipeConfig,
    architecture: Architecture,
    machines: Machines,
    level: Level,
    name: str,
    cluster: Cluster | None,
) -> Split | None:
    """Return the split that takes the least time by the plan's model among those that leave `MARGIN` free, or None.

    Of equally fast ones the largest micro-batch: kernels start less often.

    Args:
        level: What of the DeepSpeed config costs memory.
        name: The level of `fit.levels.LEVELS` that sends what it sends.
        cluster: What a step's seconds are worked out with; None: its arithmetic alone decides.
    """

    def room(split: Split) -> float:
        config = recipe.with_split(split)
        needs = peak_on(config, architecture, level, machines)
        return Fit(name, needs, machines).room

    def cost(split: Split) -> tuple[float, int]:
        config = recipe.with_split(split)
        flops = step_flops(config, architecture)
        volume = traffic(config, architecture, machines, name)
        seconds = communication.step_time(name, volume, flops, cluster).total_s if cluster else flops
        return seconds, -split.micro_batch

    options = possible(recipe, data_parallel_ranks(recipe, machines.world_size))
    return min((one for one in options if room(one) >= MARGIN), key=cost, default=None)


def step_flops(recipe: RecipeConfig, architecture: Architecture) -> float:
    """Return the FLOPs of one rank's share of an optimizer step, if every row is one sample of the full length.

    A token attends to half of its row on average: 2 FLOPs for each number of the query, and 2 for the sum of values.
    """
    width = architecture.num_hidden_layers * architecture.num_attention_heads * architecture.head_dim
    return communication.step_flops(
        active_parameters(architecture),
        min(1.0, count(recipe, architecture).trainable / num_parameters(architecture)),
        recipe.split.samples * tokens_per_sample(recipe) / recipe.train_cfg.sequence_parallel_size,
        recompute=recipe.split.recompute,
        attention=2.0 * width * recipe.train_dataloader.dataset.max_length,
    )


def traffic(recipe: RecipeConfig, architecture: Architecture, machines: Machines, name: str) -> communication.Traffic:
    """Return what a rank sends for one step of the recipe."""
    parameters, ranks = count(recipe, architecture), machines.world_size
    trained = machines.weight_bytes * parameters.trainable
    frozen = frozen_bytes(parameters, machines.weight_bytes)
    return communication.traffic(name, trained, frozen, ranks, recipe.split.accumulation, machines.gpus_per_node)
