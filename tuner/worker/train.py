"""One rank's training: what the run directory says, handed to a trainer of TRL on DeepSpeed.

It decides nothing about the run: every value comes from recipe.py, deepspeed.json and run.json.
"""

from __future__ import annotations

import time
from typing import Any

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
import transformers

from tuner.errors import Stopped
from tuner.machine.topology import Rank
from tuner.recipes.recipe import load
from tuner.recipes.schema import RecipeConfig
from tuner.runs.directory import RunDirectory
from tuner.worker import trainers
from tuner.worker.callbacks import AsWritten, Bar, FreshAdam, Metrics, Seal, Stop
from tuner.worker.data.prepare import Prepared, describe, located, prepare
from tuner.worker.guard import Guard
from tuner.worker.models.load import load_model, load_reference, load_tokenizer, source
from tuner.worker.samples import show_samples
from tuner.worker.save import save_result


def train(run: RunDirectory, rank: Rank, guard: Guard) -> None:
    """Train, save the result to `run.final`, and show what it learned.

    Raises:
        TunerError: data, model or machine are not what the recipe needs, or the loss is no number.
        Stopped: a signal asked for it; a checkpoint of this very step was written.
    """
    started = time.monotonic()
    config = load(str(run.recipe)).config
    facts, zero = run.read_json(run.run), run.read_json(run.deepspeed)
    device = _join(rank, config)
    arguments = trainers.arguments(config, zero, run, device)
    path = source(config.model)
    tokenizer = load_tokenizer(config.model, path)
    data = _data(config, tokenizer, rank)
    how = (config, path, trainers.dtype(zero), str(device))
    models = load_model(*how, shards=_stage(zero) == 3), load_reference(*how, shards=_stage(zero) == 3)
    trainer = trainers.trainer(config, arguments, models, tokenizer, data, run)
    callbacks = _callbacks(run, guard, device, config, facts, rank)
    for callback in (*callbacks, AsWritten(trainer, zero), FreshAdam(trainer)):
        trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=facts["resume"])
    stop = callbacks[0]
    if stop.step:
        again = f"Go on: tuner train {run.recipe} --resume {run.path}"
        raise Stopped(f"at step {stop.step} on request; its checkpoint is saved", fix=again)
    save_result(trainer, tokenizer, run.final)
    if rank.rank == 0:
        _finish(run, config, trainer, time.monotonic() - started)


def _join(rank: Rank, config: RecipeConfig) -> torch.device:
    """Join the process group and return this rank's device."""
    transformers.set_seed(config.randomness.seed)
    if torch.cuda.is_available():
        torch.cuda.set_device(rank.local_rank)
        deepspeed.init_distributed(dist_backend="nccl")
        return torch.device("cuda", rank.local_rank)
    # DeepSpeed would build a shared-memory collective with a C++ compiler (37 s) that a first run need not have.
    # accelerate opens no group before ZeRO-3's zero.Init on a CPU, which then counts one rank: so it is opened here.
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(dist_backend="gloo")
    return torch.device("cpu")


def _data(config: RecipeConfig, tokenizer: Any, rank: Rank) -> tuple[Prepared, Prepared | None]:
    """Prepare the data once a node: local rank 0 first, the others from its cache."""
    loaders = {"train": config.train_dataloader, "validation": config.val_dataloader}
    if rank.local_rank != 0:
        dist.barrier()
    prepared = {
        name: prepare(located(loader.dataset), tokenizer, objective=config.objective.type) if loader else None
        for name, loader in loaders.items()
    }
    if rank.local_rank == 0:
        dist.barrier()
    for name, result in prepared.items():
        if result and rank.rank == 0:
            print(describe(result, name), flush=True)
    train_data = prepared["train"]
    assert train_data is not None
    return train_data, prepared["validation"]


def _callbacks(
    run: RunDirectory, guard: Guard, device: torch.device, config: RecipeConfig, facts: dict[str, Any], rank: Rank
) -> tuple[Stop, Seal, Metrics]:
    saved = {"world_size": facts["world_size"], "deepspeed": facts["deepspeed"]}
    return (
        Stop(guard, device),
        Seal(run, saved, config.checkpoint.max_keep_ckpts),
        Metrics(run, Bar(guard.terminal) if rank.rank == 0 else None),
    )


def _finish(run: RunDirectory, config: RecipeConfig, trainer: Any, seconds: float) -> None:
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    step = trainer.state.global_step
    run.write_status("done", exit_code=0, step=step, loss=losses[-1] if losses else None, seconds=round(seconds, 1))
    print(f"Trained {step} steps in {seconds:.0f} s.", flush=True)
    if config.log.num_samples and config.val_dataloader:
        show_samples(config, run)
    print(f"\nResult:  {run.final}\nMetrics: {run.metrics}\nRecipe:  {run.recipe}")
    print(f"Next: change a copy of the recipe and train it: tuner train {run.recipe} --set lr=...", flush=True)


def _stage(zero: dict[str, Any]) -> int:
    return int(zero.get("zero_optimization", {}).get("stage", 0))
