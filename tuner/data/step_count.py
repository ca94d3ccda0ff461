"""How many optimizer steps so many samples are, and what is said of a run of too few.

The plan asks before the data is read, and a rank once it is. Arithmetic alone.
"""

from __future__ import annotations

import math

from tuner.errors import Key, Option, Text
from tuner.machine.topology import Batch
from tuner.recipes.schema import RecipeConfig

MIN_STEPS = 30
"""Fewer optimizer steps than this teach little at the default learning rates (docs/learning.md): on 135 rows, 12 steps
reached a held-out loss of 3.70, 51 steps 3.08 and 105 steps 3.00."""

ENOUGH = 1000
"""A global batch of our choice is made smaller until a run takes as many: on 1,000 rows 1,000 steps reached a held-out
loss of 2.72, 131 steps 2.89 (docs/learning.md). On a GPU so many small steps cost minutes."""


def steps_per_epoch(config: RecipeConfig, batch: Batch, num_samples: int) -> int:
    """Return the optimizer steps of one pass over so many samples (packed rows, with packing).

    Completions that are generated at once are all trained on, as often as the objective says.
    """
    objective, size = config.objective, batch.global_batch
    if objective.facts.generates:
        return -(-num_samples // objective.generated_at_once(size)) * objective.steps_per_generation(size)
    micro_batches = -(-num_samples // (batch.micro_batch * batch.ranks))
    return -(-micro_batches // batch.accumulation)


def count_steps(config: RecipeConfig, batch: Batch, num_samples: int) -> int:
    """Return the optimizer steps of all epochs, as transformers 5.24 counts them."""
    return math.ceil(config.train_cfg.max_epochs * steps_per_epoch(config, batch, num_samples))


def splits_generation(config: RecipeConfig, size: int, ranks: int) -> bool:
    """Return whether steps of this global batch cannot share the completions that are generated at once.

    If they are several steps, all completions of a prompt have to be in the same rank.
    """
    at_once, a_row = config.objective.generated_at_once(size), config.objective.samples_a_row
    return at_once != size and (at_once % size != 0 or size // ranks % a_row != 0)


def warnings(
    config: RecipeConfig, batch: Batch, num_samples: int | None, description: str, *, unpacked: int | None = None
) -> tuple[str | None, str | None]:
    """Return that a run takes too few steps, unless the recipe sets their number, and that its warm-up is longer.

    Args:
        num_samples: Those of an epoch (packed rows, with packing); None: not known.
        unpacked: The samples that were packed into these rows, if any were.
    """
    if config.train_cfg.max_steps:
        return None, _long_warm_up(config, config.train_cfg.max_steps)
    if num_samples is None:
        return None, None
    few = _few_steps(config, batch, num_samples, description, unpacked)
    return few, _long_warm_up(config, count_steps(config, batch, num_samples))


def _long_warm_up(config: RecipeConfig, total: int) -> str | None:
    schedule = config.param_scheduler
    warm_up, decay = schedule.warmup_steps or 0, math.ceil((schedule.decay_ratio or 0) * total)
    if 0 < warm_up <= total < warm_up + decay:
        return (
            f"The warm-up takes {warm_up:,} of the run's {total:,} steps, and the decay only the {total - warm_up:,} "
            f"after it, not {decay:,}. Use a smaller warmup_steps or decay_ratio"
        )
    if not 0 < total < warm_up:
        return None
    return (
        f"The warm-up takes {warm_up:,} steps and the run {total:,}: the learning rate only rises, to "
        f"{total / warm_up:.0%} of lr. Use a smaller warmup_steps, or warmup_ratio"
    )


def _few_steps(
    config: RecipeConfig, batch: Batch, num_samples: int, description: str, unpacked: int | None
) -> str | None:
    if not num_samples:
        return f"{description}: there is nothing to train on"
    total, epochs = count_steps(config, batch, num_samples), config.train_cfg.max_epochs
    if total >= MIN_STEPS:
        return None
    steps = f"{total} optimizer step{'s' * (total > 1)}"
    why = f"{description}, global batch {batch.global_batch}, {epochs:g} epoch{'s' * (epochs != 1)}"
    ways = " or ".join(_ways(config, batch, num_samples, unpacked))
    return Text(f"This run makes only {steps} ({why}) and will learn very little. Try {ways}")


def _ways(config: RecipeConfig, batch: Batch, num_samples: int, unpacked: int | None) -> list[str]:
    """Return the options that give more steps, each with how many."""
    epoch_steps, total, ways = steps_per_epoch(config, batch, num_samples), count_steps(config, batch, num_samples), []
    unit = math.lcm(batch.ranks, config.objective.samples_a_row if config.objective.facts.generates else 1)
    smaller = max(unit, batch.global_batch // 2 ** math.ceil(math.log2(MIN_STEPS / total)) // unit * unit)
    if smaller < batch.global_batch and not splits_generation(config, smaller, batch.ranks):
        steps = count_steps(config, Batch(1, smaller // batch.ranks, batch.ranks), num_samples)
        ways.append(f"{Option('batch_size', smaller)} ({steps} steps)")
    if unpacked and steps_per_epoch(config, batch, unpacked) > epoch_steps:
        key = Key("train_dataloader.dataset.packing", False)
        ways.append(f"{key} ({count_steps(config, batch, unpacked)} steps)")
    enough = -(-MIN_STEPS // epoch_steps)
    return [*ways, f"{Option('epochs', enough)} ({enough * epoch_steps} steps)"]
