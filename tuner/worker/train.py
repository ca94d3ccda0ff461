"""One rank's training: what the run directory says, handed to TRL's SFTTrainer on DeepSpeed.

It decides nothing about the run: every value comes from recipe.py, deepspeed.json and run.json.
"""

from __future__ import annotations

import inspect
import time
from typing import Any

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
import transformers
from transformers import PrinterCallback
from trl import SFTConfig, SFTTrainer

from tuner.errors import Stopped, TunerError
from tuner.machine.topology import Rank
from tuner.recipes.recipe import load
from tuner.recipes.schema import RecipeConfig
from tuner.runs.directory import RunDirectory
from tuner.worker.callbacks import AsWritten, Bar, FreshAdam, Metrics, Seal, Stop
from tuner.worker.data.prepare import Prepared, describe, prepare
from tuner.worker.guard import Guard
from tuner.worker.models.load import load_model, load_tokenizer, source
from tuner.worker.samples import located, show_samples
from tuner.worker.save import save_result

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


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
    arguments = _arguments(config, zero, run, device)  # first: from_pretrained asks it whether ZeRO-3 shards
    path = source(config.model)
    tokenizer = load_tokenizer(config.model, path)
    data = _data(config, tokenizer, rank)
    model = load_model(config, path, _dtype(zero), str(device), shards=_stage(zero) == 3)
    trainer = _trainer(config, arguments, model, tokenizer, data, zero)
    callbacks = _callbacks(run, guard, device, config, facts, rank)
    for callback in (*callbacks, AsWritten(trainer, zero), FreshAdam(trainer)):
        trainer.add_callback(callback)
    with _out_of_memory(rank):
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


def _arguments(config: RecipeConfig, zero: dict[str, Any], run: RunDirectory, device: torch.device) -> SFTConfig:
    optim, schedule = config.optim_wrapper.optimizer, config.param_scheduler
    constant = schedule.type == "constant" and schedule.warmup_ratio > 0
    return SFTConfig(
        output_dir=str(run.checkpoints),
        deepspeed=zero,
        per_device_train_batch_size=config.train_dataloader.batch_size,
        per_device_eval_batch_size=config.val_dataloader.batch_size if config.val_dataloader else 1,
        gradient_accumulation_steps=config.optim_wrapper.accumulative_counts,
        learning_rate=optim.lr,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_epsilon=optim.eps,
        weight_decay=optim.weight_decay,
        max_grad_norm=zero["gradient_clipping"],
        num_train_epochs=config.train_cfg.max_epochs,
        max_steps=config.train_cfg.max_steps or -1,
        lr_scheduler_type="constant_with_warmup" if constant else schedule.type,
        warmup_steps=schedule.warmup_ratio,
        bf16=zero["bf16"]["enabled"],
        fp16=zero["fp16"]["enabled"],
        use_cpu=device.type == "cpu",
        gradient_checkpointing=config.train_cfg.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if config.train_cfg.gradient_checkpointing else None,
        dataloader_num_workers=config.train_dataloader.num_workers,
        dataloader_pin_memory=device.type == "cuda",
        eval_strategy="epoch" if config.val_dataloader else "no",
        prediction_loss_only=True,
        save_strategy="steps",
        save_steps=config.checkpoint.interval,
        save_total_limit=None,  # Seal prunes, after the newer checkpoint is known to be whole
        logging_strategy="steps",
        logging_steps=config.log.interval,
        logging_first_step=True,
        logging_nan_inf_filter=False,
        report_to=list(config.log.trackers) or "none",
        seed=config.randomness.seed,
        data_seed=config.randomness.seed,
        disable_tqdm=True,
        log_level="error",
        # The rows come tokenized and packed; the collator separates the samples of a row by their position_ids.
        dataset_kwargs={"skip_prepare_dataset": True},
        padding_free=True,
        packing=False,
        max_length=None,
        shuffle_dataset=False,
    )


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


def _trainer(
    config: RecipeConfig,
    arguments: SFTConfig,
    model: Any,
    tokenizer: Any,
    data: tuple[Prepared, Prepared | None],
    zero: dict[str, Any],
) -> SFTTrainer:
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=data[0].dataset,
        eval_dataset=data[1].dataset if data[1] else None,
        processing_class=tokenizer,
        optimizer_cls_and_kwargs=None if "optimizer" in zero else _optimizer(config),
    )
    trainer.remove_callback(PrinterCallback)
    # accelerate silences DeepSpeed's printing whatever the config says, with a value that JSON cannot hold.
    used = trainer.accelerator.state.deepspeed_plugin.deepspeed_config
    used.pop("steps_per_print", None)
    used |= {key: zero[key] for key in ("steps_per_print",) if key in zero}
    for parameter in model.parameters():
        # TRL makes the adapters of a quantized model bf16 whatever the run's compute type is.
        if parameter.requires_grad and parameter.dtype == torch.bfloat16 != _dtype(zero):
            parameter.data = parameter.data.to(_dtype(zero))
    return trainer


def _optimizer(config: RecipeConfig) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the class that `optimizer.type` names and those of its settings that the class takes."""
    block = config.optim_wrapper.optimizer
    cls = getattr(torch.optim, block.type, None) or _bitsandbytes_optimizer(block.type)
    known = inspect.signature(cls).parameters
    settings = {"lr": block.lr, "betas": block.betas, "eps": block.eps}
    return cls, {key: value for key, value in settings.items() if key in known}


def _bitsandbytes_optimizer(name: str) -> type[torch.optim.Optimizer]:
    import bitsandbytes.optim  # it prints about missing kernels when imported, so only who asks for it loads it

    found: type[torch.optim.Optimizer] = getattr(bitsandbytes.optim, name)
    return found


def _callbacks(
    run: RunDirectory, guard: Guard, device: torch.device, config: RecipeConfig, facts: dict[str, Any], rank: Rank
) -> tuple[Stop, Seal, Metrics]:
    saved = {"world_size": facts["world_size"], "deepspeed": facts["deepspeed"]}
    return (
        Stop(guard, device),
        Seal(run, saved, config.checkpoint.max_keep_ckpts),
        Metrics(run, Bar() if rank.rank == 0 else None),
    )


def _finish(run: RunDirectory, config: RecipeConfig, trainer: SFTTrainer, seconds: float) -> None:
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    step = trainer.state.global_step
    run.write_status("done", exit_code=0, step=step, loss=losses[-1] if losses else None, seconds=round(seconds, 1))
    print(f"Trained {step} steps in {seconds:.0f} s.", flush=True)
    if config.log.num_samples and config.val_dataloader:
        show_samples(config, run)
    print(f"\nResult:  {run.final}\nMetrics: {run.metrics}\nRecipe:  {run.recipe}")
    print(f"Next: change a copy of the recipe and train it: tuner train {run.recipe} --set lr=...", flush=True)


class _out_of_memory:
    """Turn the GPU's out-of-memory error into a message that says what to change."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            fix = "Halve batch_size and double accumulative_counts, shorten max_length, or take a higher ZeRO level."
            raise TunerError(f"rank {self.rank.rank} ran out of GPU memory", fix=fix) from error


def _dtype(zero: dict[str, Any]) -> torch.dtype:
    """Return the compute type that deepspeed.json states."""
    return next((dtype for key, dtype in _DTYPES.items() if zero[key]["enabled"]), torch.float32)


def _stage(zero: dict[str, Any]) -> int:
    return int(zero.get("zero_optimization", {}).get("stage", 0))
