"""What `tuner train` and `tuner submit` say of a run before it starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tuner.cli.say import say

if TYPE_CHECKING:
    from tuner.launch.run import ResolvedRun


def announce(run: ResolvedRun, warnings: tuple[str, ...]) -> None:
    """Say in a few lines what is about to run, and every warning: the run's, and those of the machine."""
    why = f" ({run.level_reason})" if run.level_reason else ""
    from tuner.launch import fitting

    batch = run.batch
    memory = [f"memory: {fitting.describe(run.fit)}"] if run.fit and run.fit.fits else []
    lines = [
        f"{run.recipe.name} on {run.hardware.describe()}; {run.topology.describe()}",
        f"DeepSpeed: {run.level}{why}; {run.precision.dtype}: {run.precision.reason}",
        f"batch: {batch.micro_batch} x {batch.accumulation} x {batch.ranks} ranks = {batch.global_batch}",
        f"steps: {run.steps.describe()}",
        *memory,
        f"run directory: {run.run_path}",
        *run.notes,
        *(f"WARNING: {warning}" for warning in (*run.warnings, *warnings)),
    ]
    for line in lines:
        say(line, err=True)
