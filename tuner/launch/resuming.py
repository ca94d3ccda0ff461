"""Where a run starts or goes on: the run directory, the checkpoint of --resume, and what the recipe may change.

It reads checkpoints; a start first puts back what a kill left beside its place. `runs.resume_point` knows how a
checkpoint's state moves to other ranks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from tuner.errors import DiskError, Option, RecipeError, RunDirectoryError, Text, TunerError, UsageError
from tuner.fit.splits import data_parallel_ranks, samples_of_rank
from tuner.launch import pins
from tuner.launch.pins import Pins
from tuner.launch.resolved_run import Request, Start, batch_settings
from tuner.machine.topology import Topology
from tuner.recipes import loading, trust
from tuner.recipes.merging import Difference, Origin, Section, differences
from tuner.recipes.recipe import Recipe
from tuner.recipes.schema import GLOBAL_BATCH, LOADERS, RecipeConfig
from tuner.recipes.schema.architecture import UNTRIED
from tuner.runs import checkpoints, creation, directory, lock
from tuner.runs.checkpoints import Checkpoint
from tuner.runs.directory import RunDirectory
from tuner.runs.records import CheckpointState
from tuner.runs.resume_point import ResumePoint, resume_from, why_not_redistributed
from tuner.zero import choice, presets
from tuner.zero.choice import is_auto
from tuner.zero.config import FinalConfig

_MICRO, _ACCUMULATION = "train_dataloader.batch_size", "optim_wrapper.accumulative_counts"
WORK_DIRS = Path("work_dirs")


def find_start(request: Request, name: str, topology: Topology, now: datetime, *, starts: bool = False) -> Start:
    """Return where a run starts or goes on: its directory, and the checkpoint of --resume.

    Args:
        request: --resume is a checkpoint, a run directory, or auto.
        topology: Which process this is. Other tasks and nodes may find what their leader has begun to write. In a job
            of Slurm the leader alone reads every byte of a checkpoint; the other tasks compare the sizes of its files.
        now: The time of the start, for the name of a new directory.
        starts: The run begins next, and is no plan.

    Raises:
        RunDirectoryError: the directory is taken, or there is no valid checkpoint.
    """
    home, work_dir = WORK_DIRS / name, request.work_dir
    fresh = (work_dir or home / _default_name(topology, now)).absolute()
    if request.resume is None:
        return _new(fresh, topology, is_named=work_dir is not None)
    if request.resume == "auto":
        known_run = fresh if work_dir or topology.job else directory.newest_run(home.absolute())
        if known_run and starts:
            _put_back(known_run)
        return _auto(known_run, home, fresh, topology)
    named_path, target = Path(request.resume).absolute(), _target(request, fresh)
    if starts:
        _put_back(_owner(named_path))
    checkpoint, passed_over = _checkpoint_at(named_path, hashes=_verifies(topology))
    creation.check_free(target, resume=target == _owner(named_path) or _is_already_started(target, topology))
    return _resumed(target, checkpoint, passed_over)


def started_again(request: Request, name: str, topology: Topology, now: datetime) -> Request:
    """Return the request of a node 0 that is started again: it goes on in the run that the same command has begun."""
    fresh = (request.work_dir or WORK_DIRS / name / _default_name(topology, now)).absolute()
    target = _target(request, fresh)
    record = RunDirectory(target).run_or_none
    if record is None or record.command != list(request.command):
        return request
    return request._replace(work_dir=target, resume="auto")


def _target(request: Request, fresh: Path) -> Path:
    """Return the run directory: a new one, or that of the run, or of the checkpoint, that is named."""
    if request.work_dir or request.resume in (None, "auto"):
        return fresh
    owner = _owner(Path(request.resume).absolute())
    return owner if directory.is_run(owner) else fresh


def _owner(folder: Path) -> Path:
    """Return the run that a run directory or one of its checkpoints belongs to."""
    return folder if directory.is_run(folder) else folder.parent.parent


def _new(fresh: Path, topology: Topology, *, is_named: bool) -> Start:
    if not is_named and not topology.is_shared:  # a run of the same second may have the directory
        names = (fresh, *(fresh.with_name(f"{fresh.name}_{number}") for number in range(2, 100)))
        fresh = next((path for path in names if not path.exists()), fresh)
    creation.check_free(fresh, resume=_is_already_started(fresh, topology))
    return Start(fresh)


def _default_name(topology: Topology, now: datetime) -> str:
    """Return the name of a new run directory; every task of a job and every node computes the same."""
    if topology.job:
        return f"slurm-{topology.job}"
    if topology.is_shared:
        who = "nodes" if topology.is_supervised else topology.launcher
        return f"{who}-{topology.master_addr}-{topology.master_port}"
    return f"{now:%Y%m%d_%H%M%S}"


def _is_already_started(run_path: Path, topology: Topology) -> bool:
    """Return whether the leader may have written the run directory, or half of it, before this task or node looks."""
    return not topology.leads and run_path.is_dir()


def _verifies(topology: Topology) -> bool:
    # Without a job's number each process chooses for itself, and the choice is a part of the launch's id.
    return topology.leads or topology.job is None


def _checkpoint_at(folder: Path, *, hashes: bool) -> tuple[Checkpoint, list[str]]:
    """Return a checkpoint, or the newest valid one of a run directory, and a line for each newer one."""
    if not directory.is_run(folder):
        return checkpoints.require_valid(folder, hashes=hashes), []
    newest, passed_over = checkpoints.newest_valid(folder / "checkpoints", hashes=hashes)
    if newest is None:
        fix = " ".join((*(f"{line}." for line in passed_over), f"Start a new run without {Option('resume')}."))
        raise RunDirectoryError(f"{folder} has no valid checkpoint", where=Option("resume"), fix=fix)
    return newest, passed_over


def _put_back(run_path: Path) -> None:
    """Put whole checkpoints in their places. Every task of a launch does so before it chooses one: all choose alike."""
    if directory.is_run(run_path) and lock.in_use(run_path, lock.Holder.here({})) is None:
        checkpoints.put_back(RunDirectory(run_path).checkpoints)


def _auto(known_run: Path | None, home: Path, fresh: Path, topology: Topology) -> Start:
    if known_run is None or not directory.is_run(known_run):
        creation.check_free(fresh, resume=_is_already_started(fresh, topology))
        note = Text(f"{Option('resume', 'auto')}: there is no earlier run here, so a new one starts.")
        return Start(fresh, None, (note,))
    run_dir = RunDirectory(known_run)
    newest, passed_over = checkpoints.newest_valid(run_dir.checkpoints, hashes=_verifies(topology))
    if newest:
        return _resumed(known_run, newest, passed_over)
    if not passed_over:
        _refuse_lost(run_dir)
    record = run_dir.run_or_none
    if record and record.resume and Path(record.resume).parent != run_dir.checkpoints:  # it began with another's
        began_with = checkpoints.require_valid(Path(record.resume), hashes=_verifies(topology))
        return _resumed(known_run, began_with, passed_over)
    if passed_over:
        another = f"Start a new run with another {Option('work_dir')}."
        fix = " ".join((*(f"{line}." for line in passed_over), another))
        raise RunDirectoryError(f"{known_run} has no valid checkpoint", where=Option("resume", "auto"), fix=fix)
    hint = _beside(known_run) if known_run.parent == home.absolute() else ""
    note = Text(f"{Option('resume', 'auto')}: {known_run} never saved a checkpoint, so it starts anew.{hint}")
    return Start(known_run, None, (note,))


def _refuse_lost(run_dir: RunDirectory) -> None:
    """Refuse to begin a run again if its checkpoints cannot be read, or were removed after it had saved some."""
    if os.path.lexists(run_dir.checkpoints) and not os.access(run_dir.checkpoints, os.R_OK | os.X_OK):
        fix = f"Make it readable, or start a new run with another {Option('work_dir')}."
        raise DiskError(f"{run_dir.checkpoints} cannot be read", where=Option("resume", "auto"), fix=fix)
    state = run_dir.read_status().state if run_dir.status.is_file() else None
    if state in ("done", "stopped") or (run_dir.checkpoints / checkpoints.LATEST).is_file():
        message = f"{run_dir.path} saved checkpoints, but none is left: it would start from the beginning"
        fix = f"Restore one, or start a new run with another {Option('work_dir')}."
        raise RunDirectoryError(message, where=Option("resume", "auto"), fix=fix)


def _beside(run_path: Path) -> str:
    """Return a hint at another run of the recipe that has a checkpoint: this run may have been started by mistake."""
    siblings = sorted(run_path.parent.iterdir(), reverse=True)
    other_runs = (path for path in siblings if path != run_path and directory.is_run(path))
    other = next((path for path in other_runs if checkpoints.newest_first(path / "checkpoints")), None)
    return f" {other} has a checkpoint: {Option('resume', str(other))} resumes from it." if other else ""


def _resumed(target: Path, checkpoint: Checkpoint, passed_over: list[str]) -> Start:
    return Start(target, checkpoint, (*passed_over, f"Resuming from {checkpoint.path}."))


def all_pins(request: Request, recipe: Recipe, checkpoint: Checkpoint | None, topology: Topology) -> tuple[Pins, ...]:
    """Return the pins of a request, and what a checkpoint decides: padding, validation rows, batch, level.

    Args:
        recipe: Before anything is decided.
        checkpoint: None for a run that starts from the beginning.

    Raises:
        RecipeError: the recipe now asks for another global batch than it did.
        RunDirectoryError: this number of ranks cannot share the global batch evenly.
    """
    if checkpoint is None and request.state_on_all_nodes is None:
        return request.pins
    recipe = choice.with_tensor_parallel(pins.laid_on(recipe, request.pins), request.deepspeed)
    ranks = data_parallel_ranks(recipe.config, topology.world_size)
    if checkpoint is None:
        kept_batch = _kept_batch(recipe, request.state_on_all_nodes, ranks, "--nnodes")
        return (*request.pins, *filter(None, [kept_batch]))
    saved = checkpoint.facts.state
    kept = (
        _kept_batch(recipe, saved, ranks, Option("resume")),
        _kept_padding(recipe, checkpoint),
        _kept_share(recipe, checkpoint),
        None if pins.of_level(request.pins) else kept_level(request, recipe, saved),
    )
    return (*request.pins, *filter(None, kept))


def kept_level(request: Request, recipe: Recipe, saved: CheckpointState | None) -> Pins | None:
    """Pin the level of a checkpoint, unless the user has named one: no other ZeRO stage loads its states."""
    level = saved.deepspeed if saved and is_auto(recipe, request.deepspeed) else None
    return Pins("the level of the checkpoint", level=level) if level in presets.names() else None


def _kept_padding(recipe: Recipe, checkpoint: Checkpoint) -> Pins | None:
    """Pin that rows are not packed if the trial before the checkpoint's run ended so: it is not tried again.

    `packs_with` is `UNTRIED` until the trial, then the attention that keeps samples apart, or None. A trial that ended
    with packing is made again: the libraries may be of other versions by now.
    """
    if recipe.config.model.packs_with != UNTRIED or not checkpoint.recipe.is_file():
        return None
    packed = [f"{key}.dataset.packing" for key, loader in recipe.config.loaders.items() if loader.dataset.packing]
    is_typed = any(recipe.origins[key].place.is_users for key in packed)
    if is_typed or loading.load(str(checkpoint.recipe)).config.model.packs_with:
        return None
    reason = Text(f"{Option('resume')}: keep each sample a row of its own")
    return Pins(reason, {**dict.fromkeys(packed, False), "model.packs_with": None})


def _kept_share(recipe: Recipe, checkpoint: Checkpoint) -> Pins | None:
    """Pin the share of the rows that 'auto' has held out: with other settings it may choose another now."""
    if recipe.config.train_dataloader.dataset.val_split != "auto" or not checkpoint.recipe.is_file():
        return None
    saved = loading.load(str(checkpoint.recipe)).config
    share = saved.train_dataloader.dataset.val_split
    if share is None or not (saved.val_dataloader and recipe.config.val_dataloader):
        return None
    reason = Text(f"{Option('resume')}: keep the split of the rows")
    return Pins(reason, {f"{loader}.dataset.val_split": share for loader in LOADERS})


def _kept_batch(recipe: Recipe, saved: CheckpointState | None, ranks: int, why: str) -> Pins | None:
    """Pin the global batch of a checkpoint, or of a plan for more nodes, on this number of ranks.

    With the same global batch the same samples go into each step, whatever the number of ranks. Accumulation changes
    first; the micro-batch shrinks only if that is not enough. Nothing is pinned if the recipe gives this batch.

    Args:
        saved: The state of the checkpoint or of the plan; None: it is not known.
        ranks: Those that train on samples of their own.
        why: The option because of which it is kept, for messages.
    """
    if saved is None or saved.global_batch is None:
        return None
    config, asked_now, kept_batch = recipe.config, batch_settings(recipe), saved.global_batch
    recipe_batch = samples_of_rank(config, ranks) * ranks
    # The same recipe as then, or RUN/recipe.py, which has the batch that ran; its numbers may be for other ranks.
    is_same_recipe = asked_now in (saved.asked_batch, saved.batch)
    if recipe_batch != kept_batch and not is_same_recipe:
        raise _other_batch(recipe, recipe_batch, ranks, kept_batch)
    fits_these_ranks = not is_same_recipe or asked_now.samples in (None, kept_batch // ranks)
    if recipe_batch == kept_batch and fits_these_ranks and config.train_cfg.global_batch_size != "auto":
        return None
    micro_batch = _micro_batch(config, kept_batch, ranks, why)
    accumulation = kept_batch // ranks // micro_batch
    if asked_now.micro_batch == "auto":
        values: dict[str, object] = {_ACCUMULATION: "auto", GLOBAL_BATCH: kept_batch}
        change = "its split is chosen again"
    else:
        values = {_MICRO: micro_batch, _ACCUMULATION: accumulation}
        change = f"{asked_now.micro_batch} x {asked_now.accumulation} becomes {micro_batch} x {accumulation}"
    kept_on = f"keep the global batch of {kept_batch} on {_described(config, ranks)}"
    is_split_as_saved = saved.batch is not None and saved.batch.samples == kept_batch // ranks
    note = None if is_split_as_saved else f"batch: {change} to {kept_on}."
    return Pins(Text(f"{why}: {kept_on}"), values, note=note)


def _described(config: RecipeConfig, ranks: int) -> str:
    """Return the ranks that have samples of their own in words."""
    shared_by, several = config.train_cfg.ranks_a_sample, "s" * (ranks > 1)
    return f"{ranks} group{several} of {shared_by} ranks" if shared_by > 1 else f"{ranks} rank{several}"


def _other_batch(recipe: Recipe, recipe_batch: int, ranks: int, kept_batch: int) -> RecipeError:
    current = batch_settings(recipe)
    message = (
        f"{current.micro_batch} x {current.accumulation} x {_described(recipe.config, ranks)} = {recipe_batch} "
        f"samples per step, and the checkpoint was trained with {kept_batch}"
    )
    where = ", ".join(f"{key} ({recipe.origins[key].text})" for key in (_MICRO, _ACCUMULATION))
    fix = f"Use a global batch of {kept_batch}, or start a new run without {Option('resume')}."
    return RecipeError(message, where=where, fix=fix)


def _micro_batch(config: RecipeConfig, global_batch: int, ranks: int, why: str) -> int:
    """Return the largest micro-batch, up to the recipe's, that divides the samples of each rank, or refuse."""
    least, shared_by = config.objective.micro_batches(0).start, config.train_cfg.ranks_a_sample
    samples, rest = divmod(global_batch, ranks)
    max_size = samples if config.train_dataloader.batch_size == "auto" else config.train_dataloader.batch_size
    sizes = [size for size in config.objective.micro_batches(max_size) if not rest and samples % size == 0]
    if sizes and samples:
        return max(sizes)
    fits = [str(count * shared_by) for count in range(1, global_batch // least + 1) if global_batch % count == 0]
    per_rank = (
        f"{global_batch} / {ranks} = {global_batch / ranks:.4g} samples {'a group' if shared_by > 1 else 'per rank'}"
    )
    needs = f", and {config.objective.type} needs {least} or more" if least > 1 else ""
    message = f"the global batch of {global_batch} cannot be kept on {_described(config, ranks)}: {per_rank}{needs}"
    raise RunDirectoryError(message, where=why, fix=f"Use {', '.join(fits[:-1])} or {fits[-1]} ranks.")


def check_fewer_nodes(
    config: RecipeConfig, topology: Topology, state: CheckpointState, lacks_memory: Callable[[int], TunerError | None]
) -> tuple[str, ...]:
    """Refuse a run of `--nnodes MIN:MAX` that fewer nodes cannot go on with; return a note on the numbers that can.

    Args:
        state: The state of the run's checkpoints on all nodes.
        lacks_memory: Returns why a number of nodes has too little memory for it, or None.

    Raises:
        UsageError: no smaller number of nodes can.
    """
    min_nodes, max_nodes = topology.min_nodes, topology.num_nodes
    if not min_nodes:
        return ()
    assert state.global_batch
    flag, fix = f"--nnodes {min_nodes}:{max_nodes}", f"Use --nnodes {max_nodes}: a lost node is waited for."
    if why_not := why_not_redistributed(state):
        problem = f"a run at {state.deepspeed} with {state.optimizer} cannot go on with fewer nodes: {why_not}"
        raise UsageError(problem, where=flag, fix=fix)
    fits = []
    for count in range(min_nodes, max_nodes):
        with suppress(TunerError):
            ranks = data_parallel_ranks(config, count * topology.nproc_per_node)
            _micro_batch(config, state.global_batch, ranks, flag)
            fits.append(count)
    if not fits:
        ranks_text = f"{topology.nproc_per_node} ranks on each"
        problem = (
            f"the global batch of {state.global_batch} cannot be kept on fewer than {max_nodes} nodes with {ranks_text}"
        )
        unit = topology.nproc_per_node * math.lcm(max_nodes, max_nodes - 1) * config.objective.micro_batches(0).start
        near = -(-state.global_batch // unit) * unit
        another = f"Or set one that {max_nodes - 1} nodes can share: {Option('batch_size', near)}."
        raise UsageError(problem, where=flag, fix=f"{fix} {another}")
    short = [(count, error) for count in fits if (error := lacks_memory(count))]
    numbers = [str(count) for count in fits if count not in dict(short)]
    if not numbers:
        too_few, why = short[-1]
        problem = f"memory does not suffice on {too_few} of {max_nodes} nodes at {state.deepspeed}: {why.what}"
        lower = f"Or choose a level from the start that fits there: tuner plan, {Option('deepspeed', 'LEVEL')}."
        raise UsageError(problem, where=flag, fix=f"{fix} {lower}")
    kept = f"the global batch of {state.global_batch} and {state.deepspeed} can be kept with {', '.join(numbers)}"
    lacking = f"; memory does not suffice on {', '.join(str(count) for count, _ in short)}" if short else ""
    return (Text(f"{flag}: {kept} of {max_nodes} nodes{lacking}."),)


def point_and_config(
    final: FinalConfig, checkpoint: Checkpoint | None, state: CheckpointState, *, weights: bool
) -> tuple[ResumePoint | None, FinalConfig, tuple[str, ...]]:
    """Return how a run loads a checkpoint, its DeepSpeed config for that, and notes for the user.

    Args:
        final: The DeepSpeed config without the resume.
        checkpoint: None for a run that starts from the beginning.
        state: The state that the run's own checkpoints will have.
        weights: Load only the weights if the optimizer's states cannot be loaded (--resume-weights).

    Raises:
        IncompatibleStates: the states cannot be loaded, and `weights` is False.
    """
    if checkpoint is None:
        return None, final, ()
    point, notes = resume_from(checkpoint, state, weights=weights)
    if point.is_redistributed:  # DeepSpeed needs a key to load a universal checkpoint
        block = {**final.config.get("checkpoint", {}), "load_universal": True}
        origin = Origin.derived(Text(f"{Option('resume')}: the checkpoint was saved by another number of ranks"))
        origins = {**final.origins, "checkpoint.load_universal": origin}
        final = final._replace(config={**final.config, "checkpoint": block}, origins=origins)
    return point, final, notes


FIXED = {
    "model.path": "the weights belong to another model",
    "model.revision": "the weights belong to another model",
    "model.chat_template": "the samples differ",
    "model.chat_template_kwargs": "the samples differ",
    "model.trust_remote_code": "the model's own code has another class",
    "model.images": "other parts of the model are loaded",
    "model.freeze": "other weights are trained",
    "model.vision_lora": "other weights are trained",
    "architecture": "the weights belong to another model",
    "quantization": "the base weights differ",
    "adapter": "the adapter differs",
    "objective.type": "the loss differs",
    "train_dataloader.dataset": "the samples or their order differ",
    "optim_wrapper.optimizer.loraplus_lr_ratio": "the optimizer's parameter groups differ",
    "optim_wrapper.optimizer.projector_lr": "the optimizer's parameter groups differ",
    "train_cfg.trainable_layers": "other weights are trained",
    "randomness.seed": "the order of the samples differs",
}
"""The keys and blocks that a checkpoint's state depends on, and what a change of each would break."""
_ROWS = "train_dataloader.dataset"
_OF_DROPOUT = ("adapter.lora_dropout", "model.vision_lora.lora_dropout")
_FREE = frozenset((*_OF_DROPOUT, f"{_ROWS}.bad_rows", f"{_ROWS}.num_proc", f"{_ROWS}.tokenizer_backend"))
"""Keys that may change although their block may not: ranks check whether the same rows are skipped."""


def compare_recipes(checkpoint: Checkpoint | None, new: Recipe) -> tuple[str, ...]:
    """Return one line for each key of the recipe that changed since the checkpoint.

    Args:
        checkpoint: Without its recipe.py nothing can be compared.
        new: The recipe that will run, as recipe.py will hold it.

    Raises:
        RecipeError: a key changed that the state of the checkpoint depends on.
    """
    saved = checkpoint.recipe if checkpoint else None
    if saved is None or not saved.is_file():
        return ()
    old = trust.as_written(loading.load(str(saved)))  # `load` withholds the trust that a recipe asks for
    changed = list(differences(Section(old.values, old.origins), Section(new.values, new.origins)))
    refused = [(difference, why) for difference in changed if (why := _reason(difference.key))]
    if not refused:
        return tuple(f"changed since the checkpoint: {_arrow(difference)}" for difference in changed)
    lines = [f"{_arrow(difference)}: {why}" for difference, why in refused]
    message = f"the checkpoint does not fit this recipe: {'; '.join(lines)}"
    back = [
        f"{difference.key} = {difference.left.value!r}" if difference.left else f"no {difference.key}"
        for difference, _ in refused
    ]
    first = refused[0][0]
    where = f"{first.key} ({first.right.origin.text})" if first.right else first.key
    fix = f"Restore {' and '.join(back)}, or start a new run without {Option('resume')}."
    raise RecipeError(message, where=where, fix=fix)


def _reason(key: str) -> str | None:
    if key in _FREE:
        return None
    return next((why for fixed, why in FIXED.items() if key == fixed or key.startswith(f"{fixed}.")), None)


def _arrow(difference: Difference) -> str:
    old, new = (repr(side.value) if side else "(absent)" for side in (difference.left, difference.right))
    return f"{difference.key} {old} -> {new}"
