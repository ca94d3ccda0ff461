"""The global batch of a recipe that leaves it to the data: few rows get a small one, so that there are enough steps.

Rows are counted by `counting`, as far as that takes milliseconds.
"""

from __future__ import annotations

from tuner.fit.split import samples_of_rank
from tuner.launch import counting, steps
from tuner.machine.few_steps import ENOUGH
from tuner.machine.topology import Batch
from tuner.recipes.objective import least_batch_size
from tuner.recipes.origin import Kind, Place
from tuner.recipes.recipe import Recipe
from tuner.recipes.schema import RecipeConfig

KEY = "train_cfg.global_batch_size"


def settle(loaded: Recipe, ranks: int) -> Recipe:
    """Return the recipe with a number, or None for the usual 1 x 16 of each rank, where its global batch is 'auto'.

    The usual one is halved until the run takes `ENOUGH` optimizer steps; of data that are not counted before they are
    read it stays.

    Args:
        ranks: Those that have samples of their own.
    """
    config = loaded.config
    if config.train_cfg.global_batch_size != "auto":
        return loaded
    usual = samples = samples_of_rank(config, ranks)
    rows = None if config.train_cfg.max_steps else steps.estimate_rows(config, counting.sources(config))
    micro = config.train_dataloader.batch_size
    least = least_batch_size(config.objective) if micro == "auto" else micro
    if rows is not None and config.optim_wrapper.accumulative_counts == "auto":
        while samples % 2 == 0 and samples // 2 >= least and _num_steps(config, rows, samples, ranks) < ENOUGH:
            samples //= 2
    if samples == usual:
        return loaded.settled({KEY: None}, Place(Kind.DERIVED, "derived: batch_size x accumulative_counts x ranks"))
    num_steps = _num_steps(config, rows or 0, usual, ranks)
    why = f"derived: at {usual * ranks} this data would make {num_steps} optimizer steps"
    return loaded.settled({KEY: samples * ranks}, Place(Kind.DERIVED, why))


def _num_steps(config: RecipeConfig, rows: int, samples: int, ranks: int) -> int:
    """Return about how many optimizer steps a run takes, of so many samples of each rank."""
    return Batch(samples, 1, ranks).steps_per_epoch(rows) * config.train_cfg.max_epochs
