"""Run directories as a start leaves them, without the start."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from tests.machine.gpus import CPU
from tuner.launch import render
from tuner.launch.resolve import resolve_run
from tuner.launch.resolved_run import Request
from tuner.machine.hardware import Hardware
from tuner.recipes.names import identify
from tuner.recipes.recipe import Overrides
from tuner.runs import creation


def make_run(path: Path, recipe: str, deepspeed: str, *sets: str, hardware: Hardware = CPU) -> Path:
    """Write what `tuner train RECIPE --deepspeed X --work-dir PATH` writes before its ranks start."""
    overrides = Overrides(pairs=[("--set", text) for text in sets])
    request = Request(identify(recipe), overrides, deepspeed, work_dir=path)
    made = resolve_run(request, {}, hardware, datetime.now().astimezone())
    creation.create(made.run_path, render.files(made), resume=False)
    return path
