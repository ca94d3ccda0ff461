"""The result of training: the weights that are kept, written as the same files from every ZeRO stage.

Resumable checkpoints are the trainer's; this is what a user publishes, for transformers and peft alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from peft import PeftModel
from transformers.integrations.deepspeed import deepspeed_load_checkpoint

from tuner.assets import without_generation_marks
from tuner.runs import checkpoints
from tuner.runs.directory import RunDirectory
from tuner.runs.resume_point import LoadAs, is_same_state
from tuner.worker import compat_checkpoints, resume
from tuner.worker.checkpointing import best_step, disk_errors
from tuner.worker.generation import stop_where_answers_end


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


def save_final_model(trainer: Any, tokenizer: Any, folder: Path) -> None:
    """Write weights (or adapter), tokenizer with its chat template, and generation config; every rank takes part."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    state = _gathered(trainer.deepspeed, model)
    if dist.get_rank() == 0:
        # Not Trainer.save_model: it adds training_args.bin, a pickle, to what a user will publish.
        # PEFT would save embeddings that an adapter is on, or that were given rows, up to three times.
        once = {"save_embedding_layers": False} if isinstance(model, PeftModel) else {}
        model.save_pretrained(folder, state_dict=state, **once)
        if isinstance(tokenizer.chat_template, str):
            tokenizer.chat_template = without_generation_marks(tokenizer.chat_template)
        tokenizer.save_pretrained(folder)
        if generation := getattr(model, "generation_config", None):  # a model that scores has none
            stop_where_answers_end(generation, tokenizer)
            generation.save_pretrained(folder)
    dist.barrier()


def _gathered(engine: Any, model: Any) -> dict[str, Any] | None:
    """Return ZeRO-3's weights, whole, on rank 0; None where every rank holds the whole model."""
    if engine.zero_optimization_stage() < 3:
        return None
    is_adapter = isinstance(model, PeftModel)
    state = compat_checkpoints.whole_weights(engine, trained_alone=is_adapter)
    # Each name of a shared weight is gathered into a tensor of its own, which below stage 3 is saved once.
    tied = {} if is_adapter else model.all_tied_weights_keys
    return {name: weight for name, weight in state.items() if name not in tied}
