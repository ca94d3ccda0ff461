"""Measures a few fast variants of a recipe with real ranks for some steps each, and keeps the fastest.

Micro-batch, recomputation, loss and level are varied one after the other. The global batch stays, so that every
candidate trains the same. It prints nothing; estimates without measuring are in `fit.step_time`.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from math import inf
from pathlib import Path
from statistics import median

from tuner import paths
from tuner.errors import UsageError
from tuner.files import JsonObject, disk_errors, scratch_folder
from tuner.fit.candidates import TOLERANCE, best_of_levels
from tuner.fit.splits import possible_splits
from tuner.launch import pins, preflight, render, supervise
from tuner.launch.level_and_split import LevelAndSplit
from tuner.launch.pins import Pins
from tuner.launch.resolve import decide, find_machines, load_for_trial, resolve_run
from tuner.launch.resolved_run import Request, ResolvedRecipe, ResolvedRun
from tuner.machine import hardware
from tuner.progress import told
from tuner.recipes.merging import Kind, Place
from tuner.recipes.recipe import Recipe
from tuner.recipes.schema import NOT_PUSHED, OF_A_TRIAL, RecipeConfig, Split
from tuner.recipes.schema.architecture import VARLEN
from tuner.runs import creation, metrics
from tuner.runs.causes import GPU_MEMORY, HOST_MEMORY
from tuner.runs.records import RunStatus
from tuner.zero import choice, presets
from tuner.zero.config import BASE

_ROWS_A_SAMPLE = 32
"""Rows to read for each packed row of a step; if they are too few, the steps repeat them."""
_GRACE_S = 10.0
_OUT_OF_MEMORY = (GPU_MEMORY, HOST_MEMORY)


@dataclass(frozen=True)
class Candidate:
    """One way to compute the same steps. `level` is a preset, 'none', or the name of the user's config.

    `changes`: values that override the preset. `kernels`: values of `model` that differ from the choice of `auto`.
    """

    split: Split
    level: str
    loss: str
    changes: Mapping[str, object] = field(default_factory=dict)
    kernels: Mapping[str, object] = field(default_factory=dict)

    @property
    def pins(self) -> Pins:
        """What this candidate decides in place of the plan."""
        values: dict[str, object] = {
            "train_dataloader.batch_size": self.split.micro_batch,
            "optim_wrapper.accumulative_counts": self.split.accumulation,
            "train_cfg.gradient_checkpointing": self.split.recompute,
            "train_cfg.recomputed_layers": self.split.recomputed_layers,
            "train_cfg.loss": self.loss,
            **{f"model.{key}": value for key, value in self.kernels.items()},
        }
        return Pins("tuner tune", values, self.level if self.level in presets.names() else None)


@dataclass(frozen=True)
class Measured:
    """The measurement of a candidate: speed of all ranks and peak memory of one rank, or the reason of its failure.

    `exit_code` is the exit code of its ranks.
    """

    candidate: Candidate
    tokens_per_second: float | None = None
    peak_bytes: int | None = None
    failure: str = ""
    exit_code: int = 0


class _Interrupted(Exception):
    """The user has stopped the measurement."""


@dataclass
class Tuned:
    """All measurements, in order. `original` is the recipe as it was, `path` the file for the fastest one."""

    original: Recipe
    path: Path
    ranks: int
    measured: list[Measured]
    is_whole: bool = True
    """Every candidate was measured: there was no interrupt and enough time."""
    was_interrupted: bool = False

    @property
    def fastest(self) -> Measured | None:
        """The fastest candidate that ran."""
        ran = [measured for measured in self.measured if measured.tokens_per_second]
        return max(ran, key=lambda measured: measured.tokens_per_second or 0.0, default=None)

    @property
    def exit_code(self) -> int:
        """0 if a candidate ran, else the exit code of the first one."""
        if self.was_interrupted:
            return 130
        return 0 if self.fastest or not self.measured else self.measured[0].exit_code

    def recipe(self) -> Recipe:
        """Return the recipe with the values of the fastest candidate; nothing else differs."""
        assert self.fastest is not None
        candidate = self.fastest.candidate
        fastest = pins.laid_on(self.original, [candidate.pins])
        if level := candidate.pins.level:
            pinned = {BASE: level, **candidate.changes} if candidate.changes else level
            fastest = replace(fastest, config=fastest.config.with_values({"deepspeed": pinned}))
        return choice.without_catalog(fastest)


def tune(
    request: Request,
    environ: Mapping[str, str],
    tell: Callable[[Measured], None],
    *,
    steps: int,
    minutes: float,
    output: Path | None = None,
) -> Tuned:
    """Measure a recipe's candidates on this machine, in a scratch folder that is removed at the end.

    Args:
        steps: Steps of each candidate; the first step is not measured.
        minutes: No candidate starts after this time.
        output: File for the fastest recipe. None: RECIPE_tuned.py.
        tell: Is called with each measurement.

    Raises:
        TunerError: the recipe is wrong or cannot run on this machine, or the output cannot be written.
    """
    recipe = load_for_trial(request)
    path = paths.new_file(output, f"{recipe.name}_tuned", "--output", ".py")
    machines = find_machines(recipe, request, environ, hardware.detect(environ))
    if machines.topology.num_nodes > 1:
        raise UsageError("it measures on one machine", where="the number of nodes", fix="Remove --nnodes.")
    base = decide(recipe, request.deepspeed, machines)
    told(*(f"WARNING: {warning}" for warning in base.recipe.warnings))
    tuned, home = Tuned(recipe, path, machines.topology.world_size, []), Path(tempfile.gettempdir())
    try:
        with (
            disk_errors(home, "Free space, or set TMPDIR to a folder on another disk."),
            scratch_folder(home, "tuner-tune-") as scratch,
        ):
            bench, started = _Bench(request, base, scratch, environ, steps), time.monotonic()
            for candidate in candidates(base, tuned, request.deepspeed):
                # The first is always measured: the others are compared with it.
                if tuned.measured and time.monotonic() - started > 60 * minutes:
                    tuned.is_whole = False
                    break
                tuned.measured.append(bench.measure(candidate))
                tell(tuned.measured[-1])
    except (KeyboardInterrupt, _Interrupted):
        tuned.was_interrupted, tuned.is_whole = True, False
    return tuned


def candidates(base: ResolvedRecipe, tuned: Tuned, deepspeed: str | None = None) -> Iterator[Candidate]:
    """Yield the candidates to measure: the plan's own choice, other splits, loss, kernels, then other levels.

    Splits and levels are those that the plan compares, some recomputed layers included. Each level comes with its own
    best split by the plan; loss and kernels vary the fastest candidate so far. Micro-batches larger than one that ran
    out of memory are skipped.

    Args:
        tuned: The measurements of the candidates so far.
        deepspeed: The value of `--deepspeed`.
    """
    config = base.recipe.config
    first = Candidate(config.split, base.level, config.train_cfg.loss, base.document.changes)
    yield first
    undecided = _with_auto_split(base)
    plan = decide(undecided, deepspeed, base.machines, compares=True).level_and_split
    for split in _splits(plan, undecided.config, base):
        if split != first.split and not _is_hopeless(split, tuned.measured):
            yield replace(first, split=split)
    best = tuned.fastest.candidate if tuned.fastest else first
    if config.objective.facts.can_chunk_logits:
        yield replace(best, loss="chunked" if best.loss == "whole" else "whole")
    for kernels in _kernels(config):
        best = tuned.fastest.candidate if tuned.fastest else first
        yield replace(best, kernels={**best.kernels, **kernels})
    best = tuned.fastest.candidate if tuned.fastest else first
    if base.topology.world_size > 1 and best.level in presets.names():
        for level, split in _levels(plan, best):
            yield replace(best, level=level, split=split)


def _with_auto_split(base: ResolvedRecipe) -> Recipe:
    """Return the recipe with a split of "auto" and the same global batch."""
    values = {
        "train_dataloader.batch_size": "auto",
        "optim_wrapper.accumulative_counts": "auto",
        "train_cfg.gradient_checkpointing": "auto",
        "train_cfg.recomputed_layers": "auto",
        "train_cfg.global_batch_size": base.batch.global_batch,
    }
    return base.recipe.settled(values, Place(Kind.DERIVED, "tuner tune"))


def _splits(plan: LevelAndSplit, undecided: RecipeConfig, base: ResolvedRecipe) -> list[Split]:
    """Return every split of the same global batch that fits in memory by the plan; all where that is not known."""
    every = possible_splits(undecided, base.batch.ranks)
    if plan.compared:
        of_level = [candidate for candidate in plan.compared.candidates if candidate.level == base.level]
        every = [candidate.split for candidate in of_level if candidate.fit.room >= -TOLERANCE]
    return sorted(every, key=lambda split: (_again(split), split.micro_batch))


def _kernels(config: RecipeConfig) -> Iterator[dict[str, object]]:
    """Yield each GPU kernel switched off: the default kernels are exact, but not always the fastest."""
    model = config.model
    if model.use_liger_kernel is True:
        yield {"use_liger_kernel": False}
    if str(model.attn_implementation).startswith(("flash_attention", VARLEN)):
        yield {"attn_implementation": "sdpa"}


def _levels(plan: LevelAndSplit, best: Candidate) -> Iterator[tuple[str, Split]]:
    """Yield the other presets without offloading, each with its best split by the plan.

    Where the memory is not known, each has the fastest split so far.
    """
    in_memory = [rung.name for rung in presets.rungs() if rung.stage and not rung.offloaded]
    other_levels = [name for name in in_memory if name != best.level and name not in plan.refused]
    compared = plan.of_presets or plan.compared
    if compared is None:
        yield from ((name, best.split) for name in other_levels)
        return
    for level in best_of_levels([candidate for candidate in compared.candidates if candidate.level in other_levels]):
        if level.fit.room >= -TOLERANCE:
            yield level.level, level.split


def _is_hopeless(split: Split, measured: list[Measured]) -> bool:
    failed = [measurement.candidate.split for measurement in measured if measurement.failure == "out of memory"]
    return any(other.micro_batch <= split.micro_batch and _again(other) >= _again(split) for other in failed)


def _again(split: Split) -> float:
    """Return how many layers are computed again; all of them are more than any number."""
    if not split.recompute:
        return 0
    return inf if split.recomputed_layers is None else split.recomputed_layers


class _Bench:
    """Runs candidates one after the other, each in its own run directory, which is removed afterwards."""

    def __init__(
        self, request: Request, base: ResolvedRecipe, scratch: Path, environ: Mapping[str, str], steps: int
    ) -> None:
        self.request, self.base, self.scratch, self.environ, self.steps = request, base, scratch, environ, steps
        self.num_runs = 0

    def measure(self, candidate: Candidate) -> Measured:
        """Train some steps and return their speed."""
        self.num_runs += 1
        run = self._resolved(candidate)
        if self.num_runs == 1:
            preflight.check(run)
        files = creation.create(run.run_path, render.files(run), resume=False)
        # The row of the candidate has the failure.
        code = supervise.run_ranks(run, files, shows_rank_0=False, tells_failure=False)
        status = files.read_status()
        if status.signal:
            raise _Interrupted
        lines = metrics.every_line(files)
        shutil.rmtree(files.path, ignore_errors=True)
        if code:
            return Measured(candidate, failure=_failure(status, code), exit_code=code)
        return _of_lines(candidate, lines)

    def _resolved(self, candidate: Candidate) -> ResolvedRun:
        short = for_some_steps(self.base.recipe.config, self.steps, self.base.batch.ranks)
        recipe = replace(self.base.recipe, config=short)
        request = self.request._replace(
            pins=(candidate.pins,),
            work_dir=self.scratch / f"run-{self.num_runs}",
            ignore_fit=True,
            grace_s=_GRACE_S,
            saves_result=False,
        )
        return resolve_run(request, self.environ, self.base.hardware, datetime.now().astimezone(), recipe=recipe)


def for_some_steps(config: RecipeConfig, steps: int, ranks: int) -> RecipeConfig:
    """Return the recipe for `steps` steps only, without validation, checkpoints and trackers."""
    values = config.model_dump()
    rows = values["train_dataloader"]["dataset"]
    max_rows = config.split.samples * ranks * steps * (_ROWS_A_SAMPLE if rows["packing"] else 1)
    rows |= {"max_rows": min(rows["max_rows"] or max_rows, max_rows), "val_split": None, "val_seed": None}
    values["val_dataloader"] = None
    values["train_cfg"] |= {"max_steps": steps, "val_interval": None, "early_stopping_patience": None}
    values["checkpoint"] |= {"interval": steps + 1, "max_keep_ckpts": 1, "save_best": None, **NOT_PUSHED}
    values["log"] |= OF_A_TRIAL
    return RecipeConfig.model_validate(values)


def _failure(status: RunStatus, code: int) -> str:
    if status.diagnosis and status.diagnosis.cause in _OUT_OF_MEMORY:
        return "out of memory"
    first, *_ = [*(status.message or "").splitlines(), "it failed"]
    return f"{first} ({code})"


def _of_lines(candidate: Candidate, lines: list[JsonObject]) -> Measured:
    """Return the median speed of all steps but the first, which includes compilation and warm-up."""
    steps = [line for line in lines if "tokens_per_second" in line]
    speeds = [line["tokens_per_second"] for line in steps[1:]]
    if not speeds:
        return Measured(candidate, failure="too few steps")
    return Measured(candidate, median(speeds), max((line["memory_bytes"] for line in steps), default=None))
