"""What a user asks for, and what it was resolved to, as data: `resolve_recipe` and `resolve` make it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from tuner.fit.levels import Fit
from tuner.launch.steps import Steps
from tuner.machine.hardware import Hardware
from tuner.machine.topology import Batch, LaunchFlags, Topology
from tuner.recipes.recipe import Overrides, Recipe
from tuner.runs.checkpoints import Checkpoint
from tuner.runs.resume_point import ResumePoint
from tuner.zero.final_config import FinalConfig
from tuner.zero.jsonfile import Document
from tuner.zero.precision import Precision


class Request(NamedTuple):
    """What the user asked for."""

    recipe: str | None
    overrides: Overrides = Overrides()
    deepspeed: str | None = None
    flags: LaunchFlags = LaunchFlags()
    work_dir: Path | None = None
    resume: str | None = None
    resume_weights: bool = False
    allow_code: bool = False
    ignore_fit: bool = False
    command: tuple[str, ...] = ()
    on_oom: str = "stop"
    max_restarts: int = 0
    attempts: tuple[dict[str, Any], ...] = ()
    """What ended the earlier attempts of this start, with --on-oom retry or --max-restarts."""
    grace_s: float = 300.0
    """What ranks that are told to stop have, to finish the step and save, before they are killed."""
    bind_cores: bool = False
    """Each rank is bound to its share of its node's cores."""
    saves_result: bool = True
    """False of a measurement, whose trained model nobody wants: it may be many gigabytes."""
    prints_events: bool = False
    """Standard output gets one JSON object for each thing that happens, in place of what rank 0 prints."""
    output: TextIO | None = None
    """Where what rank 0 prints is shown: the stream of a notebook's cell. None: standard output's descriptor."""
    on_event: Callable[[dict[str, Any]], None] | None = None
    """Gets each thing that happens in the run, as `train --json` prints it."""


class Start(NamedTuple):
    """Where a run starts. Without a checkpoint it starts from the beginning."""

    run_path: Path
    checkpoint: Checkpoint | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ResolvedRecipe:
    """A recipe on machines; `level_reason` says why `auto` took this level, None where it was named.

    Args:
        document: The DeepSpeed config as it was chosen.
        final: The one that training uses.
        fit: None without a GPU, or where the model's size is not known.
    """

    recipe: Recipe
    topology: Topology
    hardware: Hardware
    batch: Batch
    precision: Precision
    document: Document
    final: FinalConfig
    level: str
    level_reason: str | None
    fit: Fit | None
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class ResolvedRun(ResolvedRecipe):
    """What would run: --dry-run prints it, and without --dry-run it is started.

    Args:
        environ: The variables of this process; they may hold secrets, and none is written down.
        recipe_as_run: The recipe that anybody can run again: with absolute paths, and the DeepSpeed config by value.
        run_path: The run directory.
        is_known_run: It is that of an earlier attempt, with which this one goes on.
        resume: None of a run that starts new, or again.
        state: What this run's checkpoints are made of: see `resolve._state`.
        launch_id: Tells this launch from earlier ones in the same directory; the same for all its tasks and nodes.
        notes: What to say of the recipe and of what it goes on from.
    """

    request: Request
    environ: Mapping[str, str] = field(repr=False)
    recipe_as_run: Recipe
    steps: Steps
    run_path: Path
    is_known_run: bool
    resume: ResumePoint | None
    state: Mapping[str, Any]
    started: datetime
    launch_id: str
    notes: tuple[str, ...]


def is_already_started(run_path: Path, topology: Topology) -> bool:
    """Return whether the leader may have written the run directory, or half of it, before this task or node looks."""
    return not topology.leads and run_path.is_dir()


def batch_settings(recipe: Recipe) -> dict[str, int | str]:
    """Return the batch as a recipe sets it, for the manifest of a checkpoint."""
    config = recipe.config
    whole = config.train_cfg.global_batch_size
    return {
        "micro_batch": config.train_dataloader.batch_size,
        "accumulation": config.optim_wrapper.accumulative_counts,
        **({"asked_global_batch": whole} if isinstance(whole, int) else {}),
    }
