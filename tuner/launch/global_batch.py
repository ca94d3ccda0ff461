"""How much an optimizer step takes where the recipe leaves it to the data: the global batch, and the length of packs.

Few data get small steps, so that there are enough of them. The choice depends on the data and the recipe alone, so a
run learns the same on one GPU and on eight. Rows are counted by `counting`, as far as that takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.fit.split import samples_of_rank
from tuner.launch import counting, steps
from tuner.machine.few_steps import ENOUGH
from tuner.machine.topology import Batch
from tuner.recipes.origin import Kind, Place
from tuner.recipes.recipe import Recipe
from tuner.recipes.schema import GLOBAL_BATCH, RecipeConfig
from tuner.recipes.schema.objective import least_batch_size

MAX_TOKENS = 32_768
"""Of a step of our choice: 16 rows of 2,048, which QLoRA (Dettmers et al. 2023, table 9) and XTuner's recipes take."""
MAX_SAMPLES = 16
"""The same where samples are not packed."""
MIN_PACK = 64
"""Tokens of the shortest pack of our choice: nearly every conversation is longer, and then has its row to itself."""


def settle(loaded: Recipe, ranks: int) -> Recipe:
    """Return the recipe with numbers where its global batch or the length of its packs is 'auto'.

    Args:
        ranks: Those that have samples of their own.
    """
    config = loaded.config
    is_open = {
        GLOBAL_BATCH: config.train_cfg.global_batch_size == "auto",
        "pack_length": any(loader.dataset.pack_length == "auto" for loader in config.loaders.values()),
    }
    if not any(is_open.values()):
        return loaded
    sources = counting.sources(config)
    if is_open[GLOBAL_BATCH] and config.optim_wrapper.accumulative_counts != "auto":
        place = Place(Kind.DERIVED, "derived: batch_size x accumulative_counts x ranks")
        loaded, is_open[GLOBAL_BATCH] = loaded.settled({GLOBAL_BATCH: None}, place), False
    batch = None if is_open[GLOBAL_BATCH] else samples_of_rank(loaded.config, ranks) * ranks
    micro = config.train_dataloader.batch_size
    unit = ranks * (least_batch_size(config.objective) if micro == "auto" else micro)
    if not steps.packs(config):
        rows = _rows(config, sources)
        chosen: Mapping[str, Any] = {GLOBAL_BATCH: batch or _samples(config, rows, unit, ranks)}
        why = "derived: the rows are not counted" if rows is None else f"derived: {rows:,} rows an epoch"
    else:
        tokens = steps.estimate_tokens(config, sources)
        chosen = _packs(config, tokens, batch, unit)
        why = (
            "derived: the tokens are not counted" if tokens is None else f"derived: about {tokens:,.0f} tokens an epoch"
        )
    values = {GLOBAL_BATCH: chosen[GLOBAL_BATCH]} if is_open[GLOBAL_BATCH] else {}
    for key, loader in config.loaders.items():
        if loader.dataset.pack_length == "auto":
            values[f"{key}.dataset.pack_length"] = chosen.get("pack_length")
    return loaded.settled(values, Place(Kind.DERIVED, f"{why}, so that a run has {ENOUGH} optimizer steps or more"))


def _packs(config: RecipeConfig, tokens: float | None, batch: int | None, unit: int) -> dict[str, Any]:
    """Return a global batch of packed rows, and their length where it is shorter than max_length.

    Args:
        tokens: Of an epoch; None if they are not counted.
        batch: The global batch, if the recipe has one.
        unit: The smallest global batch.
    """
    dataset, shared = config.train_dataloader.dataset, config.train_cfg.sequence_parallel_size > 1
    wanted = (
        MAX_TOKENS if tokens is None else min(MAX_TOKENS, _power_of_2(tokens * config.train_cfg.max_epochs / ENOUGH))
    )
    batch = batch or unit * max(1, wanted // (dataset.pack_tokens * unit))
    length = max(MIN_PACK, _power_of_2(wanted / batch))
    if dataset.pack_length != "auto" or shared or length >= dataset.max_length:
        return {GLOBAL_BATCH: batch, "pack_length": dataset.pack_length if dataset.pack_length != "auto" else None}
    return {GLOBAL_BATCH: batch, "pack_length": length}


def _samples(config: RecipeConfig, rows: int | None, unit: int, ranks: int) -> int:
    """Return a global batch of samples: halved from `MAX_SAMPLES` until the run has enough steps."""
    samples = unit * max(1, MAX_SAMPLES // unit)
    while rows and samples % (2 * unit) == 0 and _num_steps(config, rows, samples, ranks) < ENOUGH:
        samples //= 2
    return samples


def _rows(config: RecipeConfig, sources: tuple[steps.DatasetSize, ...]) -> int | None:
    return steps.count_samples(config, sources).value


def _num_steps(config: RecipeConfig, rows: int, samples: int, ranks: int) -> int:
    return Batch(samples // ranks, 1, ranks).steps(rows, config.train_cfg.max_epochs)


def _power_of_2(number: float) -> int:
    """Return the largest power of 2 that is not above the number; 1 for what is below 1."""
    return 1 << max(0, int(number).bit_length() - 1)
