"""Whether the ranks of a run may share samples (`train_cfg.sequence_parallel_size`), and how many groups they are.

It takes a recipe and a number of ranks; how the ranks then compute is in `worker.long_rows`.

Jacobs et al., DeepSpeed Ulysses, 2023 (arXiv:2309.14509): between the projections and the attention an all-to-all
turns a part of the tokens with all heads into all tokens with a part of the heads, so the size divides the heads.
"""

from __future__ import annotations

from collections.abc import Iterator

from tuner.errors import ModelError, RecipeError, TunerError, together
from tuner.recipes.schema import RecipeConfig
from tuner.recipes.schema.architecture import Architecture
from tuner.recipes.schema.long_context import KINDS, SHARED_BY, forgets_window
from tuner.recipes.schema.objectives import OBJECTIVES

ATTENTION = ("sdpa", "flash_attention_2", "flash_attention_3")
"""Those that keep packed samples apart by position_ids, or can be made to."""


def data_parallel_ranks(config: RecipeConfig, num_ranks: int) -> int:
    """Return how many ranks, or groups of ranks, train on samples of their own.

    Raises:
        TunerError: samples cannot be shared so; all that is wrong with it.
    """
    size = config.train_cfg.sequence_parallel_size
    problems = list(_problems(config, num_ranks, size)) if size > 1 else []
    if problems:
        raise together(problems)
    return num_ranks // size


def refuse_tiles(config: RecipeConfig) -> None:
    """Refuse a tiled MLP that sees more than one token: experts choose among, and balance, all of them.

    Raises:
        ModelError: it may.
    """
    architecture = config.architecture
    if config.train_cfg.tiled_mlp and architecture and architecture.model_type not in KINDS:
        what = f"tiled_mlp is not tested with {architecture.model_type} models"
        raise ModelError(what, where="train_cfg.tiled_mlp", fix="Use --set tiled_mlp=False.")


def sizes(architecture: Architecture, num_ranks: int) -> list[int]:
    """Return the sizes that divide the ranks and the heads of a model, 1 first."""
    return [size for size in range(1, num_ranks + 1) if num_ranks % size == 0 and divides_heads(architecture, size)]


def divides_heads(architecture: Architecture, size: int) -> bool:
    """Say whether each of `size` ranks gets as many heads; key-value heads are copied where there are fewer of them."""
    query, key = architecture.num_attention_heads, architecture.num_key_value_heads
    return query % size == 0 and (key % size == 0 or size % key == 0)


def _problems(config: RecipeConfig, num_ranks: int, size: int) -> Iterator[TunerError]:
    architecture, attention = config.architecture, config.model.attn_implementation
    if config.train_cfg.torch_compile:
        what = f"torch.compile is not tested with sequence parallelism over {size} ranks"
        yield RecipeError(what, where="train_cfg.torch_compile", fix="Remove it.")
    if not config.objective.facts.packs:  # its loss compares whole samples
        supported = " and ".join(name for name, block in OBJECTIVES.items() if block.facts.packs)
        what = f"sequence parallelism supports only {supported}, and this is {config.objective.type}"
        yield RecipeError(what, where=SHARED_BY, fix="Set it to 1; --deepspeed zero3_offload saves memory too.")
    if attention not in (None, "auto", *ATTENTION):
        what = f"{attention} does not support sequence parallelism over {size} ranks"
        yield RecipeError(what, where="model.attn_implementation", fix=f"Use one of {', '.join(ATTENTION)}.")
    if architecture and architecture.model_type not in KINDS:
        what = f"sequence parallelism over {size} ranks is not tested with {architecture.model_type} models"
        yield ModelError(what, where=SHARED_BY, fix=f"Set it to 1; tested are {', '.join(sorted(KINDS))}.")
    if architecture and (problem := forgets_window(config, architecture.model_dump(), attention)):
        yield problem
    if num_ranks % size:
        fix = f"Use {_nearest_multiple(num_ranks, size)} ranks, or {_take(architecture, num_ranks)}"
        yield RecipeError(f"{num_ranks} ranks cannot be grouped by {size}", where=SHARED_BY, fix=fix)
    if architecture and not divides_heads(architecture, size):
        heads = f"{architecture.num_attention_heads} heads and {architecture.num_key_value_heads} key-value heads"
        what = f"{size} ranks cannot share the model's {heads} evenly"
        yield RecipeError(what, where=SHARED_BY, fix=_take(architecture, num_ranks).capitalize())


def _nearest_multiple(num_ranks: int, size: int) -> int:
    return max(1, round(num_ranks / size)) * size


def _take(architecture: Architecture | None, num_ranks: int) -> str:
    every = range(1, num_ranks + 1)
    found = sizes(architecture, num_ranks) if architecture else [one for one in every if num_ranks % one == 0]
    return f"set it to one of {', '.join(map(str, found))} on {num_ranks} rank{'s' * (num_ranks > 1)}."
