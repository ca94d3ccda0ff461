"""Translates transformers' `TrainingArguments`, which LLaMA-Factory, TRL, ms-swift and Axolotl share."""

from __future__ import annotations

from collections.abc import Mapping

from tuner.files import JsonObject
from tuner.importers import aliases, deepspeed, key_tables, shared_rules
from tuner.importers.aliases import by_word
from tuner.importers.document import ForeignConfig, Value
from tuner.importers.translation import Rule, Tool, when_on

_WORDS = key_tables.of("training_arguments")
TABLE: Mapping[str, Rule] = {
    **_WORDS.rules,
    "max_steps": aliases.table()["max_steps"],
    "gradient_checkpointing": aliases.table()["gradient_checkpointing"],
    **by_word(
        {
            "torch_compile": shared_rules.switched("train_cfg.torch_compile"),
            "num_train_epochs": shared_rules.epochs,
            "lr_scheduler_type": shared_rules.schedule,
            "lr_scheduler_kwargs": shared_rules.schedule_options,
            "neftune_noise_alpha": shared_rules.noise,
            "warmup_ratio": shared_rules.warmup_ratio,
            "warmup_steps": shared_rules.warmup_steps,
            "optim": shared_rules.optimizer,
            "adam_beta1 adam_beta2": shared_rules.betas,
            "max_grad_norm": shared_rules.clipping,
            "bf16 fp16": shared_rules.compute_type,
            "report_to": shared_rules.trackers,
            "logging_steps": shared_rules.interval("log.interval"),
            "save_steps": shared_rules.interval("checkpoint.interval"),
            "eval_steps": shared_rules.interval("train_cfg.val_interval"),
            "save_total_limit": shared_rules.kept,
            "eval_strategy evaluation_strategy": shared_rules.by_strategy("validation runs", "train_cfg.val_interval"),
            "save_strategy": shared_rules.by_strategy("checkpoints are saved", "checkpoint.interval"),
            "logging_strategy": shared_rules.by_strategy("metrics are written", "log.interval"),
            "load_best_model_at_end": when_on(
                "checkpoint.save_best",
                "eval_loss",
                "the last weights are the result, as they are without checkpoint.save_best",
            ),
            "deepspeed": deepspeed.chosen,
            "accelerate_config": deepspeed.of_accelerate,
            "parallelism_config": shared_rules.parallelism,
        }
    ),
}

DEFAULTS: Mapping[str, Value] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "logging_steps": 500,
    "save_steps": 500,
    "seed": 42,
    "gradient_checkpointing": False,
}
"""Defaults of transformers 5 that differ from those of a recipe."""


def defaults(document: ForeignConfig) -> JsonObject:
    """Return `DEFAULTS`, without warm-up if the source sets no warm-up."""
    has_warmup = any(document.values.get(key) is not None for key in ("warmup_ratio", "warmup_steps"))
    return {**DEFAULTS, **({} if has_warmup else {"warmup_ratio": 0.0})}


TOOL = Tool("TrainingArguments", {**TABLE, "model_name_or_path": shared_rules.model}, defaults, others=_WORDS.others)
"""A file with these keys only names no model and no data: --model and --data give them."""
