"""From a recipe to its trainer: the arguments, the rows, the optimizer, the reference model, the loss.

Values come from recipe.json and deepspeed.json, except some of an optimizer's. `trainers` has what all
trainers do; `training_of` returns what is the objective's own, such as the `TRAINING` of `objectives.sft_training`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import PeftModel
from peft.optimizers import create_loraplus_optimizer
from transformers import PreTrainedModel, PrinterCallback, TrainingArguments

from tuner import paths
from tuner.data.batches import has_own_code
from tuner.data.compat import with_fingerprint
from tuner.data.image_encoder import ImageEncoder
from tuner.data.stream import Stream
from tuner.data.text_encoder import TextEncoder
from tuner.files import JsonObject
from tuner.models import vision
from tuner.models.load import DTYPES
from tuner.recipes.schema import RecipeConfig, expert_parallel, long_context, tensor_parallel
from tuner.runs import rank_files
from tuner.runs.checkpoints import unfinished
from tuner.worker import compat, compat_expert_parallel, compat_tensor_parallel, experts, long_rows, loss
from tuner.worker.objectives import training_of
from tuner.worker.pixels import read_images
from tuner.worker.rank_data import RankRows
from tuner.worker.run_files import RunFiles
from tuner.worker.trainer_types import BuiltTrainer

Models = tuple[PreTrainedModel, PreTrainedModel | None]
"""The model to train, and the frozen copy that it is compared with if the objective needs one."""
_SLOWEST_BETA = 0.9999
"""The beta of AdEMAMix's third moment (arXiv 2409.03137)."""


def arguments_of(files: RunFiles, device: torch.device) -> TrainingArguments:
    """Return the arguments of the objective's trainer. Make them first: from_pretrained asks them if ZeRO-3 shards."""
    config = files.config
    training = training_of(config.objective.type)
    objective = config.objective.model_dump(mode="json", exclude=set(config.objective.own_keys))
    offloads = {"activation_offloading": True} if config.train_cfg.activation_offloading else {}
    return training.arguments_type(**_common(files, device), **objective, **offloads, **training.fixed_arguments)


def _common(files: RunFiles, device: torch.device) -> dict[str, Any]:
    config, zero, run_dir = files.config, files.zero, files.run_dir
    optim, schedule = config.optim_wrapper.optimizer, config.param_scheduler
    if config.train_cfg.ranks_a_sample > 1:
        # transformers 5.24 takes every rank for a data-parallel one; accelerate works the number out again, rightly.
        zero = {key: value for key, value in zero.items() if key != "train_batch_size"}
    return dict(
        output_dir=str(rank_files.home_of(unfinished(run_dir.checkpoints), dist.get_rank())),
        deepspeed=zero,
        per_device_train_batch_size=config.split.micro_batch,
        per_device_eval_batch_size=config.val_dataloader.micro_batch if config.val_dataloader else 1,
        gradient_accumulation_steps=config.split.accumulation,
        learning_rate=optim.lr,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_epsilon=optim.eps,
        weight_decay=optim.weight_decay,
        max_grad_norm=zero["gradient_clipping"],
        num_train_epochs=config.train_cfg.max_epochs,
        max_steps=config.train_cfg.max_steps or -1,
        lr_scheduler_type=schedule.name,
        lr_scheduler_kwargs=schedule.options,
        warmup_steps=schedule.warmup,
        bf16=zero["bf16"]["enabled"],
        fp16=zero["fp16"]["enabled"],
        use_cpu=device.type == "cpu",
        gradient_checkpointing=config.split.recompute,
        gradient_checkpointing_kwargs={"use_reentrant": False} if config.split.recompute else None,
        torch_compile=bool(config.train_cfg.torch_compile),
        # The workers of a model that reads images make pixels (worker.pixels); collating text takes no time.
        dataloader_num_workers=0 if config.reads_images else config.train_dataloader.num_workers,
        dataloader_pin_memory=device.type not in ("cpu", "mps"),
        # Copies of pinned memory do not wait for what a GPU computes; a CPU copies nothing.
        accelerator_config={"non_blocking": device.type != "mps"},
        # The rows hold what the collators take and nothing else.
        remove_unused_columns=False,
        eval_strategy="no" if not config.val_dataloader else "steps" if config.train_cfg.val_interval else "epoch",
        eval_steps=config.train_cfg.val_interval,
        prediction_loss_only=True,
        save_strategy="steps",
        save_steps=config.checkpoint.interval,
        save_total_limit=None,  # CheckpointSaver prunes, after the newer checkpoint is known to be whole
        logging_strategy="steps",
        logging_steps=1,  # LogsSteps sets the number once the steps of the run are known
        logging_first_step=True,
        logging_nan_inf_filter=False,
        report_to="none",  # `trackers` holds them off the run
        run_name=f"{run_dir.path.parent.name}/{run_dir.path.name}",
        project="tuner",
        seed=config.randomness.seed,
        data_seed=config.randomness.seed,
        disable_tqdm=True,
        log_level="error",
    )


def trainer(files: RunFiles, arguments: TrainingArguments, models: Models, rows: RankRows) -> BuiltTrainer:
    """Return the objective's trainer, ready to train."""
    config, zero, launch_id, model = files.config, files.zero, files.record.launch_id, models[0]
    stream = rows.train if isinstance(rows.train, Stream) else None
    first_rows = rows.train.first if isinstance(rows.train, Stream) else rows.train
    train_rows = training_of(config.objective.type).ordered(config, first_rows.dataset)
    eval_rows = rows.val.dataset if rows.val else None
    if getattr(config.objective, "precompute_ref_log_probs", False):
        train_rows = _to_judge(config, train_rows, arguments.train_batch_size, launch_id)
        eval_rows = _to_judge(config, eval_rows, arguments.eval_batch_size, launch_id) if eval_rows else None
    shared_by = config.train_cfg.sequence_parallel_size
    refuse_untested(config, zero, model)
    if shared_by > 1:
        arguments.parallelism_config = long_rows.shared_by_ranks(config, arguments.world_size, model)
    if config.train_cfg.autotp_size > 1:
        compat_tensor_parallel.prepare()
    divides_experts = zero.get("expert_parallel", {}).get("enabled", False)
    if divides_experts:
        compat_expert_parallel.prepare()
    if config.train_cfg.tiled_mlp:
        long_rows.tile_mlps(model, config)
    built = _constructed(config, arguments, models, rows.encoder, train_rows, eval_rows, files.run_dir.path)
    if stream:  # TRL looks at what its constructor is given, and wants a data set of `datasets`
        built.train_dataset, built.stream = stream.rows, stream
    if shared_by > 1:
        compat.share_samples(built)
    if "optimizer" not in zero:
        built.optimizer_cls_and_kwargs = _optimizer(config)
    elif config.optim_wrapper.optimizer.type == "Muon":
        compat.keep_muon_off_embeddings(model)
    if str(zero.get("optimizer", {}).get("type")).lower() != "muon":
        compat.import_muon_without_compiler()
    compat.give_config_as_written(built, zero)
    if divides_experts and config.adapter is None:
        built.accelerator.get_state_dict = compat_expert_parallel.whole_weights  # for the Trainer's saves
    reset_reference_adapter(model, config)
    give_compute_type(model, dtype(zero))
    if config.adapter and files.zero_stage == 3:
        compat.know_moved_weights(model)
        compat.unpack_in_forward_alone(model)
    if config.train_cfg.loss == "whole":
        use_whole_logits(built, models, config)
    return built


def refuse_untested(config: RecipeConfig, zero: JsonObject, model: PreTrainedModel) -> None:
    """Refuse to share samples, or to split or divide a model, of a kind that the plan did not know.

    Raises:
        ModelError: no test knows that its ranks compute together what one computes alone.
    """
    kind, shared_by = model.config.get_text_config().model_type, config.train_cfg.sequence_parallel_size
    split_by, block = config.train_cfg.autotp_size, zero.get("expert_parallel", {})
    if has_own_code(model):
        kind = f"own code's {kind}"
    if shared_by > 1 and (problem := long_context.untested(shared_by, kind)):
        raise problem
    if split_by > 1 and (problem := tensor_parallel.untested(split_by, kind)):
        raise problem
    if block.get("enabled") and (problem := expert_parallel.untested(block["autoep_size"], kind)):
        raise problem


def _constructed(
    config: RecipeConfig,
    arguments: TrainingArguments,
    models: Models,
    encoder: TextEncoder,
    train_rows: Dataset,
    eval_rows: Dataset | None,
    folder: Path,
) -> BuiltTrainer:
    training, (model, reference) = training_of(config.objective.type), models
    training.before(arguments, config, model)
    extra_arguments: dict[str, Any] = {"ref_model": reference} if reference is not None else {}
    if collate := training.collator(config, encoder.pad_id):
        extra_arguments["data_collator"] = collate
    extra_arguments |= training.constructor(config, folder, encoder)
    rows = {"train_dataset": train_rows, "eval_dataset": eval_rows}
    with experts.balanced(model, config.model.router_aux_loss_coef):
        built: BuiltTrainer = training.trainer(
            model=model, args=arguments, processing_class=encoder.library_object, **rows, **extra_arguments
        )
    built.remove_callback(PrinterCallback)
    training.after(built, config)
    if config.reads_images:
        read_images(built, model, cast(ImageEncoder, encoder), config.train_dataloader.num_workers)
    return built


def use_whole_logits(built: BuiltTrainer, models: Models, config: RecipeConfig) -> None:
    """Compute a trainer's losses from whole logits; the reference model's log-probabilities too."""
    metrics = training_of(config.objective.type).whole_logit_metrics(built, config)
    model, reference = models
    loss.use_whole_logits(model.get_base_model() if isinstance(model, PeftModel) else model, metrics)
    if reference is not None:
        loss.use_whole_logits(reference, ())


def evaluator(
    config: RecipeConfig, models: Models, encoder: TextEncoder, rows: Dataset, batch_size: int, folder: str
) -> BuiltTrainer:
    """Return the objective's trainer on one process and without DeepSpeed, for its `evaluate` alone.

    Args:
        rows: As `prepare` returned them; some, since trainers look at the first of them.
    """
    training = training_of(config.objective.type)
    # The reference model judges each batch with the model, and nothing before.
    left_out = {*config.objective.own_keys, "precompute_ref_log_probs", "precompute_ref_batch_size"}
    arguments = training.arguments_type(
        output_dir=folder,
        per_device_eval_batch_size=batch_size,
        # TRL checks it, and nothing is trained: all completions of a prompt, and enough rows for the loss.
        per_device_train_batch_size=config.objective.samples_a_row * config.objective.least_batch_size,
        use_cpu=models[0].device.type == "cpu",
        bf16=False,  # the weights are in the compute type, as under DeepSpeed: nothing casts them
        gradient_checkpointing=False,
        remove_unused_columns=False,
        prediction_loss_only=True,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        seed=config.randomness.seed,
        **config.objective.model_dump(mode="json", exclude=left_out),
        **training.fixed_arguments,
    )
    compat.use_one_gpu(arguments)
    built = _constructed(config, arguments, models, encoder, rows, rows, Path(folder))
    reset_reference_adapter(models[0], config, is_trained=True)
    give_compute_type(models[0], models[0].dtype)
    return built


def reset_reference_adapter(model: PreTrainedModel, config: RecipeConfig, *, is_trained: bool = False) -> None:
    """Make TRL's copy of the adapter, its reference, what training began with; without a beginning remove it.

    Args:
        is_trained: The model is trained already, and TRL's copy is of the trained adapter.
    """
    if not (isinstance(model, PeftModel) and "ref" in model.peft_config):
        return
    began = config.adapter.path if config.adapter else None
    if began and not is_trained:
        # The copy is the reference, and of no use in a checkpoint or the result.
        model.save_pretrained = partial(model.save_pretrained, selected_adapters=["default"])
        return
    # A new adapter does nothing yet: the base model alone is the same reference, and the copy would take memory and be
    # saved.
    model.delete_adapter("ref")
    if began:
        model.load_adapter(str(paths.expanded(began)), "ref", autocast_adapter_dtype=False)


def give_compute_type(model: PreTrainedModel, compute_dtype: torch.dtype) -> None:
    """Give trained weights in bf16 the compute type: TRL makes a quantized model's adapters bf16 whatever it is."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype == torch.bfloat16 != compute_dtype:
            parameter.data = parameter.data.to(compute_dtype)


def _to_judge(config: RecipeConfig, rows: Dataset, micro_batch: int, launch_id: str) -> Dataset:
    """Return rows that a reference can judge before training, in other micro-batches, with a name of this launch alone.

    TRL keeps the log-probabilities by that name and a hash of the reference's weights, which at ZeRO-3 is the same for
    every model of an architecture: another model's log-probabilities would be taken for this one's.
    """
    return with_fingerprint(training_of(config.objective.type).judged_before(config, rows, micro_batch), launch_id)


def _optimizer(config: RecipeConfig) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the class that `type` names, or what makes LoRA+ with it, and those of the settings that it takes."""
    block = config.optim_wrapper.optimizer
    cls = getattr(torch.optim, block.type, None)
    if cls is None:
        import bitsandbytes.optim  # it prints about missing kernels when imported

        cls = getattr(bitsandbytes.optim, block.type)
    parameters = inspect.signature(cls).parameters
    # torch 2.13's optimizers that have one kernel for all parameters have it on CPUs too.
    betas = (*block.betas, _SLOWEST_BETA) if block.type == "AdEMAMix" else block.betas
    settings = {"lr": block.lr, "betas": betas, "eps": block.eps, "fused": True}
    taken = {key: value for key, value in settings.items() if key in parameters}
    # transformers calls what is no class, and then what that returns with the model.
    if block.projector_lr:
        return lambda: partial(_with_projector, cls, block.projector_lr, block.weight_decay), taken
    if not block.loraplus_lr_ratio:
        return cls, taken
    loraplus_settings = {"loraplus_lr_ratio": block.loraplus_lr_ratio, "loraplus_weight_decay": block.weight_decay}
    # It replaces the optimizer's class and the Trainer's groups of weights.
    return lambda: partial(create_loraplus_optimizer, optimizer_cls=cls), {**taken, **loraplus_settings}


def _with_projector(
    cls: type[torch.optim.Optimizer], rate: float, weight_decay: float, model: PreTrainedModel, **settings: Any
) -> torch.optim.Optimizer:
    """Return the optimizer with groups of weights as the Trainer's, and two more for the projector with its rate."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    part_of = vision.parts_of(base)
    groups: dict[tuple[bool, bool], list[torch.nn.Parameter]] = {}
    for name, weight in base.named_parameters():
        if weight.requires_grad:
            num_axes = len(getattr(weight, "ds_shape", weight.shape))  # ZeRO-3 leaves no shape to a sharded weight
            key = (part_of[name] == "projector", num_axes > 1)
            groups.setdefault(key, []).append(weight)
    listed = [
        {"params": weights, "weight_decay": weight_decay * is_decayed, **({"lr": rate} if is_projector else {})}
        for (is_projector, is_decayed), weights in groups.items()
    ]
    return cls(listed, **settings)


def dtype(zero: dict[str, Any]) -> torch.dtype:
    """Return the compute type that deepspeed.json states."""
    return next((DTYPES[key] for key in ("bf16", "fp16") if zero[key]["enabled"]), torch.float32)
