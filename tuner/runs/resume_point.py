"""The point that a run resumes from: a checkpoint, and how its state is loaded into the ranks of this run.

It compares the checkpoint's facts with those of the run. The launcher chooses the checkpoint, and the ranks load it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tuner.errors import DsKey, Key, Option, RunDirectoryError, Text
from tuner.optimizers import OPTIMIZERS
from tuner.runs import checkpoints
from tuner.runs.checkpoints import Checkpoint
from tuner.runs.directory import RunDirectory
from tuner.runs.records import CheckpointState, LoadAs, RunRecord


class IncompatibleStates(RunDirectoryError):
    """The checkpoint is valid, but this run cannot load its optimizer states."""


class ResumePoint(NamedTuple):
    """A valid checkpoint, and how this run loads it."""

    checkpoint: Checkpoint
    load_as: LoadAs

    @classmethod
    def of(cls, record: RunRecord) -> ResumePoint | None:
        """Return the point in run.json, or None for a new run; the launcher has checked the checkpoint."""
        if record.resume is None or record.resume_as is None:
            return None
        path = Path(record.resume)
        manifest_facts = checkpoints.facts(path)
        return cls(Checkpoint(path, manifest_facts.step or 0, manifest_facts), record.resume_as)

    @property
    def path(self) -> Path:
        return self.checkpoint.path

    @property
    def is_redistributed(self) -> bool:
        """Whether the optimizer's states move to another number of ranks."""
        return self.load_as is LoadAs.UNIVERSAL

    def folder(self, run_dir: RunDirectory) -> Path:
        """Return the folder that the ranks load: the checkpoint, or its conversion."""
        return self.path if self.load_as is LoadAs.SAVED else run_dir.universal / f"{self.path.name}-{self.load_as}"


def resume_from(
    checkpoint: Checkpoint, current: CheckpointState, *, weights: bool
) -> tuple[ResumePoint, tuple[str, ...]]:
    """Return how a run resumes from a checkpoint, and notes for the user.

    Args:
        current: The state that the run's own checkpoints will have.
        weights: Load only the weights if the optimizer's states cannot be loaded (--resume-weights).

    Raises:
        IncompatibleStates: the states cannot be loaded, and `weights` is False.
    """
    saved, name = checkpoint.facts.state, checkpoint.path.name
    if saved is None:
        return ResumePoint(checkpoint, LoadAs.SAVED), ()
    if current.nvme_weights_alone:
        # Measured, DeepSpeed 0.19.8, max_in_cpu smaller than the model: a bare AttributeError.
        problem = "with its weights on NVMe and the optimizer in memory DeepSpeed 0.19.8 loads no checkpoint"
        fix = f"Add {DsKey('zero_optimization.offload_param.device', 'cpu')}, or put offload_optimizer on NVMe too."
        raise IncompatibleStates(problem, where=Option("resume"), fix=fix)
    hindrances = list(_hindrances(saved, current))
    # What is swapped, and the parts of split layers, stand in files that only such an engine reads.
    has_whole_weights = not (saved.nvme or is_divided(saved) or is_divided(current))
    if hindrances:
        reasons = ", and ".join(reason for reason, _ in hindrances)
        if weights and has_whole_weights:
            rest = "the optimizer's states start from zero; steps, data order and learning rate continue"
            note = Text(f"{Option('resume_weights', True)}: {name} {reasons}, so only its weights are loaded: {rest}.")
            return ResumePoint(checkpoint, LoadAs.WEIGHTS), (note,)
        fixes = " and ".join(dict.fromkeys(fix for _, fix in hindrances))
        if has_whole_weights:
            fixes += f", or add {Option('resume_weights', True)} to load only the weights and restart the optimizer"
        lost = "weights and optimizer states" if weights else "optimizer states"
        problem = f"{name} {reasons}: its {lost} cannot be loaded"
        raise IncompatibleStates(problem, where=Option("resume"), fix=f"{fixes[0].upper()}{fixes[1:]}.")
    if saved.world_size == current.world_size:
        return ResumePoint(checkpoint, LoadAs.SAVED), ()
    load_as, how = LoadAs.UNIVERSAL, "its state is redistributed"
    if not current.stage:
        load_as, how = LoadAs.SAVED, "every rank loads the whole state"
    ranks = f"{name} was saved by {saved.world_size} ranks, this run has {current.world_size}"
    return ResumePoint(checkpoint, load_as), (f"{ranks}: {how}, and dropout uses other random numbers.",)


def is_divided(state: CheckpointState) -> bool:
    """Return whether ranks have parts of layers, or some of the experts, that no other kind of run can load."""
    return state.tensor_parallel > 1 or state.expert_parallel > 1


def is_same_state(saved: CheckpointState, current: CheckpointState) -> bool:
    """Return whether DeepSpeed loads a checkpoint into a run as it was saved."""
    keys = {"world_size", "stage", "dtype", "optimizer", "nvme", "tensor_parallel", "expert_parallel"}
    return saved.model_dump(include=keys) == current.model_dump(include=keys)


def share_states(stage: int, other: int) -> bool:
    """Return whether a run at one ZeRO stage loads the other's optimizer states: 1 and 2 do, all else only its own.

    Measured on DeepSpeed 0.19.8; from stage 2 to 3 it ends in a bare AssertionError.
    """
    return stage == other or {stage, other} == {1, 2}


def why_not_redistributed(state: CheckpointState) -> str | None:
    """Return why states such as these cannot move to another number of ranks, or None if they can."""
    if state.tensor_parallel > 1:
        return f"its layers are split over {state.tensor_parallel} ranks"
    if state.expert_parallel > 1:
        return f"its experts are divided over {state.expert_parallel} ranks"
    if not state.stage:
        return None
    redistributed = sorted(name for name, optimizer_facts in OPTIMIZERS.items() if optimizer_facts.is_redistributed)
    if state.optimizer not in redistributed:
        return f"only the states of {', '.join(redistributed)} can be redistributed"
    return "states on NVMe cannot be redistributed" if state.nvme or state.nvme_weights_alone else None


def _hindrances(saved: CheckpointState, current: CheckpointState) -> Iterator[tuple[str, str]]:
    """Yield each reason why the optimizer's states cannot be loaded, with its remedy."""
    take_level = f"use {Option('deepspeed', saved.deepspeed)}"
    if not share_states(saved.stage, current.stage):
        yield f"was saved at ZeRO stage {saved.stage}, this run is at stage {current.stage}", take_level
    if saved.dtype != current.dtype:
        was = f"was trained in {saved.dtype}, this run has {current.dtype}"
        yield was, f"use {Key('optim_wrapper.dtype', saved.dtype)}"
    if saved.optimizer != current.optimizer:
        was = f"was trained with {saved.optimizer}, this run has {current.optimizer}"
        yield was, f"use {Key('optim_wrapper.optimizer.type', saved.optimizer)}"
    if saved.nvme != current.nvme:
        places = ("on NVMe", "in memory")
        saved_place, current_place = places if saved.nvme else places[::-1]
        yield f"has its states {saved_place}, this run {current_place}", take_level
    if saved.tensor_parallel != current.tensor_parallel:
        was = f"has layers that are split over {saved.tensor_parallel} ranks, this run splits them over "
        yield f"{was}{current.tensor_parallel}", f"use {Key('train_cfg.autotp_size', saved.tensor_parallel)}"
    elif saved.expert_parallel != current.expert_parallel:
        was = f"has experts that are divided over {saved.expert_parallel} ranks, this run divides them over "
        yield f"{was}{current.expert_parallel}", f"use {DsKey('autoep_size', saved.expert_parallel)}"
    elif saved.world_size != current.world_size and (why_not := why_not_redistributed(current)):
        ranks = f"was saved by {saved.world_size} ranks, this run has {current.world_size} ({why_not})"
        yield ranks, f"use {saved.world_size} ranks"
