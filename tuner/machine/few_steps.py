"""Whether a run takes so few optimizer steps that it teaches little, and what gives it more: arithmetic alone."""

from __future__ import annotations

import math

from tuner.machine.topology import Batch

MIN_STEPS = 30
"""Fewer optimizer steps than this teach little at the default learning rates (docs/learning.md): on 135 rows, 12 steps
reached a held-out loss of 3.70, 51 steps 3.08 and 105 steps 3.00."""

ENOUGH = 1000
"""A global batch of our choice is made smaller until a run takes as many: on 1,000 rows 1,000 steps reached a held-out
loss of 2.72, 131 steps 2.89 (docs/learning.md). On a GPU so many small steps cost minutes."""


def warning(batch: Batch, epochs: float, rows: int, description: str, *, unpacked: int | None = None) -> str | None:
    """Return that a run takes too few steps, with the arithmetic and what changes it; None if it takes enough.

    Args:
        batch: Of all ranks.
        epochs: Passes over the rows.
        rows: Those that the batch counts: packed rows, with packing.
        description: Those rows in words.
        unpacked: The samples that were packed into these rows, if any were.
    """
    if not rows:
        return f"{description}: there is nothing to train on"
    total = batch.steps(rows, epochs)
    if total >= MIN_STEPS:
        return None
    steps = f"{total} optimizer step{'s' * (total > 1)}"
    why = f"{description}, global batch {batch.global_batch}, {epochs:g} epoch{'s' * (epochs != 1)}"
    ways = " or ".join(_ways(batch, epochs, rows, unpacked))
    return f"This run makes only {steps} ({why}) and will learn very little. Try {ways}"


def _ways(batch: Batch, epochs: float, rows: int, unpacked: int | None) -> list[str]:
    """Return the options that give more steps, each with how many."""
    each, ways = batch.steps_per_epoch(rows), []
    smaller = max(batch.ranks, batch.global_batch // 2 ** math.ceil(math.log2(MIN_STEPS / batch.steps(rows, epochs))))
    smaller -= smaller % batch.ranks
    if smaller < batch.global_batch:
        steps = Batch(1, smaller // batch.ranks, batch.ranks).steps(rows, epochs)
        ways.append(f"--batch-size {smaller} ({steps} steps)")
    if unpacked and batch.steps_per_epoch(unpacked) > each:
        key = "--set train_dataloader.dataset.packing=False"
        ways.append(f"{key} ({batch.steps(unpacked, epochs)} steps)")
    enough = -(-MIN_STEPS // each)
    return [*ways, f"--epochs {enough} ({enough * each} steps)"]
