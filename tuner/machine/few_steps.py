"""Whether a run takes so few optimizer steps that it teaches little, and what gives it more.

Arithmetic alone: who knows the number of rows says what they are.
"""

from __future__ import annotations

from tuner.machine.topology import Batch

MIN_STEPS = 10
"""Fewer optimizer steps than this are a look at the data, no training: a warm-up and a course need some to act on."""

ENOUGH = 100
"""A global batch of our choice is made smaller until a run takes as many (docs/plan.md)."""


def warning(
    batch: Batch, epochs: int, rows: int, told: str, *, warmup_ratio: float, unpacked: int | None = None
) -> str | None:
    """Return that a run takes too few steps, with the arithmetic and what changes it; None where it takes enough.

    Args:
        batch: Of all ranks.
        epochs: Passes over the rows.
        rows: What the batch counts: packed rows, with packing.
        told: Those rows in words, as the subject of the message.
        warmup_ratio: The part of all steps that the learning rate rises in.
        unpacked: The samples that packing made these rows of; None where it packs none.
    """
    if not rows:
        return f"{told}: there is nothing to train on"
    total = batch.steps_per_epoch(rows) * epochs
    if total >= MIN_STEPS:
        return None
    warmup = warmup_ratio * total
    short = f"; a warm-up of {warmup_ratio:.0%} is less than one step" if 0 < warmup < 1 else ""
    told = f"{told}, global batch {batch.global_batch}, {epochs} epoch{'s' * (epochs > 1)}"
    steps = f"{total} optimizer step{'s' * (total > 1)}"
    ways = _ways(batch, epochs, rows, unpacked)
    return f"{told}: {steps}, too few to learn from{short}. More: {', or '.join(ways)}"


def _ways(batch: Batch, epochs: int, rows: int, unpacked: int | None) -> list[str]:
    """Return the overrides that give more steps, each with how many."""
    each, ways = batch.steps_per_epoch(rows), []
    single = batch._replace(accumulation=1).steps_per_epoch(rows)
    if single > each:
        # Both: alone, accumulation of a recipe whose split is 'auto' would be of micro-batches of 1.
        size = f"--set train_dataloader.batch_size={batch.micro_batch} " if batch.micro_batch > 1 else ""
        ways.append(f"{size}--set accumulative_counts=1 ({single * epochs} steps)")
    if unpacked and batch.steps_per_epoch(unpacked) > each:
        key = "--set train_dataloader.dataset.packing=False"
        ways.append(f"{key} ({batch.steps_per_epoch(unpacked) * epochs} steps)")
    enough = -(-MIN_STEPS // each)
    return [*ways, f"--set max_epochs={enough} ({enough * each} steps)"]
