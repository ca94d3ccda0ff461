"""Run directories as training leaves them, made without training."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tests.runs.made_records import STATE, run_json
from tuner.files import dump_json
from tuner.recipes.loading import anchored, load
from tuner.recipes.recipe import Overrides
from tuner.recipes.schema import resolved_document
from tuner.runs import checkpoints
from tuner.runs.directory import RunDirectory
from tuner.runs.records import ManifestFacts, RunStatus

FACTS: dict[str, Any] = {
    "name": "mine",
    "precision": {"dtype": "bf16"},
    "deepspeed": "deepspeed_zero2",
    "seed": 7,
    "batch": {"micro_batch": 2, "accumulation": 4, "ranks": 2, "global_batch": 16},
    "hardware": {"gpus": [{"name": "H100"}, {"name": "H100"}]},
    "versions": {"tuner": "0.1.0", "torch": "2.13.0"},
}


def make_run(path: Path, name: str, base: Path | str, *pairs: tuple[str, str]) -> RunDirectory:
    """Write a run's recipe, facts and metrics; it is running and has saved nothing."""
    run = RunDirectory(path)
    run.checkpoints.mkdir(parents=True)
    recipe = load(name, Overrides(model=str(base), pairs=pairs))
    recipe = anchored(recipe, "deepspeed_zero2")
    run.recipe.write_text(recipe.standalone())
    run.resolved_recipe.write_text(dump_json(resolved_document(recipe.config)))
    run.run_json.write_text(run_json(**FACTS))
    run.write_status(RunStatus(state="running"))
    for step in (1, 2, 3):
        run.log_metrics({"step": step, "loss": 3.0 / step})
    return run


def finish(run: RunDirectory, result: Path) -> None:
    """Let a run be done, with what is in a folder as its result."""
    shutil.copytree(result, run.final)
    run.write_status(RunStatus(state="done", exit_code=0, step=3))


def checkpoint(run: RunDirectory, step: int, weights: Path) -> Path:
    """Write a sealed checkpoint with the weights in a folder."""
    folder = run.checkpoints / f"checkpoint-{step}"
    shutil.copytree(weights, folder)
    checkpoints.seal(folder, ManifestFacts(step=step, state=STATE))
    return folder
