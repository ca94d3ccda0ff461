"""How a global batch is split over ranks and into micro-batches, also where ranks share samples or layers.

It takes a recipe and a number of ranks. `worker.long_rows` computes with shared samples; `fit.advice` knows which split
is fast.

Jacobs et al., DeepSpeed Ulysses, 2023 (arXiv:2309.14509): between the projections and the attention an all-to-all
turns a part of the tokens with all heads into all tokens with a part of the heads, so the size divides the heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from tuner.errors import Option, RecipeError, TunerError, together
from tuner.recipes.schema import RecipeConfig, Split
from tuner.recipes.schema.architecture import VARLEN, Architecture
from tuner.recipes.schema.long_context import SHARED_BY, untested
from tuner.recipes.schema.objectives import OBJECTIVES
from tuner.recipes.schema.tensor_parallel import refusals

ATTENTION = ("sdpa", VARLEN, "flash_attention_2", "flash_attention_3")
"""The implementations that keep packed samples apart by position_ids, or can be made to."""
DEFAULT_SPLIT = Split(1, 16, recompute=True)
"""XTuner's, for what is 'auto' where no global batch is named."""


def data_parallel_ranks(config: RecipeConfig, num_ranks: int) -> int:
    """Return how many ranks, or groups of ranks, train on samples of their own.

    Raises:
        TunerError: samples cannot be shared so; all that is wrong with it.
    """
    size = config.train_cfg.sequence_parallel_size
    problems = [*(_problems(config, num_ranks, size) if size > 1 else ()), *refusals(config, num_ranks)]
    if problems:
        raise together(problems)
    return num_ranks // config.train_cfg.ranks_a_sample


def sizes(architecture: Architecture, num_ranks: int) -> list[int]:
    """Return the sizes that divide the ranks and the heads of a model, 1 first."""
    return [size for size in range(1, num_ranks + 1) if num_ranks % size == 0 and divides_heads(architecture, size)]


def divides_heads(architecture: Architecture, size: int) -> bool:
    """Return whether each of `size` ranks gets the same number of heads; too few key-value heads are copied."""
    query, key = architecture.num_attention_heads, architecture.num_key_value_heads
    return query % size == 0 and (key % size == 0 or size % key == 0)


def _problems(config: RecipeConfig, num_ranks: int, size: int) -> Iterator[TunerError]:
    architecture, attention = config.architecture, config.model.attn_implementation
    if config.train_cfg.torch_compile:
        problem = f"torch.compile is not tested with sequence parallelism over {size} ranks"
        yield RecipeError(problem, where="train_cfg.torch_compile", fix="Remove it.")
    if not config.objective.facts.packs:  # its loss compares whole samples
        supported = " and ".join(name for name, block in OBJECTIVES.items() if block.facts.packs)
        problem = f"sequence parallelism supports only {supported}, and this is {config.objective.type}"
        yield RecipeError(
            problem, where=SHARED_BY, fix=f"Set it to 1; {Option('deepspeed', 'zero3_offload')} saves memory too."
        )
    if attention not in (None, "auto", *ATTENTION):
        problem = f"{attention} does not support sequence parallelism over {size} ranks"
        yield RecipeError(problem, where="model.attn_implementation", fix=f"Use one of {', '.join(ATTENTION)}.")
    if architecture and (problem_of_type := untested(size, architecture.model_type)):
        yield problem_of_type
    if num_ranks % size:
        fix = f"Use {max(1, round(num_ranks / size)) * size} ranks, or {_take(architecture, num_ranks)}"
        yield RecipeError(f"{num_ranks} ranks cannot be grouped by {size}", where=SHARED_BY, fix=fix)
    if architecture and not divides_heads(architecture, size):
        heads = f"{architecture.num_attention_heads} heads and {architecture.num_key_value_heads} key-value heads"
        problem = f"{size} ranks cannot share the model's {heads} evenly"
        yield RecipeError(problem, where=SHARED_BY, fix=_take(architecture, num_ranks).capitalize())


def _take(architecture: Architecture | None, num_ranks: int) -> str:
    every = range(1, num_ranks + 1)
    choices = sizes(architecture, num_ranks) if architecture else [size for size in every if num_ranks % size == 0]
    return f"set it to one of {', '.join(map(str, choices))} on {num_ranks} rank{'s' * (num_ranks > 1)}."


def possible_splits(recipe: RecipeConfig, ranks: int) -> list[Split]:
    """Return every split that the recipe leaves to the plan; the one that needs the least memory is first.

    Args:
        ranks: Those that have samples of their own (`data_parallel_ranks`).

    Raises:
        RecipeError: the global batch cannot be shared out so.
    """
    micro, accumulation = recipe.train_dataloader.batch_size, recipe.optim_wrapper.accumulative_counts
    samples = samples_of_rank(recipe, ranks)
    sizes = [
        size
        for size in recipe.objective.micro_batches(samples)
        if samples % size == 0 and micro in ("auto", size) and accumulation in ("auto", samples // size)
    ]
    if not sizes or samples * ranks % recipe.objective.samples_a_row:
        raise _uneven(recipe, ranks)
    if recipe.depends_on_micro_batch:
        sizes = sizes[:1]  # not the fastest: what is learned must not depend on the machine
    checkpointing = recipe.train_cfg.gradient_checkpointing
    if checkpointing == "auto" and recipe.packs_experts:
        checkpointing = True  # else all experts of a layer stay in 16 bits until its backward pass
    recomputes = (True, False) if checkpointing == "auto" else (checkpointing,)
    layers = recipe.train_cfg.recomputed_layers
    if isinstance(layers, int):  # which asks for recomputation
        return [Split(size, samples // size, True, layers) for size in sizes]
    return [Split(size, samples // size, recompute) for size in sizes for recompute in recomputes]


def samples_of_rank(recipe: RecipeConfig, ranks: int) -> int:
    """Return the samples of one rank in a step: its part of the global batch, or else micro-batch x accumulation.

    `DEFAULT_SPLIT` has the numbers for those that are 'auto'. The result is 0 if the ranks do not divide the batch.
    """
    micro, accumulation = recipe.train_dataloader.batch_size, recipe.optim_wrapper.accumulative_counts
    global_batch = recipe.train_cfg.global_batch_size
    if isinstance(global_batch, int):
        return 0 if global_batch % ranks else global_batch // ranks
    micro = DEFAULT_SPLIT.micro_batch if micro == "auto" else micro
    return micro * (DEFAULT_SPLIT.accumulation if accumulation == "auto" else accumulation)


def _uneven(recipe: RecipeConfig, ranks: int) -> RecipeError:
    micro, accumulation = recipe.train_dataloader.batch_size, recipe.optim_wrapper.accumulative_counts
    # Of the sizes only start and step count.
    global_batch, sizes = recipe.train_cfg.global_batch_size, recipe.objective.micro_batches(0)
    if isinstance(global_batch, int) and global_batch % ranks:
        divisors = ", ".join(str(size) for size in range(1, global_batch + 1) if global_batch % size == 0)
        problem = f"a global batch of {global_batch} cannot be split evenly over {ranks} ranks"
        return RecipeError(problem, where="train_cfg.global_batch_size", fix=f"Use one of {divisors} ranks.")
    a_row = recipe.objective.samples_a_row
    if samples_of_rank(recipe, ranks) * ranks % a_row:
        batch, unit = samples_of_rank(recipe, ranks) * ranks, math.lcm(a_row, ranks)
        problem = f"a step of {batch} completions cannot hold {a_row} of each prompt (num_generations)"
        near = ", ".join(str(size) for size in dict.fromkeys((batch // unit * unit, -(-batch // unit) * unit)) if size)
        fix = f"Set train_cfg.global_batch_size, which counts completions, to {near}; or change num_generations."
        return RecipeError(problem, where="train_cfg.global_batch_size", fix=fix)
    wish = (
        f"global_batch_size = {global_batch}" if global_batch else f"{samples_of_rank(recipe, ranks)} samples per rank"
    )
    problem = f"{wish} is not {micro} x {accumulation} x {ranks} rank{'s' * (ranks > 1)}"
    problem += f", and {recipe.objective.type} needs micro-batches of {sizes.start} or more" if sizes.start > 1 else ""
    problem += f", in steps of {sizes.step}" if sizes.step > 1 else ""
    where = "train_cfg.global_batch_size, train_dataloader.batch_size, optim_wrapper.accumulative_counts"
    return RecipeError(
        problem, where=where, fix="Make it the product of the three, or set 'auto' for what tuner may choose."
    )
