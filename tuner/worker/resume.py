"""Going on from a checkpoint: in a form that these ranks can load, without code from its files, as the recipe says now.

Which checkpoint, and how it is loaded, stands in run.json; it is decided before a rank starts.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import pickle
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from deepspeed.checkpoint import ds_to_universal
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param
from deepspeed.utils.tensor_fragment import fragment_address
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.integrations.deepspeed import deepspeed_load_checkpoint

from tuner.data.prepared import Prepared
from tuner.errors import DataError, RunDirectoryError, TunerError
from tuner.files import sha256
from tuner.machine.topology import Rank
from tuner.runs import checkpoints
from tuner.runs.checkpoints import Checkpoint
from tuner.runs.directory import RunDirectory
from tuner.runs.resume_point import LoadAs, ResumePoint, is_same_state
from tuner.worker import compat, compat_checkpoints
from tuner.worker.checkpointing import best_step, disk_errors

_OF_DEEPSPEED = (LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address)
"""All that DeepSpeed 0.19.8's files hold beside tensors and plain values (measured: stages 0 to 3, fp32 and bf16;
DynamicLossScaler read in its source, for fp16)."""
_OF_TRAINER = ("trainer_state.json", "scheduler.pt")
_POLL_S = 0.2
_MAX_FILE_BYTES = 4 * 1024**3


class NothingLeft(Exception):
    """The checkpoint is that of the last step: its result is to be saved, and nothing to be trained."""


def converted(run: RunDirectory, point: ResumePoint | None, rank: Rank) -> Path | None:
    """Return the folder that these ranks resume from, None without a checkpoint; rank 0 makes it where it is another.

    Call it before a process group is there: the others wait for as long as rank 0 takes, and a collective would not.

    Raises:
        RunDirectoryError: a file of the checkpoint holds more than data.
    """
    # The best checkpoint of this run is loaded too.
    torch.serialization.add_safe_globals(list(_OF_DEEPSPEED))
    compat_checkpoints.load_swapped_whole()
    if point is None:
        return None
    folder = point.folder(run)
    if folder == point.path:
        return folder
    if rank.rank == 0 and not _is_made_of(folder, point.checkpoint):
        print(f"Converting {point.path} for this run.", flush=True)
        with disk_errors(run.checkpoints, "the converted checkpoint"), data_alone(point.path), silenced():
            checkpoints.clear_unfinished(run.checkpoints)
            _convert(point, checkpoints.unfinished(run.checkpoints) / folder.name)
            run.universal.mkdir(exist_ok=True)
            checkpoints.put_in_place(run.checkpoints, folder)
    while not (folder / checkpoints.MANIFEST).is_file():
        if run.failures():
            raise TunerError(f"rank 0 could not convert {point.path}", where="ranks/0.log")
        time.sleep(_POLL_S)
    return folder


def _is_made_of(folder: Path, checkpoint: Checkpoint) -> bool:
    """Return whether a folder is whole, and was converted of this very checkpoint: not of another of the same step."""
    made = checkpoints.read(folder)
    return made.problem is None and made.facts.get("of") == _identity(checkpoint)


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
            shutil.copy2(point.path / name, target / name)
    checkpoints.seal(target, {**point.checkpoint.facts, "of": _identity(point.checkpoint)})


def data_of(prepared: Prepared) -> dict[str, Any]:
    """Return what tells prepared data from others: the order of the samples follows from the rows and their number."""
    return {"rows": len(prepared.dataset), "tokens": prepared.counts.tokens, "sha256": prepared.sha256}


def check_data(point: ResumePoint | None, prepared: Prepared) -> None:
    """Check that the checkpoint to go on from was trained on the same data, whatever its path says.

    Raises:
        DataError: it was not.
    """
    saved, current = point.checkpoint.facts.get("data", {}) if point else {}, data_of(prepared)
    if point and any(saved[key] != current[key] for key in saved):
        now, before = (f"{one['rows']:,} rows of {one['tokens']:,} tokens" for one in (current, saved))
        now = "other rows or another order" if now == before else now
        what = f"the data has changed: it now has {now}, and {point.path.name} was trained on {before}"
        fix = "Restore the data, or start a new run without --resume."
        raise DataError(what, where="train_dataloader.dataset", fix=fix)


def _source(checkpoint: Path) -> Path:
    return checkpoint / (checkpoint / "latest").read_text(encoding="utf-8").strip()


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Hide what DeepSpeed prints while it reads and writes."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def _write_universal(source: Path, target: Path) -> None:
    ds_to_universal.main(
        argparse.Namespace(
            input_folder=str(source),
            output_folder=str(target),
            # In this process: others would not know which classes may be loaded.
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,  # stages 1 and 2 save none
        )
    )


def write_weights(checkpoint: Path, target: Path) -> None:
    """Write the trained weights in fp32; of stage 0 in 16 bits, whose masters have no names, the 16 bits as fp32."""
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
        part[name] = weight.contiguous().float().clone()  # on its own: safetensors takes no parts of a larger tensor
        if sum(one.nbytes for one in part.values()) > _MAX_FILE_BYTES:
            save_file(part, target / f"{name}.safetensors")
            part = {}
    save_file(part, target / "rest.safetensors")


def _without_ties(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    # Tied weights stand under each of their names; the first is the one that training knows.
    seen: set[int] = set()
    for name, weight in state.items():
        key = weight.data_ptr() if isinstance(weight, torch.Tensor) else id(weight)
        if key not in seen:
            seen.add(key)
            yield name, weight


@contextlib.contextmanager
def data_alone(checkpoint: Path | None) -> Iterator[None]:
    """Say in one message that a checkpoint holds what torch.load does not take for data.

    Raises:
        RunDirectoryError: it does; nothing of it was run.
    """
    try:
        yield
    except pickle.UnpicklingError as error:
        found = next((line for line in str(error).splitlines() if "GLOBAL" in line or "class" in line), "")
        what = f"a file of {checkpoint} holds code, not only weights and numbers: {found.strip()}"
        raise RunDirectoryError(what, where="--resume", fix="Use a checkpoint of your own.") from error


class LoadCheckpoint:
    """Loads the checkpoint's state into a trainer and leaves the settings to the recipe.

    DeepSpeed and transformers put back learning rate, betas, eps, weight decay and clipping too (measured: a changed lr
    had no effect), and ZeRO-3's universal checkpoints give all groups the settings of the first.
    """

    def __init__(self, trainer: Any, point: ResumePoint, seed: int) -> None:
        self.trainer, self.point, self.seed = trainer, point, seed
        trainer.on_schedule_made, trainer.load_states = self._note_settings, self._load_states
        trainer.load_random_states = self._load_random_states
        if point.load_as is LoadAs.WEIGHTS:
            compat_checkpoints.load_by(self._load_weights)

    def _note_settings(self, schedule: Any, optimizer: Any) -> None:
        self.lrs = list(_unwrapped(schedule).base_lrs)
        self.settings = [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups]

    @property
    def _schedule(self) -> Any:
        return _unwrapped(self.trainer.lr_scheduler)

    @property
    def _groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.trainer.optimizer.param_groups
        return groups

    def _load_states(self, load: Callable[[], None]) -> None:
        if self.point.load_as is LoadAs.WEIGHTS:
            self._schedule.last_epoch = self.trainer.state.global_step
        else:
            load()
        schedule = self._schedule
        schedule.base_lrs = self.lrs
        now = [lr * factor(schedule.last_epoch) for lr, factor in zip(self.lrs, schedule.lr_lambdas, strict=True)]
        for group, settings, lr in zip(self._groups, self.settings, now, strict=True):
            group.update(settings, lr=lr)
        engine = self.trainer.model_wrapped
        compat.own_optimizer_steps(engine.optimizer)
        if hasattr(engine.optimizer, "clip_grad"):
            engine.optimizer.clip_grad = engine.gradient_clipping()
        if self.trainer.state.global_step >= self.trainer.state.max_steps:
            raise NothingLeft  # transformers would train one step more

    def _load_random_states(self, load: Callable[[str], None]) -> None:
        if self.point.checkpoint.facts["world_size"] == dist.get_world_size():
            load(str(self.point.path))
            return
        # transformers would leave ranks without a file of their own at the seed, all with the same numbers.
        place = (self.seed, self.point.checkpoint.step, dist.get_rank())
        transformers.set_seed(int(np.random.SeedSequence(place).generate_state(1)[0]))

    def _load_weights(self, engine: Any, folder: str) -> tuple[str, dict[str, Any]]:
        put_weights(engine, Path(folder))
        return folder, {}


def _unwrapped(schedule: Any) -> Any:
    return getattr(schedule, "scheduler", schedule)  # accelerate wraps the one that DeepSpeed made


def put_weights(engine: Any, folder: Path) -> None:
    """Copy what `write_weights` has written into the engine's parameters and their fp32 masters."""
    masters = _masters(engine.optimizer)
    if masters:
        engine.optimizer.optimizer.state.clear()  # see compat.ResetStage0Optimizer
    places = {name: file for file in folder.rglob("*.safetensors") for name in _names(file)}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            with safe_open(places[name], "pt") as file:
                _put(engine, parameter, file.get_tensor(name).float(), masters.get(parameter))


def _names(file: Path) -> list[str]:
    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def _masters(optimizer: Any) -> dict[torch.nn.Parameter, torch.Tensor]:
    """Return the fp32 master of each parameter at stage 0 in 16 bits, whose optimizer has no function for it."""
    groups = zip(getattr(optimizer, "fp16_groups", ()), getattr(optimizer, "fp32_groups", ()), strict=False)
    return {weight: master for weights, masters in groups for weight, master in zip(weights, masters, strict=True)}


def _put(engine: Any, parameter: Any, value: torch.Tensor, master: torch.Tensor | None) -> None:
    shards = engine.zero_optimization_stage() == ZeroStageEnum.weights
    with GatheredParameters([parameter], modifier_rank=0, enabled=shards):
        if not shards or dist.get_rank() == 0:
            parameter.data.copy_(value)
    if master is not None:
        master.data.copy_(value)
    elif shards:
        # DeepSpeed 0.19.8's function for whole values has no padding: it fails where ranks do not divide them.
        length = parameter.ds_tensor.ds_numel
        whole = torch.nn.functional.pad(value.flatten(), (0, length * dist.get_world_size() - value.numel()))
        safe_set_local_fp32_param(parameter, whole.narrow(0, length * dist.get_rank(), length))
    elif engine.zero_optimization_stage():
        safe_set_full_fp32_param(parameter, value)
    else:
        assert parameter.dtype == torch.float32, f"{type(engine.optimizer)} has masters that are not known here"


def load_best(trainer: Any, run: RunDirectory, facts: Mapping[str, Any], *, is_adapter: bool) -> int | None:
    """Give the trained model the weights of its best checkpoint; every rank takes part.

    Returns:
        Its step, or None where the last step is the best, or the checkpoint is gone.

    Raises:
        RunDirectoryError: a file of the checkpoint holds more than data.
        DiskError: there is no room for its weights in a form that these ranks can load.
    """
    engine, step = trainer.model_wrapped, best_step(trainer.state)
    folder = run.checkpoints / f"checkpoint-{step}"
    # A retry after running out of memory may have set the checkpoints of its first attempt aside.
    if step in (None, trainer.state.global_step) or (best := checkpoints.read(folder, hashes=False)).problem:
        return None
    # An attempt that has begun with a converted checkpoint takes every other one for such too.
    as_saved = facts["resume_as"] in (None, LoadAs.SAVED) and is_same_state(best.facts, facts["state"])
    with data_alone(folder):
        if as_saved:
            deepspeed_load_checkpoint(engine, str(folder), load_module_strict=not is_adapter)
        else:
            _load_converted(engine, run, folder)
    return step


def _load_converted(engine: Any, run: RunDirectory, checkpoint: Path) -> None:
    folder = checkpoints.unfinished(run.checkpoints) / f"{checkpoint.name}-{LoadAs.WEIGHTS}"
    with disk_errors(run.checkpoints, f"the weights of {checkpoint.name}"), silenced():
        if dist.get_rank() == 0:
            checkpoints.clear_unfinished(run.checkpoints)
            write_weights(checkpoint, folder)
    dist.barrier()
    put_weights(engine, folder)
    dist.barrier()
    if dist.get_rank() == 0:
        checkpoints.clear_unfinished(run.checkpoints)
