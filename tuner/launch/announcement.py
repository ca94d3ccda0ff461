"""What is said of a run before it starts: a few lines for a person, and every warning. It prints nothing."""

from __future__ import annotations

from collections.abc import Iterable

from tuner.launch import fitting
from tuner.launch.run import ResolvedRun


def announcement(run: ResolvedRun, warnings: Iterable[str]) -> list[str]:
    """Return the lines about what is about to run, and its warnings: the run's own, and `warnings` of the machine."""
    why = f" ({run.level_reason})" if run.level_reason else ""
    batch, shared_by = run.batch, run.recipe.config.train_cfg.sequence_parallel_size
    ranks = f"{batch.ranks} groups of {shared_by} ranks" if shared_by > 1 else f"{batch.ranks} ranks"
    memory = [f"memory: {fitting.describe(run.fit)}"] if run.fit and run.fit.fits else []
    return [
        f"{run.recipe.name} on {run.hardware.describe()}; {run.topology.describe()}",
        f"DeepSpeed: {run.level}{why}; {run.precision.dtype}: {run.precision.reason}",
        f"batch: {batch.micro_batch} x {batch.accumulation} x {ranks} = {batch.global_batch}",
        f"steps: {run.steps.describe()}",
        *memory,
        f"run directory: {run.run_path}",
        *run.notes,
        *(f"WARNING: {warning}" for warning in (*run.warnings, *warnings)),
    ]
