"""A run of the package's small recipes, of which this process is the only rank."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuner.launch.resolved_run import ResolvedRun
    from tuner.machine.topology import Rank
    from tuner.runs.directory import RunDirectory


def made_run(
    method: str, model: Path, folder: Path, level: str, sets: dict[str, Any]
) -> tuple[ResolvedRun, RunDirectory, Rank]:
    """Decide and create a run with a model, set this process's variables for it, and return it with the rank."""
    from tuner.launch import render
    from tuner.launch.resolve import resolve_run
    from tuner.launch.resolved_run import Request
    from tuner.machine import hardware
    from tuner.machine.topology import LaunchFlags, Rank
    from tuner.recipes.names import identify
    from tuner.recipes.recipe import Overrides
    from tuner.runs import creation

    request = Request(
        identify(f"tiny_{method}_sample_e1"),
        Overrides(model=str(model), pairs=[("--set", f"{key}={value}") for key, value in sets.items()]),
        deepspeed=level,
        flags=LaunchFlags(launcher="none"),
        work_dir=folder,
        ignore_fit=True,
    )
    environ = {name: os.environ[name] for name in ("PATH", "HOME", "HF_HOME") if name in os.environ}
    made = resolve_run(request, environ, hardware.detect({"CUDA_VISIBLE_DEVICES": ""}), datetime.now().astimezone())
    os.environ |= render.environment(made)
    return made, creation.create(made.run_path, render.files(made), resume=False), Rank(0, 0, 1, True)
