"""ROLL's YAML: the role that trains becomes a recipe, and what belongs to its pipeline of rollouts is named as such.

`defaults` lays presets of DeepSpeed beside it over its root, `${...}` names them, and `device_mapping` is Python's
syntax for a list of GPUs: it is parsed, never evaluated.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tuner.errors import RecipeError
from tuner.importers import deepspeed, training_arguments
from tuner.importers.document import Document
from tuner.importers.training_arguments import NUM_PROC, attention, truth
from tuner.importers.translation import Given, Outcome, Rule, Tool, Translation, told_with
from tuner.recipes import hydra
from tuner.recipes.aliases import ALIASES, Alias, by_word
from tuner.recipes.merging import lookup
from tuner.recipes.yaml_text import Yaml

_ROLES = ("sft_train", "student", "actor_train")
"""The roles that train a language model, the first that is there is meant."""
_MAX_GPUS = 100_000
_TRAINS = {"deepspeed_train", "megatron_train", "fsdp2_train"}


def with_defaults(document: Document) -> Document:
    """Return a document with every `${...}` replaced, by values of its own or of the files that `defaults` names."""
    named = Yaml({key: value for key, value in document.values.items() if key == hydra.DEFAULTS}, dict(document.lines))
    found = hydra.merged(named, document.folder, document.name, RecipeError).values
    used = replace(document, values=found | document.values).resolved(whole=not named.values)
    values = {key: value for key, value in used.values.items() if key not in found}
    return replace(used, values=values)


def _role(document: Document) -> str:
    named = [role for role in _ROLES if isinstance(document.values.get(role), dict)]
    return named[0] if named else _ROLES[0]


def _prepare(t: Translation) -> None:
    said, role = t.document.values, _role(t.document)
    t.method = "lora" if lookup(said, (role, "model_args", "lora_rank")) else "full"
    is_dpo = role == "actor_train" and any(key in said for key in ("chosen_key", "rejected_key", "ipo"))
    t.objective = "dpo" if is_dpo else "sft"
    if role == "student":
        t.obstacle = "tuner does not support distillation: the student would learn only from the rows"
    elif role == "actor_train" and not is_dpo:
        t.obstacle = "tuner does not support reinforcement learning: the actor would learn from rows, not from rewards"
    key = {"student": "student_pretrain"}.get(role, "pretrain")
    if (given := t.given.get(key)) and given.value:
        t.model = given


def weights(t: Translation, given: Given) -> None:
    """The path of the role's weights was looked up before."""
    if t.model is not given:
        t.leave(given, "of a role that tuner does not support")


def strategy(t: Translation, given: Given) -> None:
    """Say by which strategy it is trained."""
    word = str(given.value)
    if word == "deepspeed_train":
        t.note(given, Outcome.TAKEN, why="DeepSpeed")
    elif word in _TRAINS:
        t.note(given, Outcome.CHANGED, why=f"{word}: tuner trains with DeepSpeed")
    else:
        t.obstacle = t.obstacle or f"{word} does not train a language model"
        t.note(given, Outcome.CHANGED, why=f"tuner has no {word}")


def strategy_config(t: Translation, given: Given) -> None:
    """Take DeepSpeed's config; that of another strategy has no counterpart."""
    name = str(lookup(t.document.values, (given.keys[0], "strategy_args", "strategy_name")))
    if "deepspeed" not in name:
        t.leave(given, f"of {name}; tuner trains with DeepSpeed: --deepspeed")
    elif isinstance(given.value, dict):
        t.set(given, "deepspeed", given.value)
    else:
        deepspeed.chosen(t, replace(given, value=str(given.value).removeprefix("${").removesuffix("}")))


def device_mapping(t: Translation, given: Given) -> None:
    """Count the role's GPUs, which the launcher is told."""
    count = len(_gpus(t, given, str(given.value)))
    t.leave(given, f"{count} GPUs: the launcher sets it, --nproc-per-node and --nnodes")


def _gpus(t: Translation, given: Given, text: str) -> list[int]:
    wrong = given.wrong("not a list of GPUs", "Use list(range(0,8)) or [0, 1]: it is read, never evaluated.")
    try:
        return _listed(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise wrong from None


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


def files(t: Translation, given: Given) -> None:
    """Take the role's files, with the columns that the root names."""
    said = t.document.values
    words = given.words()
    keys = {"prompt_key": "instruction", "query_key": "input", "response_key": "output", "system_key": "system"}
    if t.objective == "dpo":
        keys = {"prompt_key": "prompt", "chosen_key": "chosen", "rejected_key": "rejected"}
    elif "question_key" in said:
        keys = {"question_key": "instruction", "answer_key": "output"}
    columns = {ours: str(said[key]) for key, ours in keys.items() if said.get(key) and str(said[key]) != ours}
    format_ = "preference" if t.objective == "dpo" else "alpaca" if keys.keys() & said.keys() else None
    for word in words:
        t.datasets.append({"path": word, "format": format_, "columns": columns or None, "split": "train"})
    t.note(given, Outcome.TRANSLATED, f"{len(words)} data sets")


def tracker(t: Translation, given: Given) -> None:
    """Take the tracker."""
    training_arguments.trackers(t, replace(given, value=str(given.value).replace("stdout", "none")))


def checkpointing(t: Translation, given: Given) -> None:
    """ROLL says it the other way round."""
    t.set(given, "train_cfg.gradient_checkpointing", not truth(given.value))


def epochs(t: Translation, given: Given) -> None:
    """Take the epochs, which its pipelines of rewards do not count."""
    training_arguments.epochs(t, given)


def max_steps(t: Translation, given: Given) -> None:
    """Take the steps; of a pipeline of rewards they are rollouts."""
    if t.obstacle:
        t.leave(given, "counts the pipeline's rollouts, not optimizer steps")
    else:
        t.set(given, "train_cfg.max_steps", given.value if given.number() > 0 else None)


def dpo(name: str) -> Rule:
    """Return the rule of a setting of DPO."""

    def rule(t: Translation, given: Given) -> None:
        if t.objective != "dpo":
            t.leave(given, "belongs to DPO")
        elif name == "ipo":
            t.set(given, "objective.loss_type", ["ipo" if truth(given.value) else "sigmoid"])
        else:
            t.set(given, f"objective.{name}", given.value)

    return rule


def dtype(t: Translation, given: Given) -> None:
    """Take the compute type."""
    word = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(str(given.value), str(given.value))
    t.set(given, "optim_wrapper.dtype", word)


def betas(t: Translation, given: Given) -> None:
    """Take both of Adam's betas at once."""
    arguments = f"{given.keys[0]}.training_args"
    both = (t.number(f"{arguments}.adam_beta1", 0.9), t.number(f"{arguments}.adam_beta2", 0.999))
    t.set(given, "optim_wrapper.optimizer.betas", both)


def ratio(t: Translation, given: Given) -> None:
    """Take a part of all steps."""
    if not lookup(t.document.values, (given.keys[0], "training_args", "warmup_steps")):
        t.set(given, training_arguments.RATIO, given.value)
    else:
        t.leave(given, "warmup_steps is set too and overrides it")


def _defaults(document: Document) -> Mapping[str, Any]:
    role = _role(document)
    adapter = {f"{role}.model_args.lora_alpha": 32, f"{role}.model_args.lora_target": "all-linear"}
    is_lora = bool(lookup(document.values, (role, "model_args", "lora_rank")))
    said = [lookup(document.values, (role, "training_args", key)) for key in ("warmup_steps", "warmup_ratio")]
    warm = {} if any(value is not None for value in said) else {f"{role}.training_args.warmup_ratio": 0.0}
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
    }


_PIPELINE = "belongs to the pipeline of rollouts and rewards, which tuner does not support"
_DISTIL = "belongs to distillation, which tuner does not support"
_RUN = "each run gets its own run directory: --work-dir DIR"
_OF_ROLE: Mapping[str, Rule] = {
    "strategy_args.strategy_name": strategy,
    "strategy_args.strategy_config": strategy_config,
    "strategy_args.*": "how ROLL splits a model",
    "device_mapping": device_mapping,
    "world_size": "the launcher sets it",
    "model_args.dtype": dtype,
    "model_args.attn_implementation": attention,
    "model_args.flash_attn": attention,
    "model_args.disable_gradient_checkpointing": checkpointing,
    "model_args.lora_rank": Alias("adapter.r"),
    "model_args.lora_alpha": Alias("adapter.lora_alpha"),
    "model_args.lora_dropout": Alias("adapter.lora_dropout"),
    "model_args.lora_target": training_arguments.target,
    "model_args.model_name_or_path": told_with("the role's weights"),
    "model_args.ulysses_size": training_arguments.SHARED_SAMPLES,
    "model_args.*": "tuner reads it from the model's folder",
    "training_args.learning_rate": ALIASES["learning_rate"],
    "training_args.weight_decay": Alias("optim_wrapper.optimizer.weight_decay"),
    "training_args.adam_beta1": betas,
    "training_args.adam_beta2": betas,
    "training_args.per_device_train_batch_size": Alias("train_dataloader.batch_size"),
    "training_args.gradient_accumulation_steps": Alias("optim_wrapper.accumulative_counts"),
    "training_args.warmup_steps": training_arguments.warmup_steps,
    "training_args.warmup_ratio": ratio,
    "training_args.num_train_epochs": epochs,
    "training_args.max_steps": max_steps,
    "training_args.lr_scheduler_type": training_arguments.schedule,
    "training_args.dataloader_num_workers": Alias("train_dataloader.num_workers"),
    "training_args.*": "tuner sets it",
    "data_args.file_name": files,
    "data_args.template": training_arguments.own_template,
    "data_args.dataset_dir": "files are given by their own paths",
    "data_args.preprocessing_num_workers": NUM_PROC,
    "data_args.*": _PIPELINE,
    "use_sequence_packing": Alias("train_dataloader.dataset.packing"),
    "sequence_packing_args.*": "packing is best fit first",
    "infer_batch_size": _PIPELINE,
    "*": _PIPELINE,
}
_REASONS = {
    "defaults hydra.* hydra": "presets are applied where they are used",
    "exp_name output_dir base_dir logging_dir rollout_dump_dir profiler_* checkpoint_config.*": _RUN,
    "system_envs.* rpc_timeout local_rank": "set variables before the command: NAME=VALUE tuner train ...",
    "tracker_kwargs.*": "trackers read their own variables (WANDB_PROJECT, WANDB_NAME ...)",
    "num_gpus_per_node num_nodes": "the launcher sets it: --nproc-per-node, --nnodes",
    "resume_from_checkpoint": "tuner train --resume auto",
    "model_download_type": "the Hugging Face hub's own variables set it (HF_HOME, HF_TOKEN)",
    "prompt_key query_key response_key system_key chosen_key rejected_key question_key answer_key": (
        "the data set's columns"
    ),
    "validation.*": "validation: --val FILE, or --val-split 0.05",
    "teacher* student_infer* student_train* logits_* distill_* kd_* kl_* adaptive_* skew_*": _DISTIL,
    "opd_* use_opd is_pure_opd pure_opd*": _DISTIL,
    "reference.* reference": "tuner's reference is the model before training",
    "prompt_length response_length rollout_* val_* num_return_sequences_in_group": _PIPELINE,
    "actor_infer* critic* reward* ppo_* adv_* whiten_* advantage_* value_* dual_clip_loss add_*": _PIPELINE,
    "is_* max_running_requests async_* max_len_mask mask_* difficulty_* error_* use_* init_kl_*": _PIPELINE,
    "target_kl pg_* gamma lambd l2 norm_* loss_agg_mode entropy_* enable_* force_* train_infer*": _PIPELINE,
    "domain_* dataset_filter.* env_* custom_* train_env* train_* agent_* max_actions* render_* ratio_*": _PIPELINE,
    "group_* generate_* minibatch* postive_* positive_* negative_* importance_* rl_loss* length_* balance_*": _PIPELINE,
    "report_* query_* alive_* save_* single_* mixed_* worker_* schedul* infer_* step_* batch_* eval_*": _PIPELINE,
    "model_update_* video_* offload_* tokenizer_* freeze_* processor_* extra_* max_tokens* data_* model_* *": _PIPELINE,
}

TABLE: Mapping[str, Rule] = {
    "pretrain": weights,
    "student_pretrain": weights,
    "reward_pretrain": _PIPELINE,
    "seed": Alias("randomness.seed"),
    "max_steps": max_steps,
    "max_grad_norm": training_arguments.clipping,
    "save_steps": training_arguments.interval("checkpoint.interval"),
    "logging_steps": training_arguments.interval("log.interval"),
    "eval_steps": training_arguments.interval("train_cfg.val_interval"),
    "max_ckpt_to_keep": training_arguments.kept,
    "global_template": training_arguments.own_template,
    "sequence_length": Alias("train_dataloader.dataset.max_length"),
    "_packing": Alias("train_dataloader.dataset.packing"),
    "track_with": tracker,
    "beta": dpo("beta"),
    "ipo": dpo("ipo"),
    "label_smoothing": dpo("label_smoothing"),
    **{f"{role}.{key}": rule for role in _ROLES for key, rule in _OF_ROLE.items()},
    **by_word(_REASONS),
}

TOOL = Tool(
    "ROLL",
    TABLE,
    _defaults,
    prepare=_prepare,
    begin=with_defaults,
    keys="roll",
)
