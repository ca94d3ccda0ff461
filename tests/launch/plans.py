"""Runs resolved for machines that are not here."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.machine.gpus import CPU
from tuner.launch import render
from tuner.launch.resolve import resolve_run
from tuner.launch.resolved_run import Request, ResolvedRun
from tuner.machine.hardware import Hardware
from tuner.machine.topology import LaunchFlags
from tuner.recipes.names import identify
from tuner.recipes.recipe import Overrides
from tuner.runs import checkpoints, creation, lock
from tuner.runs.directory import RunDirectory
from tuner.runs.records import ManifestFacts

TINY = "tiny_full_sample_e1"
NOW = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC)
PATH = {"PATH": "/usr/bin:/bin"}


def made(
    *sets: str,
    recipe: str | None = TINY,
    hardware: Hardware = CPU,
    environ: Mapping[str, str] = PATH,
    now: datetime = NOW,
    flags: Mapping[str, Any] | None = None,
    model: str | None = None,
    **request: Any,
) -> ResolvedRun:
    """Return the resolved run of one request."""
    overrides = Overrides(model=model, pairs=[("--set", text) for text in sets])
    asked = Request(identify(recipe) if recipe else None, overrides, flags=LaunchFlags(**(flags or {})), **request)
    return resolve_run(asked, environ, hardware, now)


def task(rank: int, *, tasks: int = 2, **more: str) -> dict[str, str]:
    """Return the variables of one task of `srun -N1 -nTASKS` in job 7."""
    return {
        **PATH,
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": str(tasks),
        "SLURM_STEP_NODELIST": "n1",
        **more,
    }


def written_run(path: Path, *, resume: bool = False, sets: Sequence[str] = (), **request: Any) -> RunDirectory:
    """Write the directory of a planned run, as its start would. This process holds its lock."""
    return creation.create(
        path, render.files(made(*sets, work_dir=path, **request)) if not resume else {}, resume=resume
    )


def ended_run(path: Path) -> RunDirectory:
    """Write the directory of a run that was killed with a checkpoint and a line of metrics: nobody holds its lock."""
    run = written_run(path)
    run.log_metrics({"step": 500, "loss": 1.5})
    lock.release(path)
    checkpoint(path, 500)
    return run


def checkpoint(run: Path, step: int, *, valid: bool = True, **facts: Any) -> Path:
    """Save a small checkpoint in a run, with other facts than its own; an invalid one has lost a file since."""
    folder = run / "checkpoints" / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    shutil.copy(run / "recipe.py", folder)
    state = RunDirectory(run).read_run().state.to_json()
    checkpoints.seal(folder, ManifestFacts.model_validate({**state, **facts, "step": step}))
    if not valid:
        (folder / "model.safetensors").unlink()
    return folder
