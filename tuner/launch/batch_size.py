"""The batch of an optimizer step: how large it is, and how long packed rows are.

Few data get small batches, so that there are enough steps. It depends on the data and the recipe, and is a multiple of
the ranks: where one batch suits both, a run learns the same on one GPU and on eight. `level_and_split` splits it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from operator import attrgetter

from tuner.data.step_count import ENOUGH, count_steps, splits_generation
from tuner.errors import RecipeError
from tuner.fit.splits import samples_of_rank
from tuner.launch import row_counts, steps
from tuner.machine.topology import Batch
from tuner.recipes.merging import Kind, Place
from tuner.recipes.recipe import Recipe
from tuner.recipes.schema import GLOBAL_BATCH, RecipeConfig, Split
from tuner.zero.config import Document

MAX_TOKENS = 32_768
"""Most tokens of a step that tuner chooses: 16 rows of 2,048.

Source: QLoRA (Dettmers et al. 2023, table 9); XTuner's recipes.
"""
MAX_SAMPLES = 16
"""Most samples of such a step if samples are not packed."""
MAX_PROMPTS = 4
"""MAX_SAMPLES are multiplied by the completions of a prompt, up to this number."""
MIN_PACK = 64
"""Tokens of the shortest packed row that tuner chooses: nearly every conversation is longer, and has its own row."""


def choose_global_batch(recipe: Recipe, ranks: int) -> Recipe:
    """Return the recipe with numbers where its global batch or the length of its packs is 'auto'.

    Args:
        ranks: The ranks that train on different samples.
    """
    config = recipe.config
    chooses_batch = config.train_cfg.global_batch_size == "auto"
    if chooses_batch and config.optim_wrapper.accumulative_counts != "auto":
        place = Place(Kind.DERIVED, "derived: batch_size x accumulative_counts x ranks")
        recipe, chooses_batch = recipe.settled({GLOBAL_BATCH: None}, place), False
    open_lengths = [key for key, loader in config.loaders.items() if loader.dataset.pack_length == "auto"]
    if not (chooses_batch or open_lengths):
        return recipe
    own_batch = None if chooses_batch else samples_of_rank(recipe.config, ranks) * ranks
    micro = config.train_dataloader.batch_size
    unit = ranks * (config.objective.micro_batches(0).start if micro == "auto" else micro)
    unit = math.lcm(unit, config.objective.samples_a_row)  # all completions of a prompt are in the same step
    sizes = row_counts.dataset_sizes(config)
    if steps.packs(config):
        tokens = steps.estimate_tokens(config, sizes)
        batch, pack_length = _of_packs(config, tokens, own_batch, unit)
        data = "the tokens are not counted" if tokens is None else f"about {tokens:,.0f} tokens an epoch"
    else:
        num_rows = steps.count_samples(config, sizes).value
        batch, pack_length = own_batch or _of_samples(config, num_rows, unit, ranks), None
        data = "the rows are not counted" if num_rows is None else f"{num_rows:,} rows an epoch"
    values: dict[str, object] = {GLOBAL_BATCH: batch} if chooses_batch else {}
    values |= {f"{key}.dataset.pack_length": pack_length for key in open_lengths}
    why = f"derived: {data}, so that a run has {ENOUGH} optimizer steps or more"
    return recipe.settled(values, Place(Kind.DERIVED, why))


def _of_packs(config: RecipeConfig, tokens: float | None, own_batch: int | None, unit: int) -> tuple[int, int | None]:
    """Return a global batch of packed rows, and their length; None: they are as long as max_length.

    Args:
        tokens: The tokens of an epoch; None if they are not counted.
        own_batch: The global batch, if the recipe has one.
        unit: The smallest global batch.
    """
    dataset, batch_tokens = config.train_dataloader.dataset, MAX_TOKENS
    if tokens is not None:
        batch_tokens = min(MAX_TOKENS, _power_of_2(tokens * config.train_cfg.max_epochs / ENOUGH))
    batch = own_batch or unit * max(1, batch_tokens // (dataset.pack_tokens * unit))
    if dataset.pack_length != "auto":
        return batch, dataset.pack_length
    length = max(MIN_PACK, _power_of_2(batch_tokens / batch))
    is_shorter = length < dataset.max_length and config.train_cfg.sequence_parallel_size == 1
    return batch, length if is_shorter else None


def _of_samples(config: RecipeConfig, num_rows: int | None, unit: int, ranks: int) -> int:
    """Return a global batch of samples: halved from `MAX_SAMPLES` until the run has enough steps."""
    batch = unit * max(1, MAX_SAMPLES * min(config.objective.samples_a_row, MAX_PROMPTS) // unit)
    if num_rows:
        while batch % (2 * unit) == 0 and count_steps(config, Batch(batch // ranks, 1, ranks), num_rows) < ENOUGH:
            batch //= 2
    allowed_sizes = (size for size in range(batch, 0, -unit) if not splits_generation(config, size, ranks))
    return next(allowed_sizes, batch)


def _power_of_2(number: float) -> int:
    """Return the largest power of 2 that is not above the number; 1 for a number below 1."""
    return 1 << max(0, int(number).bit_length() - 1)


def share_generation(recipe: Recipe, batch: Batch) -> Recipe:
    """Return the recipe with intervals of checkpoints and validations that are multiples of a generation's steps.

    The package's own intervals change, a user's never.

    Raises:
        RecipeError: steps cannot share them evenly, or a checkpoint or a validation would come between such steps.
    """
    config, size = recipe.config, batch.global_batch
    at_once, num_steps = config.objective.generated_at_once(size), config.objective.steps_per_generation(size)
    key, a_row = "objective.generation_batch_size", config.objective.samples_a_row
    if at_once % size:
        near = -(-at_once // size) * size
        message = f"{at_once} completions are not a multiple of the batch, which is {size}"
        raise RecipeError(message, where=f"{key} ({recipe.origins[key].text})", fix=f"Set it to {near}.")
    if at_once > size and size // batch.ranks % a_row:
        unit = batch.ranks * a_row
        message = f"a batch of {size} on {batch.ranks} ranks splits the {a_row} completions of a prompt between ranks"
        fix = f"With {key}, set train_cfg.global_batch_size to {-(-size // unit) * unit}, a multiple of {unit}."
        raise RecipeError(message, where="train_cfg.global_batch_size", fix=fix)
    for key in ("checkpoint.interval", "train_cfg.val_interval"):
        interval = attrgetter(key)(config)
        if not interval or num_steps == 1 or interval % num_steps == 0:
            continue
        near, origin = math.ceil(interval / num_steps) * num_steps, recipe.origins[key]
        if origin.place.kind is not Kind.PACKAGE:
            # A checkpoint has no completions: a run that resumes generates new ones.
            message = f"{interval} is not a multiple of {num_steps}, the steps that train on the same completions"
            raise RecipeError(message, where=f"{key} ({origin.text})", fix=f"Set it to {near}.")
        place = Place(Kind.DERIVED, f"derived: {interval}, as a multiple of {num_steps} steps")
        recipe = recipe.settled({key: near}, place)
    return recipe


def with_document(recipe: Recipe, document: Document | None) -> Recipe:
    """Return the recipe with what the user's DeepSpeed config sets of it: compute type, torch.compile, batch."""
    return _with_batch(_with_compile(_with_dtype(recipe, document), document), document) if document else recipe


_MICRO, _ACCUMULATION = "train_dataloader.batch_size", "optim_wrapper.accumulative_counts"
_DTYPE, _COMPILE = "optim_wrapper.dtype", "train_cfg.torch_compile"


def _with_dtype(recipe: Recipe, document: Document) -> Recipe:
    """Return the recipe with the compute type of an accelerate config; the recipe's own type wins, with a warning."""
    of_file, of_recipe = document.dtype, recipe.config.optim_wrapper.dtype
    if of_file is None or of_recipe == of_file:
        return recipe
    place = document.place(("mixed_precision",))
    if of_recipe == "auto":
        return recipe.settled({_DTYPE: of_file}, place)
    warning = f"{_DTYPE} = {of_recipe!r} from {recipe.origins[_DTYPE].text} overrides {of_file!r} in {place}."
    return replace(recipe, warnings=(*recipe.warnings, warning))


def _with_compile(recipe: Recipe, document: Document) -> Recipe:
    """Return the recipe with torch.compile where an older DeepSpeed config asks for it, as Axolotl's examples do.

    DeepSpeed once read `compile.disable` and `compile.backend`; now the recipe compiles. A user's own
    train_cfg.torch_compile stays.
    """
    block = document.value.get("compile")
    is_asked = isinstance(block, dict) and {"disable", "backend"} & block.keys() and not block.get("disable")
    if not is_asked or recipe.origins[_COMPILE].place.kind in (Kind.FILE, Kind.FLAG):
        return recipe
    return recipe.settled({_COMPILE: True}, document.place(("compile",)))


def _with_batch(recipe: Recipe, document: Document) -> Recipe:
    """Return the recipe with the numbers of a user's JSON where it has 'auto'; its own numbers stay."""
    for ds_key, key in (("train_micro_batch_size_per_gpu", _MICRO), ("gradient_accumulation_steps", _ACCUMULATION)):
        if attrgetter(key)(recipe.config) == "auto" and (number := _number(document, ds_key)):
            recipe = recipe.settled({key: number}, document.place((ds_key,)))
    is_auto = "auto" in (attrgetter(_MICRO)(recipe.config), attrgetter(_ACCUMULATION)(recipe.config))
    has_global_batch = isinstance(recipe.config.train_cfg.global_batch_size, int)
    if is_auto and not has_global_batch and (number := _number(document, "train_batch_size")):
        return recipe.settled({GLOBAL_BATCH: number}, document.place(("train_batch_size",)))
    return recipe


def _number(document: Document, key: str) -> int | None:
    """Return a number above 0 of the document; the check of the document refuses everything else."""
    number = document.value.get(key)
    return number if isinstance(number, int) and number > 0 and number is not True else None


def with_split(recipe: Recipe, split: Split, why: str) -> Recipe:
    """Return the recipe with the values of a split where it has 'auto'; `why` is the origin of those that were open."""
    values: dict[str, object] = {
        _MICRO: split.micro_batch,
        _ACCUMULATION: split.accumulation,
        "train_cfg.gradient_checkpointing": split.recompute,
        "train_cfg.recomputed_layers": split.recomputed_layers,
    }
    if recipe.config.val_dataloader:
        values["val_dataloader.batch_size"] = split.micro_batch
    cfg = recipe.config.train_cfg
    follows = {}
    if recipe.config.depends_on_micro_batch and recipe.config.optim_wrapper.accumulative_counts == "auto":
        follows[_MICRO] = "derived: its size changes what is learned, so it is the least"
        follows[_ACCUMULATION] = f"derived: {split.samples} samples per rank and step"
    if recipe.config.packs_experts:
        follows["train_cfg.gradient_checkpointing"] = "derived: experts in 4 bits need recomputation"
    # Of these two values one decides the other.
    if cfg.gradient_checkpointing != "auto":
        follows["train_cfg.recomputed_layers"] = f"derived: gradient_checkpointing is {cfg.gradient_checkpointing}"
    elif isinstance(cfg.recomputed_layers, int):
        follows["train_cfg.gradient_checkpointing"] = f"derived: recomputed_layers is {cfg.recomputed_layers}"
    for key, value in values.items():
        if attrgetter(key)(recipe.config) == "auto":
            recipe = recipe.settled({key: value}, Place(Kind.DERIVED, follows.get(key, why)))
    return recipe
