"""The weights of a run's best checkpoint, for its result; an attempt with other ranks may have saved it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers.integrations.deepspeed import deepspeed_load_checkpoint

from tuner.runs import checkpoints
from tuner.runs.directory import RunDirectory
from tuner.runs.resume_point import LoadAs, is_same_state
from tuner.worker import resume
from tuner.worker.checkpointing import disk_errors
from tuner.worker.validation import best_step


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
    with resume.data_alone(folder):
        if as_saved:
            deepspeed_load_checkpoint(engine, str(folder), load_module_strict=not is_adapter)
        else:
            _load_converted(engine, run, folder)
    return step


def _load_converted(engine: Any, run: RunDirectory, checkpoint: Path) -> None:
    folder = checkpoints.unfinished(run.checkpoints) / f"{checkpoint.name}-{LoadAs.WEIGHTS}"
    with disk_errors(run.checkpoints, f"the weights of {checkpoint.name}"), resume.silenced():
        if dist.get_rank() == 0:
            checkpoints.clear_unfinished(run.checkpoints)
            resume.write_weights(checkpoint, folder)
    dist.barrier()
    resume.put_weights(engine, folder)
    dist.barrier()
    if dist.get_rank() == 0:
        checkpoints.clear_unfinished(run.checkpoints)
