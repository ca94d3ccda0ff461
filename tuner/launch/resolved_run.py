"""The data of a launch: a user's `Request`, and the `ResolvedRun` that `launch.resolve` makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, TextIO

from tuner.files import JsonObject
from tuner.fit.levels import Fit
from tuner.launch.level_and_split import LevelAndSplit
from tuner.launch.machines import RunMachines
from tuner.launch.pins import Pins
from tuner.launch.steps import Steps
from tuner.machine.hardware import Hardware, Precision
from tuner.machine.topology import Batch, LaunchFlags, Topology
from tuner.recipes.names import Name
from tuner.recipes.recipe import Overrides, Recipe
from tuner.runs.checkpoints import Checkpoint
from tuner.runs.records import Attempt, BatchSettings, CheckpointState
from tuner.runs.resume_point import ResumePoint
from tuner.zero.config import Document, FinalConfig


class Request(NamedTuple):
    """What the user asked for."""

    recipe: Name | None
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
    pins: tuple[Pins, ...] = ()
    """Decisions that are made already: each replaces the choice of a stage."""
    attempts: tuple[Attempt, ...] = ()
    """How the earlier attempts of this start ended, with --on-oom retry or --max-restarts."""
    state_on_all_nodes: CheckpointState | None = None
    """Set in a plan for fewer nodes (`--nnodes MIN:MAX`): the state of checkpoints of the plan for all nodes."""
    grace_s: float = 300.0
    """Seconds for ranks that are told to stop: to finish the step and save, before they are killed."""
    start_timeout_s: float = 600.0
    """Seconds that a start waits for the other nodes."""
    bind_cores: bool = False
    """Bind each rank to its share of the node's cores."""
    saves_result: bool = True
    """False for a measurement: its model is not used, and may be many gigabytes."""
    prints_events: bool = False
    """Print one JSON object for each event on standard output, instead of the output of rank 0."""
    output: TextIO | None = None
    """The stream for the output of rank 0, such as that of a notebook's cell. None: standard output's descriptor."""
    on_event: Callable[[JsonObject], None] | None = None
    """Called with each event of the run, as `train --json` prints it."""


class Start(NamedTuple):
    """Where a run starts. Without a checkpoint it starts from the beginning."""

    run_path: Path
    checkpoint: Checkpoint | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ResolvedRecipe:
    """Everything that is decided about a recipe on machines.

    Args:
        level_and_split: The level, the split and the loss, and why.
        final: The DeepSpeed config that training uses.
        data_warnings: Those of the warnings that are about the rows.
    """

    recipe: Recipe
    machines: RunMachines
    batch: Batch
    precision: Precision
    level_and_split: LevelAndSplit
    final: FinalConfig
    warnings: tuple[str, ...]
    data_warnings: tuple[str, ...]

    @property
    def topology(self) -> Topology:
        return self.machines.topology

    @property
    def hardware(self) -> Hardware:
        return self.machines.hardware

    @property
    def document(self) -> Document:
        """The DeepSpeed config that was chosen."""
        return self.level_and_split.document

    @property
    def level(self) -> str:
        """The preset, or the name of the user's config."""
        return self.document.preset or self.document.name

    @property
    def fit(self) -> Fit | None:
        """The memory that the run needs; None without a GPU, or if the model's size is not known."""
        return self.level_and_split.fit


@dataclass(frozen=True)
class ResolvedRun(ResolvedRecipe):
    """Everything about one run: --dry-run prints it, a start executes it.

    Args:
        environ: The variables of this process. They may hold secrets and are never written to a file.
        recipe_as_run: The recipe to run again anywhere: with absolute paths, and the values of the DeepSpeed config.
        is_known_run: Whether the directory is that of a run that this one resumes.
        resume: The checkpoint to resume from; None for a run that starts from the beginning.
        state: The facts that decide which runs can load this run's checkpoints.
        launch_id: Differs from that of earlier launches in the same directory; equal for all tasks and nodes of one.
        notes: Lines about the recipe and about what the run resumes from.
    """

    request: Request
    environ: Mapping[str, str] = field(repr=False)
    recipe_as_run: Recipe
    steps: Steps
    run_path: Path
    is_known_run: bool
    resume: ResumePoint | None
    state: CheckpointState
    started: datetime
    launch_id: str
    notes: tuple[str, ...]


def batch_settings(recipe: Recipe) -> BatchSettings:
    """Return the batch as a recipe sets it, for the manifest of a checkpoint."""
    config = recipe.config
    micro_batch, accumulation = config.train_dataloader.batch_size, config.optim_wrapper.accumulative_counts
    settings = BatchSettings(micro_batch=micro_batch, accumulation=accumulation)
    asked_batch = config.train_cfg.global_batch_size
    return settings.model_copy(update={"asked_global_batch": asked_batch}) if isinstance(asked_batch, int) else settings
