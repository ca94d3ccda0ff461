"""What recipe and machine decide of a DeepSpeed config: which config was chosen, and the values that none decides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tuner.errors import Key, Option
from tuner.machine.hardware import Precision
from tuner.machine.topology import Batch
from tuner.recipes.merging import Place
from tuner.recipes.recipe import Recipe
from tuner.zero.config import AUTO, Config, Document, Keys, stage_0


def chosen(recipe: Recipe, flag: str | None) -> tuple[str | Config, str]:
    """Return the choice, of `--deepspeed` or else of the recipe, and its place: the flag or the key."""
    if flag is not None:
        return flag, Option("deepspeed")
    return recipe.config.deepspeed, f"deepspeed ({next(iter(sources_of(recipe).values()))})"


def is_auto(recipe: Recipe, flag: str | None) -> bool:
    """Return whether the plan chooses the level."""
    return chosen(recipe, flag)[0] == AUTO


def sources_of(recipe: Recipe) -> dict[Keys, Place]:
    """Return the place of each key in the recipe's `deepspeed`, by its path in the config."""
    paths: dict[Keys, Place] = {tuple(key.split(".")): origin.place for key, origin in recipe.origins.items()}
    return {path[1:]: place for path, place in paths.items() if path[0] == "deepspeed"}


class Owned(NamedTuple):
    """A value that the recipe or the machine decides, never the document."""

    keys: tuple[str, ...]
    value: bool | int | float
    source: str
    note: str = ""
    """Added to the warning if the document has another value."""


def owned(recipe: Recipe, batch: Batch, precision: Precision, *, document_clips: bool = False) -> Iterator[Owned]:
    """Yield the values that recipe and machine decide in every config: batch sizes, clipping, compute type.

    Args:
        document_clips: The document has a gradient_clipping, which stays if the recipe has none.
    """
    micro, accumulation = "train_dataloader.batch_size", "optim_wrapper.accumulative_counts"
    yield Owned(("train_micro_batch_size_per_gpu",), batch.micro_batch, recipe_source(recipe, micro))
    yield Owned(("gradient_accumulation_steps",), batch.accumulation, recipe_source(recipe, accumulation))
    product = f"{batch.micro_batch} x {batch.accumulation} x {batch.ranks} ranks"
    yield Owned(("train_batch_size",), batch.global_batch, f"derived: {product}")
    if clip := recipe.config.optim_wrapper.clip_grad:
        yield Owned(("gradient_clipping",), clip.max_norm, recipe_source(recipe, "optim_wrapper.clip_grad.max_norm"))
    elif not document_clips:
        yield Owned(("gradient_clipping",), 0.0, recipe_source(recipe, "optim_wrapper.clip_grad") + ": not clipped")
    for dtype in ("bf16", "fp16"):
        source, note = precision_source(recipe, precision)
        yield Owned((dtype, "enabled"), precision.dtype == dtype, source, note)


def precision_source(recipe: Recipe, precision: Precision) -> tuple[str, str]:
    """Return the source of the compute type, and a note for a config that names another."""
    key = "optim_wrapper.dtype"
    source = recipe_source(recipe, key) if precision.by_recipe else f"detected: {precision.reason}"
    return source, f" The machine and the recipe set the compute type ({Key('dtype', '...')})."


def recipe_source(recipe: Recipe, key: str) -> str:
    """Return the recipe's key and its place, for messages."""
    origin = recipe.origins.get(key)
    return f"recipe {key} ({origin.source})" if origin else f"recipe {key}"


OWN_OPTIMIZER = Owned(("zero_allow_untested_optimizer",), True, "derived: the recipe's optimizer is torch's own")


def is_stage_0(recipe: Recipe, document: Document) -> bool:
    """Return whether DeepSpeed only averages gradients: stage 0 with torch's optimizer, without a config of its own."""
    is_torchs = recipe.config.optim_wrapper.optimizer.facts.of_deepspeed is None
    return is_torchs and not recipe.config.train_cfg.torch_compile and document == stage_0()
