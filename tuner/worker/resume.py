"""Loading checkpoints: converted for these ranks, without running code from their files, with the recipe's settings.

run.json says which checkpoint a run resumes from and how it is loaded; the launcher decides it.
"""

from __future__ import annotations

import argparse
import contextlib
import copyreg
import io
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import transformers
from deepspeed.checkpoint import ds_to_universal
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param
from deepspeed.utils.tensor_fragment import fragment_address
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import save_file
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.deepspeed import deepspeed_load_checkpoint

from tuner.data.prepared import Prepared
from tuner.errors import Option, RunDirectoryError, TunerError
from tuner.files import JsonObject, copy, read_text, sha256
from tuner.machine.topology import Rank
from tuner.pretrained import tensors_of
from tuner.progress import POLL_S
from tuner.runs import checkpoints
from tuner.runs.checkpoints import Checkpoint
from tuner.runs.directory import RunDirectory
from tuner.runs.records import LoadAs, RunRecord, TrainedData
from tuner.runs.resume_point import ResumePoint, is_same_state
from tuner.worker import compat, compat_checkpoints
from tuner.worker.checkpointing import best_step, undo_on_disk_error
from tuner.worker.rank_data import data_has_changed
from tuner.worker.trainer_types import BuiltTrainer, EngineOptimizer

_OF_DEEPSPEED = (LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address)
"""The classes in DeepSpeed 0.19.8's files beside tensors and plain values (measured: stages 0 to 3, fp32 and bf16;
DynamicLossScaler, for fp16, from its source)."""
_OF_TRAINER = ("trainer_state.json", "scheduler.pt")
_MAX_FILE_BYTES = 4 * 1024**3


class NothingLeft(Exception):
    """The checkpoint is of the last step: the result is saved without training."""


class EndIfNothingIsLeft(TrainerCallback):  # type: ignore[misc]
    """Ends the training of a run that resumes from its last step: transformers would train one more."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        # The validation that was due at that step may have ended the run early.
        if state.global_step >= state.max_steps or control.should_training_stop:
            raise NothingLeft


def converted(run_dir: RunDirectory, point: ResumePoint | None, rank: Rank) -> Path | None:
    """Return the folder that these ranks resume from, None in a new run; rank 0 converts what is not loaded as `SAVED`.

    Call it before the process group exists: the other ranks wait without a time limit, which a collective has.

    Raises:
        RunDirectoryError: a file of the checkpoint holds code.
    """
    # A new run also loads a checkpoint: its best one, at the end.
    torch.serialization.add_safe_globals(list(_OF_DEEPSPEED))
    # Python 3.11.0 to 3.11.3 would save the member of an enum as a call of `getattr`, which is refused as code.
    copyreg.pickle(ZeroStageEnum, lambda stage: (ZeroStageEnum, (stage.value,)))
    compat_checkpoints.load_swapped_whole()
    if point is None:
        return None
    folder = point.folder(run_dir)
    if folder == point.path:
        return folder
    if rank.rank == 0 and not _is_made_of(folder, point.checkpoint):
        print(f"Converting {point.path} for this run.", flush=True)
        with undo_on_disk_error(run_dir.checkpoints, "the converted checkpoint"), code_refused(point.path), silenced():
            checkpoints.clear_unfinished(run_dir.checkpoints)
            _convert(point, checkpoints.unfinished(run_dir.checkpoints) / folder.name)
            run_dir.universal.mkdir(exist_ok=True)
            checkpoints.put_in_place(run_dir.checkpoints, folder)
    while not (folder / checkpoints.MANIFEST).is_file():
        if run_dir.failures():
            raise TunerError(
                f"rank 0 could not convert {point.path}", where=run_dir.log_of(0).relative_to(run_dir.path)
            )
        time.sleep(POLL_S)
    return folder


def _is_made_of(folder: Path, checkpoint: Checkpoint) -> bool:
    """Return whether a folder is complete and was converted from this checkpoint, not from another of the same step."""
    converted_one = checkpoints.read_checkpoint(folder)
    return converted_one.problem is None and converted_one.facts.of == _identity(checkpoint)


def _identity(checkpoint: Checkpoint) -> str:
    return sha256(checkpoint.path / checkpoints.MANIFEST)


def _convert(point: ResumePoint, target: Path) -> None:
    target.mkdir(parents=True)
    source = _source(point.path)
    if point.load_as is LoadAs.WEIGHTS:
        write_weights(point.path, target / source.name)
    else:
        _write_universal(source, target / f"{source.name}_universal")
    for name in _OF_TRAINER:
        if (point.path / name).is_file():
            copy(point.path / name, target / name)
    checkpoints.seal(target, point.checkpoint.facts.model_copy(update={"of": _identity(point.checkpoint)}))


def data_of(prepared: Prepared) -> TrainedData:
    """Return what identifies prepared data: the order of the samples follows from the rows and their number."""
    return TrainedData(rows=len(prepared.dataset), tokens=prepared.counts.tokens, sha256=prepared.sha256)


def check_data(point: ResumePoint | None, prepared: Prepared) -> None:
    """Check that the checkpoint was trained on the same data; the path of the data may differ.

    Raises:
        DataError: the data has changed.
    """
    saved, current = point.checkpoint.facts.data if point else None, data_of(prepared)
    if point and saved and saved != current:
        raise data_has_changed(point, *(f"{data.rows:,} rows of {data.tokens:,} tokens" for data in (current, saved)))


def _source(checkpoint: Path) -> Path:
    return checkpoint / read_text(checkpoint / "latest").strip()


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Hide DeepSpeed's output while it reads and writes."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def _write_universal(source: Path, target: Path) -> None:
    ds_to_universal.main(
        argparse.Namespace(
            input_folder=str(source),
            output_folder=str(target),
            # In this process: other processes do not have the list of safe classes.
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,  # stages 1 and 2 save none
        )
    )


def write_weights(checkpoint: Path, target: Path) -> None:
    """Write the trained weights in fp32. Stage 0 in 16 bits stores fp32 masters without names: there the 16-bit weights
    are written as fp32."""
    source = _source(checkpoint)
    if list(source.glob("*_optim_states.pt")):
        state = get_fp32_state_dict_from_zero_checkpoint(
            str(checkpoint), exclude_frozen_parameters=True, lazy_mode=True
        )
    else:
        state = torch.load(source / "mp_rank_00_model_states.pt", map_location="cpu", weights_only=True)["module"]
    target.mkdir(parents=True)
    part: dict[str, torch.Tensor] = {}
    for name, weight in _without_ties(state):
        part[name] = weight.contiguous().float().clone()  # a copy: safetensors refuses views of a larger tensor
        if sum(tensor.nbytes for tensor in part.values()) > _MAX_FILE_BYTES:
            save_file(part, target / f"{name}.safetensors")
            part = {}
    save_file(part, target / "rest.safetensors")


def _without_ties(state: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    # Tied weights appear under each of their names; training knows the first one.
    keys: set[int] = set()
    for name, weight in state.items():
        key = weight.data_ptr() if isinstance(weight, torch.Tensor) else id(weight)
        if key not in keys:
            keys.add(key)
            yield name, weight


@contextlib.contextmanager
def code_refused(checkpoint: Path | None) -> Iterator[None]:
    """Turn torch.load's refusal of a checkpoint that holds code into one message; weights and numbers alone pass.

    Raises:
        RunDirectoryError: the checkpoint holds code; the code was not run.
    """
    try:
        yield
    except pickle.UnpicklingError as error:
        reason = next((line for line in str(error).splitlines() if "GLOBAL" in line or "class" in line), "")
        message = f"a file of {checkpoint} holds code, not only weights and numbers: {reason.strip()}"
        raise RunDirectoryError(message, where=Option("resume"), fix="Use a checkpoint of your own.") from error


class LoadCheckpoint:
    """Loads the state of a checkpoint into a trainer, and keeps the settings of the recipe.

    DeepSpeed and transformers also restore learning rate, betas, eps, weight decay and clipping (measured: a changed lr
    had no effect), and ZeRO-3's universal checkpoints give all groups the settings of the first one.
    """

    def __init__(self, trainer: BuiltTrainer, point: ResumePoint, seed: int) -> None:
        self.trainer, self.point, self.seed = trainer, point, seed
        trainer.on_schedule_made, trainer.load_states = self._note_settings, self._load_states
        trainer.load_random_states = self._load_random_states
        if point.load_as is LoadAs.WEIGHTS:
            compat_checkpoints.load_by(self._load_weights)

    def _note_settings(self, schedule: LambdaLR, optimizer: torch.optim.Optimizer) -> None:
        self.lrs = list(_unwrapped(schedule).base_lrs)
        self.settings = [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups]

    def _load_states(self, load: Callable[[], None]) -> None:
        """Load the schedule, and set the recipe's settings again; DeepSpeed has loaded its states before."""
        schedule = _unwrapped(self.trainer.lr_scheduler)
        if self.point.load_as is LoadAs.WEIGHTS:
            schedule.last_epoch = self.trainer.state.global_step
        else:
            load()
        schedule.base_lrs = self.lrs
        now = [lr * factor(schedule.last_epoch) for lr, factor in zip(self.lrs, schedule.lr_lambdas, strict=True)]
        for group, settings, lr in zip(self.trainer.optimizer.param_groups, self.settings, now, strict=True):
            group.update(settings, lr=lr)
        engine = self.trainer.model_wrapped
        compat.own_optimizer_steps(engine.optimizer)
        if hasattr(engine.optimizer, "clip_grad"):
            engine.optimizer.clip_grad = engine.gradient_clipping()

    def _load_random_states(self, load: Callable[[str], None]) -> None:
        saved = self.point.checkpoint.facts.state
        if saved is None or saved.world_size == dist.get_world_size():
            load(str(self.point.path))
            return
        # transformers would give all ranks without a file of random states the same numbers, from the seed.
        place = (self.seed, self.point.checkpoint.step, dist.get_rank())
        transformers.set_seed(int(np.random.SeedSequence(place).generate_state(1)[0]))

    def _load_weights(self, engine: DeepSpeedEngine, folder: str) -> tuple[str, JsonObject]:
        put_weights(engine, Path(folder))
        return folder, {}


def _unwrapped(schedule: LambdaLR) -> LambdaLR:
    return getattr(schedule, "scheduler", schedule)  # accelerate wraps DeepSpeed's schedule


def put_weights(engine: DeepSpeedEngine, folder: Path) -> None:
    """Copy the files of `write_weights` into the engine's parameters and their fp32 masters."""
    masters = _masters(engine.optimizer)
    if masters:
        engine.optimizer.optimizer.state.clear()  # as in compat.PrepareEngine
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(tensors_of(file)) for file in folder.rglob("*.safetensors")]
        places = {name: file for file in files for name in file.keys()}  # noqa: SIM118 (not a dict)
        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad:
                _put(engine, parameter, places[name].get_tensor(name).float(), masters.get(parameter))


def _masters(optimizer: EngineOptimizer) -> dict[torch.nn.Parameter, torch.Tensor]:
    """Return the fp32 master of each parameter at stage 0 in 16 bits; DeepSpeed has no public function for it."""
    groups = zip(getattr(optimizer, "fp16_groups", ()), getattr(optimizer, "fp32_groups", ()), strict=False)
    return {weight: master for weights, masters in groups for weight, master in zip(weights, masters, strict=True)}


def _put(
    engine: DeepSpeedEngine, parameter: torch.nn.Parameter, value: torch.Tensor, master: torch.Tensor | None
) -> None:
    shards = engine.zero_optimization_stage() == ZeroStageEnum.weights
    with GatheredParameters([parameter], modifier_rank=0, enabled=shards):
        if not shards or dist.get_rank() == 0:
            parameter.data.copy_(value)
    if master is not None:
        master.data.copy_(value)
    elif shards:
        # DeepSpeed 0.19.8's function for whole values does not pad: it fails if the ranks do not divide their number.
        length = parameter.ds_tensor.ds_numel
        padded = torch.nn.functional.pad(value.flatten(), (0, length * dist.get_world_size() - value.numel()))
        safe_set_local_fp32_param(parameter, padded.narrow(0, length * dist.get_rank(), length))
    elif engine.zero_optimization_stage():
        safe_set_full_fp32_param(parameter, value)
    else:
        assert parameter.dtype == torch.float32, f"{type(engine.optimizer)} has unknown masters"


def load_best(trainer: BuiltTrainer, run_dir: RunDirectory, record: RunRecord, *, is_adapter: bool) -> int | None:
    """Load the weights of the best checkpoint into the trained model; every rank takes part.

    Returns:
        The step of the checkpoint; None if the last step is the best, or the checkpoint is gone.

    Raises:
        RunDirectoryError: a file of the checkpoint holds code.
        DiskError: there is no room to convert its weights for these ranks.
    """
    engine, step = trainer.model_wrapped, best_step(trainer.state)
    folder = run_dir.checkpoints / f"checkpoint-{step}"
    if step in (None, trainer.state.global_step):
        return None
    # Rank 0, which has made it, looks for all: a node that saw it later would leave the others alone in the load.
    looked = [checkpoints.read_checkpoint(folder, hashes=False) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(looked)
    best = looked[0]
    # A retry after running out of memory may have moved the checkpoints of the first attempt away.
    if best is None or best.problem:
        return None
    # An attempt that began with a converted checkpoint loads every other one as converted too.
    is_same = best.facts.state is not None and is_same_state(best.facts.state, record.state)
    as_saved = record.resume_as in (None, LoadAs.SAVED) and is_same
    with code_refused(folder):
        if as_saved:
            deepspeed_load_checkpoint(engine, str(folder), load_module_strict=not is_adapter)
        else:
            _load_converted(engine, run_dir, folder)
    return step


def _load_converted(engine: DeepSpeedEngine, run_dir: RunDirectory, checkpoint: Path) -> None:
    folder = checkpoints.unfinished(run_dir.checkpoints) / f"{checkpoint.name}-{LoadAs.WEIGHTS}"
    with undo_on_disk_error(run_dir.checkpoints, f"the weights of {checkpoint.name}"), silenced():
        if dist.get_rank() == 0:
            checkpoints.clear_unfinished(run_dir.checkpoints)
            write_weights(checkpoint, folder)
    dist.barrier()
    put_weights(engine, folder)
    dist.barrier()
    if dist.get_rank() == 0:
        checkpoints.clear_unfinished(run_dir.checkpoints)
