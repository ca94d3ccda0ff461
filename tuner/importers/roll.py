"""Translates ROLL's YAML: the role that trains becomes a recipe; keys of the rollout pipeline have no counterpart.

`defaults` includes DeepSpeed presets from files next to it, which `${...}` refers to. `device_mapping` is a Python
expression for a list of GPUs: it is parsed, never evaluated.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import replace

from tuner.errors import Option, RecipeError
from tuner.importers import aliases, deepspeed, image_keys, key_tables, roll_pipeline, shared_rules
from tuner.importers.aliases import Alias, by_word
from tuner.importers.document import ForeignConfig, Value
from tuner.importers.translation import Outcome, Rule, Setting, Tool, Translation, of_objective, recorded_with
from tuner.recipes import yaml_text
from tuner.recipes.merging import lookup
from tuner.recipes.yaml_text import Yaml

_ROLES = ("sft_train", "student", "actor_train")
"""The roles that train a language model; the first one in the config is imported."""
_MAX_GPUS = 100_000
_TRAINS = {"deepspeed_train", "megatron_train", "fsdp2_train"}


def with_defaults(document: ForeignConfig) -> ForeignConfig:
    """Return the document with every `${...}` replaced by a value of the document or of the files in `defaults`."""
    defaults = Yaml(
        {key: value for key, value in document.values.items() if key == yaml_text.DEFAULTS}, dict(document.lines)
    )
    inherited = yaml_text.with_defaults(defaults, document.folder, document.name, RecipeError).values
    used = replace(document, values=inherited | document.values).resolved(is_complete=not defaults.values)
    values = {key: value for key, value in used.values.items() if key not in inherited}
    return replace(used, values=values)


def _role(document: ForeignConfig) -> str:
    roles = [role for role in _ROLES if isinstance(document.values.get(role), dict)]
    return roles[0] if roles else _ROLES[0]


def _prepare(t: Translation) -> None:
    values, role = t.document.values, _role(t.document)
    t.method = "lora" if lookup(values, (role, "model_args", "lora_rank")) else "full"
    is_dpo = role == "actor_train" and any(key in values for key in ("chosen_key", "rejected_key", "ipo"))
    t.objective = "dpo" if is_dpo else "sft"
    if role == "student":
        roll_pipeline.prepare_distillation(t)
    elif role == "actor_train" and not is_dpo:
        roll_pipeline.prepare(t)
    key = {"student": "student_pretrain"}.get(role, "pretrain")
    if (setting := t.settings.get(key)) and setting.value:
        t.model = setting


def weights(t: Translation, setting: Setting) -> None:
    """Record the weights of another role; `_prepare` has taken those of the imported role."""
    if t.model is not setting:
        t.leave(setting, "of a role that tuner does not support")


def strategy(t: Translation, setting: Setting) -> None:
    """Record the strategy that trains the role."""
    word = str(setting.value)
    if word == "deepspeed_train":
        t.note(setting, Outcome.TAKEN, why="DeepSpeed")
    elif word in _TRAINS:
        t.note(setting, Outcome.CHANGED, why=f"{word}: tuner trains with DeepSpeed")
    else:
        t.obstacle = t.obstacle or f"{word} does not train a language model"
        t.note(setting, Outcome.CHANGED, why=f"tuner has no {word}")


def strategy_config(t: Translation, setting: Setting) -> None:
    """Set the DeepSpeed config; the config of another strategy has no counterpart."""
    name = str(lookup(t.document.values, (setting.keys[0], "strategy_args", "strategy_name")))
    if "deepspeed" not in name:
        t.leave(setting, f"of {name}; tuner trains with DeepSpeed: {Option('deepspeed')}")
    elif isinstance(setting.value, dict):
        t.set(setting, "deepspeed", setting.value)
    else:
        deepspeed.chosen(t, replace(setting, value=str(setting.value).removeprefix("${").removesuffix("}")))


def device_mapping(t: Translation, setting: Setting) -> None:
    """Report the number of the role's GPUs, which the launcher sets in tuner."""
    t.leave(setting, f"{len(_gpus(setting))} GPUs: the launcher sets it, {Option('nproc_per_node')} and --nnodes")


def _gpus(setting: Setting) -> list[int]:
    try:
        return _listed(ast.parse(str(setting.value).strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        fix = "Use list(range(0,8)) or [0, 1]: it is read, never evaluated."
        raise setting.wrong("not a list of GPUs", fix) from None


def _listed(node: ast.expr) -> list[int]:
    match node:
        case ast.List(elts=items):
            return [_number(item) for item in items]
        case ast.Call(func=ast.Name(id="list"), args=[inner], keywords=[]):
            return _listed(inner)
        case ast.Call(func=ast.Name(id="range"), args=items, keywords=[]) if 1 <= len(items) <= 3:
            numbers = range(*map(_number, items))
            if len(numbers) <= _MAX_GPUS:
                return list(numbers)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [*_listed(left), *_listed(right)]
    raise ValueError("not a list of GPUs")


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and 0 <= node.value <= _MAX_GPUS:
        return node.value
    raise ValueError("not a GPU number")


def files(t: Translation, setting: Setting) -> None:
    """Add the role's files, with the columns that the top of the config names."""
    values = t.document.values
    words = setting.words()
    keys = {"prompt_key": "instruction", "query_key": "input", "response_key": "output", "system_key": "system"}
    if t.objective == roll_pipeline.GRPO:
        keys = {}
    elif t.objective == "dpo":
        keys = {"prompt_key": "prompt", "chosen_key": "chosen", "rejected_key": "rejected"}
    elif "question_key" in values:
        keys = {"question_key": "instruction", "answer_key": "output"}
    columns = {
        our_column: str(values[key])
        for key, our_column in keys.items()
        if values.get(key) and str(values[key]) != our_column
    }
    format_ = "preference" if t.objective == "dpo" else "alpaca" if keys.keys() & values.keys() else None
    for word in words:
        t.datasets.append({"path": word, "format": format_, "columns": columns or None, "split": "train"})
    t.note(setting, Outcome.TRANSLATED, f"{len(words)} data sets")


def max_steps(t: Translation, setting: Setting) -> None:
    """Set the number of steps; in a reinforcement-learning pipeline it counts rollouts."""
    role = _role(t.document)
    if t.objective == roll_pipeline.GRPO:
        mapping = t.settings.get(f"{role}.device_mapping")
        roll_pipeline.steps(t, setting, role, len(_gpus(mapping)) if mapping and mapping.value else 1)
    else:
        t.set(setting, "train_cfg.max_steps", setting.value if setting.number() > 0 else None)


def _defaults(document: ForeignConfig) -> Mapping[str, Value]:
    role = _role(document)
    adapter = {f"{role}.model_args.lora_alpha": 32, f"{role}.model_args.lora_target": "all-linear"}
    is_lora = bool(lookup(document.values, (role, "model_args", "lora_rank")))
    warmup = [lookup(document.values, (role, "training_args", key)) for key in ("warmup_steps", "warmup_ratio")]
    warm = {} if any(value is not None for value in warmup) else {f"{role}.training_args.warmup_ratio": 0.0}
    return {
        f"{role}.training_args.per_device_train_batch_size": 8,
        f"{role}.training_args.gradient_accumulation_steps": 1,
        f"{role}.training_args.num_train_epochs": 1,
        f"{role}.training_args.learning_rate": 5e-5,
        f"{role}.training_args.lr_scheduler_type": "linear",
        f"{role}.training_args.weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "seed": 42,
        **warm,
        **(adapter if is_lora else {}),
        **({} if document.values.get("sequence_length") else {"_packing": False}),
        **(roll_pipeline.DISTILL_DEFAULTS if role == "student" else {}),
    }


_OF_ROLE: Mapping[str, Rule] = by_word(
    {
        "strategy_args.strategy_name": strategy,
        "strategy_args.strategy_config": strategy_config,
        "device_mapping": device_mapping,
        "model_args.attn_implementation model_args.flash_attn": aliases.table()["attn_impl"],
        "model_args.dtype": aliases.table()["torch_dtype"],
        "model_args.disable_gradient_checkpointing": aliases.table()["disable_gradient_checkpointing"],
        "model_args.lora_target": shared_rules.target,
        "model_args.model_name_or_path": recorded_with("the role's weights"),
        "training_args.adam_beta1 training_args.adam_beta2": shared_rules.betas,
        "training_args.warmup_steps": shared_rules.warmup_steps,
        "training_args.warmup_ratio": shared_rules.warmup_ratio,
        "training_args.num_train_epochs": shared_rules.epochs,
        "training_args.max_steps": max_steps,
        "training_args.lr_scheduler_type": shared_rules.schedule,
        "data_args.file_name": files,
        "data_args.template": shared_rules.named_template,
        "data_args.image_folder": image_keys.folder,
        "data_args.image_max_pixels": image_keys.of_images("train_dataloader.dataset.image_max_pixels"),
        "data_args.image_min_pixels": image_keys.of_images("train_dataloader.dataset.image_min_pixels"),
    }
)

_WORDS = key_tables.of("roll")
_PIPELINES = {**roll_pipeline.RULES, **roll_pipeline.DISTILL_RULES}
TABLE: Mapping[str, Rule] = {
    **_PIPELINES,  # first: their patterns are narrower
    **{key: rule for key, rule in _WORDS.rules.items() if key not in _PIPELINES},
    **by_word(
        {
            "pretrain student_pretrain": weights,
            "max_steps": max_steps,
            "max_grad_norm": shared_rules.clipping,
            "save_steps": shared_rules.interval("checkpoint.interval"),
            "logging_steps": shared_rules.interval("log.interval"),
            "eval_steps": shared_rules.interval("train_cfg.val_interval"),
            "max_ckpt_to_keep": shared_rules.kept,
            "global_template": shared_rules.named_template,
            "track_with": shared_rules.trackers,
            "ipo": of_objective("dpo", Alias("objective.loss_type", {"true|yes|1": "ipo", ".*": "sigmoid"})),
        }
    ),
    **{f"{role}.{key}": rule for role in _ROLES for key, rule in _OF_ROLE.items()},
}

TOOL = Tool("ROLL", TABLE, _defaults, prepare=_prepare, begin=with_defaults, others=_WORDS.others)
