"""What --resume comes to: the run directory, the checkpoint, and whether and how its state goes into this run.

It looks at checkpoints and changes none; ranks load them (`worker.resume`). Which keys of a recipe may change is known
in `launch.changes`.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuner.errors import DiskError, RecipeError, RunDirectoryError
from tuner.fit.memory import LEVELS
from tuner.launch.remedies import share_states
from tuner.launch.settled import Settled
from tuner.launch.steps import Resumed
from tuner.machine.topology import Batch, Topology
from tuner.recipes.objective import least_batch_size
from tuner.recipes.origin import Kind, Origin, Place
from tuner.recipes.recipe import Recipe
from tuner.recipes.schema import RecipeConfig
from tuner.runs import checkpoints, directory
from tuner.runs.directory import RunDirectory
from tuner.zero import choice
from tuner.zero.merge import FinalConfig

SAVED, UNIVERSAL, WEIGHTS = "saved", "universal", "weights"
"""How a checkpoint is loaded: as it is, dealt out anew to other ranks, or its weights alone."""
_DEALT_OUT = frozenset(("Adam", "AdamW", "RAdam"))
"""Optimizers whose states are those that DeepSpeed 0.19.8's ds_to_universal knows: exp_avg, exp_avg_sq and step."""
_MICRO, _ACCUMULATION = "train_dataloader.batch_size", "optim_wrapper.accumulative_counts"


class Immovable(RunDirectoryError):
    """A valid checkpoint whose optimizer states this run cannot load."""


@dataclass(frozen=True)
class Found:
    """Where a run goes on; `checkpoint` is None where it starts new, or again."""

    run_path: Path
    checkpoint: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def state(self) -> Mapping[str, Any]:
        """What `state_of` said of the run that saved the checkpoint."""
        return checkpoints.facts(self.checkpoint) if self.checkpoint else {}

    @property
    def recipe(self) -> Path | None:
        """The recipe of the run that saved the checkpoint."""
        return self.checkpoint / checkpoints.RECIPE if self.checkpoint else None


def find(asked: str | None, work_dir: Path | None, home: Path, default_name: str, topology: Topology) -> Found:
    """Return where a run goes on.

    Args:
        asked: What --resume says: a checkpoint, a run directory, or auto.
        work_dir: What --work-dir says.
        home: The folder of the recipe's runs.
        default_name: What a new run in it is called.
        topology: Who looks: other tasks and nodes may find what their leader has begun to write. The leader of a job
            of Slurm alone reads every byte of a checkpoint; its other tasks do what it has written.

    Raises:
        RunDirectoryError: the directory is taken, or there is no valid checkpoint.
    """
    fresh = (work_dir or home / default_name).absolute()
    if asked is None:
        directory.check_free(fresh, resume=_already_started(fresh, topology))
        return Found(fresh)
    if asked == "auto":
        return _auto(work_dir, home, fresh, topology)
    owner, checkpoint, passed = _named(Path(asked).absolute(), hashes=_verifies(topology))
    target = fresh if work_dir or not directory.is_run(owner) else owner
    directory.check_free(target, resume=target == owner or _already_started(target, topology))
    return _resumed(target, checkpoint, passed)


def _verifies(topology: Topology) -> bool:
    # The other nodes of torchrun choose for themselves: the choice is a part of the name by which they know the launch.
    return topology.leads or topology.launcher == "torchrun"


def _named(folder: Path, *, hashes: bool) -> tuple[Path, Path, list[str]]:
    """Return the run that a run directory or one of its checkpoints belongs to, and the checkpoint."""
    if not directory.is_run(folder):
        return folder.parent.parent, checkpoints.require_valid(folder, hashes=hashes), []
    found, passed = checkpoints.newest_valid(folder / "checkpoints", hashes=hashes)
    if found is None:
        fix = " ".join((*passed, "Start new without --resume."))
        raise RunDirectoryError(f"{folder} has no valid checkpoint", where="--resume", fix=fix)
    return folder, found, passed


def _auto(work_dir: Path | None, home: Path, fresh: Path, topology: Topology) -> Found:
    known = fresh if work_dir or topology.job else directory.newest_run(home.absolute())
    if known is None or not directory.is_run(known):
        directory.check_free(fresh, resume=_already_started(fresh, topology))
        return Found(fresh, None, ("--resume auto: no earlier run here, so this one starts new.",))
    found, passed = checkpoints.newest_valid(known / "checkpoints", hashes=_verifies(topology))
    if found is None and passed:
        fix = f"{' '.join(passed)} Start new with another --work-dir."
        raise RunDirectoryError(f"{known} has no valid checkpoint", where="--resume auto", fix=fix)
    if found is None:
        _refuse_lost(RunDirectory(known))
        beside = _beside(known) if known.parent == home.absolute() else ""
        return Found(known, None, (f"--resume auto: {known} never saved a checkpoint, so it starts again.{beside}",))
    return _resumed(known, found, passed)


def _refuse_lost(run: RunDirectory) -> None:
    """Refuse to begin a run anew whose checkpoints are out of reach, or were removed.

    Raises:
        RunDirectoryError: it saved some.
        DiskError: they cannot be looked at.
    """
    if os.path.lexists(run.checkpoints) and not os.access(run.checkpoints, os.R_OK | os.X_OK):
        fix = "Make it readable, or start new with another --work-dir."
        raise DiskError(f"{run.checkpoints} cannot be read", where="--resume auto", fix=fix)
    state = run.read_json(run.status).get("state") if run.status.is_file() else None
    if state in ("done", "stopped") or (run.checkpoints / checkpoints.LATEST).is_file():
        what = f"{run.path} has saved checkpoints, and none is left: it would begin anew"
        raise RunDirectoryError(what, where="--resume auto", fix="Put one back, or start new with another --work-dir.")


def _beside(run: Path) -> str:
    """Return a word of another run of the recipe that can go on: this one may have been started by mistake."""
    others = (path for path in sorted(run.parent.iterdir(), reverse=True) if path != run and directory.is_run(path))
    found = next((path for path in others if checkpoints.listed(path / "checkpoints")), None)
    return f" {found} has a checkpoint: --resume {shlex.quote(str(found))} goes on with it." if found else ""


def _resumed(target: Path, checkpoint: Path, passed: list[str]) -> Found:
    return Found(target, checkpoint, (*passed, f"Resuming from {checkpoint}."))


def _already_started(path: Path, topology: Topology) -> bool:
    # The leader may have written the directory, or half of it, before another task or node looks.
    return not topology.leads and path.is_dir()


def place(found: Found) -> Resumed | None:
    """Return the step that a run goes on from, and how many samples its checkpoint was trained on."""
    if found.checkpoint is None:
        return None
    data = found.state.get("data") or {}
    return Resumed(checkpoints.step_of(found.checkpoint), data.get("rows"))


def asked_batch(recipe: Recipe) -> dict[str, int]:
    """Return the micro-batch and accumulation that a recipe asks for."""
    config = recipe.config
    return {
        "micro_batch": config.train_dataloader.batch_size,
        "accumulation": config.optim_wrapper.accumulative_counts,
    }


def keep_global_batch(loaded: Recipe, found: Found, world_size: int) -> tuple[Recipe, tuple[str, ...]]:
    """Return the recipe with the checkpoint's global batch on this number of ranks, and what to say of it.

    With the same global batch the same samples go into each step, whatever the number of ranks. Accumulation changes
    first, the micro-batch only where that is not enough, and it only shrinks.

    Raises:
        RecipeError: the recipe now asks for another global batch than it did.
        RunDirectoryError: this number of ranks cannot share it evenly.
    """
    saved, asked = found.state, asked_batch(loaded)
    wanted = saved.get("global_batch")
    batch = Batch(asked["micro_batch"], asked["accumulation"], world_size)
    if wanted is None or batch.global_batch == wanted:
        return loaded, ()
    # RUN/recipe.py asks for what ran, which may have been made to fit other ranks already.
    if asked not in (saved.get("asked_batch"), saved.get("batch")):
        raise _other_batch(loaded, batch, wanted)
    micro = _micro_batch(loaded.config, wanted, world_size)
    values, reason = loaded.values, f"--resume: keeps the global batch of {wanted} on {world_size} ranks"
    values["train_dataloader"]["batch_size"] = micro
    values["optim_wrapper"]["accumulative_counts"] = accumulation = wanted // world_size // micro
    changed = {key for key, old, new in _both(batch, micro, accumulation) if old != new}
    origins = {
        key: origin.over(Place(Kind.DERIVED, reason), _value(loaded, key)) if key in changed else origin
        for key, origin in loaded.origins.items()
    }
    note = (
        f"batch: {batch.micro_batch} x {batch.accumulation} becomes {micro} x {accumulation}, which on {world_size} "
        f"rank{'s' * (world_size > 1)} keeps the global batch of {wanted}."
    )
    return replace(loaded, config=RecipeConfig.model_validate(values), origins=origins), (note,)


def _both(batch: Batch, micro: int, accumulation: int) -> tuple[tuple[str, int, int], ...]:
    return (_MICRO, batch.micro_batch, micro), (_ACCUMULATION, batch.accumulation, accumulation)


def _value(loaded: Recipe, key: str) -> int:
    config = loaded.config
    return config.train_dataloader.batch_size if key == _MICRO else config.optim_wrapper.accumulative_counts


def _other_batch(loaded: Recipe, batch: Batch, wanted: int) -> RecipeError:
    what = (
        f"{batch.micro_batch} x {batch.accumulation} x {batch.ranks} ranks = {batch.global_batch} samples a step, and "
        f"the checkpoint was trained with {wanted}: its steps would be others"
    )
    where = f"{_MICRO} ({loaded.origins[_MICRO].source}), {_ACCUMULATION} ({loaded.origins[_ACCUMULATION].source})"
    return RecipeError(what, where=where, fix=f"Put {wanted} together again, or start a new run without --resume.")


def _micro_batch(config: RecipeConfig, wanted: int, world_size: int) -> int:
    """Return the largest micro-batch, up to the recipe's, of which whole ones make up each rank's share.

    Raises:
        RunDirectoryError: there is none.
    """
    least = least_batch_size(config.objective)
    share, rest = divmod(wanted, world_size)
    sizes = [size for size in range(least, config.train_dataloader.batch_size + 1) if not rest and share % size == 0]
    if sizes and share:
        return max(sizes)
    fits = [str(ranks) for ranks in range(1, wanted // least + 1) if wanted % ranks == 0]
    what = f"the global batch of {wanted} cannot be kept on {world_size} ranks: {wanted} / {world_size} "
    what += f"= {wanted / world_size:.4g} samples a rank" + (f", and kto needs {least} or more" if least > 1 else "")
    raise RunDirectoryError(what, where="--resume", fix=f"Start {', '.join(fits[:-1])} or {fits[-1]} ranks.")


def level(loaded: Recipe, deepspeed: str | None, found: Found) -> str | None:
    """Return what --deepspeed means: `auto` of a run that goes on is the level of its checkpoint."""
    saved = found.state.get("deepspeed")
    is_auto = choice.chosen(loaded, deepspeed)[0] == choice.AUTO
    return saved if is_auto and saved in LEVELS else deepspeed


def state_of(settled: Settled, asked: Recipe) -> dict[str, Any]:
    """Return what decides who can load a run's checkpoints, which carry it in their manifest.

    Args:
        settled: The recipe as it will run.
        asked: The recipe before its batch was made to fit a checkpoint.
    """
    zero = settled.final.config.get("zero_optimization", {})
    devices = ((zero.get(key) or {}).get("device") for key in ("offload_optimizer", "offload_param"))
    return {
        "world_size": settled.topology.world_size,
        "global_batch": settled.batch.global_batch,
        "asked_batch": asked_batch(asked),
        "batch": asked_batch(settled.recipe),
        "deepspeed": settled.level,
        "stage": zero.get("stage", 0),
        "nvme": "nvme" in devices,
        "dtype": settled.precision.dtype,
        "optimizer": settled.recipe.config.optim_wrapper.optimizer.type,
    }


def how(found: Found, state: Mapping[str, Any], *, weights: bool) -> tuple[str | None, tuple[str, ...]]:
    """Return how the checkpoint is loaded into a run of this state, and what to say of it.

    Args:
        found: The checkpoint.
        state: What `state_of` says of this run.
        weights: Where the optimizer's states cannot move, the weights may alone (--resume-weights).

    Raises:
        Immovable: the states cannot move, and that was not asked for.
    """
    saved = found.state
    if found.checkpoint is None or "stage" not in saved:
        return (SAVED if found.checkpoint else None), ()
    name, reasons, fixes = found.checkpoint.name, *_hindrances(saved, state)
    if reasons and not weights:
        fix = f"{' and '.join(fixes)}, or add --resume-weights: the weights move, and the optimizer starts fresh."
        what = f"{name} {', and '.join(reasons)}: its optimizer states cannot be loaded"
        raise Immovable(what, where="--resume", fix=fix[0].upper() + fix[1:])
    if reasons:
        rest = "the optimizer's states start fresh; steps, data order and learning rate go on"
        return WEIGHTS, (f"--resume-weights: {name} {', and '.join(reasons)}, so its weights move alone: {rest}.",)
    if saved["world_size"] == state["world_size"]:
        return SAVED, ()
    ranks = f"{name} was saved by {saved['world_size']} ranks, this run has {state['world_size']}"
    if not state["stage"]:
        return SAVED, (f"{ranks}: every rank loads the whole state, and dropout draws other numbers.",)
    return UNIVERSAL, (f"{ranks}: its state is dealt out anew, and dropout draws other numbers.",)


def _hindrances(saved: Mapping[str, Any], state: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return why the optimizer's states cannot move, and what would let them."""
    found = []
    if not share_states(saved["stage"], state["stage"]):
        was = f"was saved at ZeRO stage {saved['stage']}, this run is at stage {state['stage']}"
        found.append((was, f"take --deepspeed {saved['deepspeed']}"))
    for key, word, setting in (
        ("dtype", "in", "optim_wrapper.dtype"),
        ("optimizer", "with", "optim_wrapper.optimizer.type"),
    ):
        if saved[key] != state[key]:
            was = f"was trained {word} {saved[key]}, this run has {state[key]}"
            found.append((was, f"--set {setting}={saved[key]}"))
    if saved["nvme"] != state["nvme"]:
        place = "on NVMe" if saved["nvme"] else "in memory"
        found.append((f"has its states {place}, this run not", f"take --deepspeed {saved['deepspeed']}"))
    if saved["world_size"] != state["world_size"] and state["stage"]:
        ranks = f"was saved by {saved['world_size']} ranks, this run has {state['world_size']}"
        if state["optimizer"] not in _DEALT_OUT:
            ranks += f" (only the states of {', '.join(sorted(_DEALT_OUT))} can be dealt out anew)"
        if state["optimizer"] not in _DEALT_OUT or state["nvme"]:
            found.append((ranks, f"start {saved['world_size']} ranks"))
    return [reason for reason, _ in found], list(dict.fromkeys(fix for _, fix in found))


def marked(final: FinalConfig, way: str | None) -> FinalConfig:
    """Return the DeepSpeed config of an attempt that loads a universal checkpoint, which it must be told."""
    if way != UNIVERSAL:
        return final
    block = {**final.config.get("checkpoint", {}), "load_universal": True}
    origin = Origin.derived("--resume: saved by another number of ranks")
    return replace(
        final,
        config={**final.config, "checkpoint": block},
        origins={**final.origins, "checkpoint.load_universal": origin},
    )
