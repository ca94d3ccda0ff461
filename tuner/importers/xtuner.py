"""XTuner 0.1's configs: its classes are looked at by their names, and nothing of the file is run.

Names set above and used below are only how a value is written; what nothing uses is told.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from tuner.errors import RecipeError, did_you_mean
from tuner.importers import training_arguments
from tuner.importers.document import Document, Keys, Name
from tuner.importers.translation import Given, Outcome, Rule, Tool, Translation
from tuner.recipes import catalog
from tuner.recipes.aliases import Alias, by_word
from tuner.recipes.merging import lookup
from tuner.recipes.part import read_part

_OBJECTIVES = {"SupervisedFinetune": "sft", "DPO": "dpo", "ORPO": "orpo", "RewardModel": "reward"}
_FORMATS = {
    "alpaca_map_fn": "alpaca",
    "alpaca_zh_map_fn": "alpaca",
    "oasst1_map_fn": "oasst1",
    "openai_map_fn": "messages",
    "llava_map_fn": "sharegpt",
    "pretrain_map_fn": "text",
    "msagent_react_map_fn": "msagent",
    "moss_map_fn": "moss",
}
_OF_DATASET = {
    *("type", "dataset", "datasets", "datasets_cfg", "max_length", "pack_to_max_length", "max_dataset_length"),
    *("dataset_map_fn", "template_map_fn"),
}
_LEFT_OF_DATASET = (
    "tokenizer use_varlen_attn shuffle_before_pack remove_unused_columns do_dataset_tokenization split "
    "rename_maps input_ids_with_output with_image_token map_num_proc num_proc is_dpo is_reward reward_token_id "
    "max_packed_length packed_length seed data_path data_paths data_file bot_name image_folder image_folders "
    "image_processor pad_image_to_square model_path template dataset_cfg tokenize_ftdp_dir mode concat_to_max_length"
)
_OF_SOURCE = {"path", "dataset_path", "dataset_name", "name", "split", "data_files"}
_VISION = "tuner trains text models and does not support images"


def _last(value: Any) -> str:
    return value.last if isinstance(value, Name) else str(value).rpartition(".")[2]


def _prepare(t: Translation) -> None:
    if "training_args" in t.document.values:
        what = "an XTuner config for Hugging Face's Trainer (training_args, train_dataset), which is not supported"
        raise t.document.wrong(what, ("training_args",), "Use the config of the same name without _hf.")
    model = t.document.values.get("model")
    model = model if isinstance(model, dict) else {}
    kind = _last(model.get("type", "SupervisedFinetune"))
    t.objective = _OBJECTIVES.get(kind, "sft")
    if kind not in _OBJECTIVES:
        t.obstacle = f"{kind} does not train a text model: {_VISION}"
    quantized = lookup(model, ("llm", "quantization_config"))
    t.method = ("qlora" if quantized else "lora") if model.get("lora") else "full"


def model_type(t: Translation, given: Given) -> None:
    """Take what is learned."""
    if t.obstacle:
        t.note(given, Outcome.CHANGED, "objective.type = 'sft'", t.obstacle)
    else:
        t.note(given, Outcome.TRANSLATED, f"objective {t.objective}, method {t.method}")


def setting(t: Translation, given: Given) -> None:
    """Take a setting of DPO or ORPO."""
    name = given.keys[-1]
    if t.objective in ("dpo", "orpo") and (name == "beta" or t.objective == "dpo"):
        t.set(given, f"objective.{name}", [given.value] if name == "loss_type" else given.value)
    else:
        t.leave(given, f"is not a setting of {t.objective}")


def bits(t: Translation, given: Given) -> None:
    """Take 4 or 8 bits."""
    if given.value and t.method == "qlora":
        t.set(given, "quantization.bits", 4 if "4bit" in given.key else 8)
    else:
        t.leave(given, "tuner always does this" if not given.value else "weights are only quantized with an adapter")


def optimizer_type(t: Translation, given: Given) -> None:
    """Take the optimizer's class."""
    training_arguments.optimizer(t, Given(given.key, _last(given.value), given.where, given.keys))


def scheduler(t: Translation, given: Given) -> None:
    """Take a warm-up that is linear, and the course after it."""
    stages = given.value if isinstance(given.value, list) else [given.value]
    stages = [one for one in stages if isinstance(one, dict)]
    epochs = t.number("train_cfg.max_epochs", 1) or 1
    warm = next((one for one in stages if _last(one.get("type")) == "LinearLR" and len(stages) > 1), None)
    main: dict[str, Any] = next((one for one in stages if one is not warm), {})
    kinds = {"CosineAnnealingLR": "cosine", "LinearLR": "linear", "ConstantLR": "constant", "PolyLR": "polynomial"}
    kind = kinds.get(_last(main.get("type")), "cosine")
    t.set(given, "param_scheduler.type", kind, f"of {', '.join(_last(one.get('type')) for one in stages)}")
    # In epochs, unless it says otherwise: its `end` is warmup_ratio x max_epochs.
    end = Given(f"{given.key}.end", warm.get("end") or 0, given.where, given.keys).number() if warm else 0.0
    if warm and warm.get("by_epoch") is False:
        t.warmup_steps = Given(given.key, end / _micro_batches(t), given.where, given.keys)
    else:
        t.set(given, "param_scheduler.warmup_ratio", min(1.0, end / epochs))
    if main.get("eta_min"):
        t.note(given, Outcome.CHANGED, why=f"eta_min {main['eta_min']}: tuner's schedules end at 0")


def dataset(t: Translation, given: Given) -> None:
    """Take the data, one set or several, and how it becomes samples."""
    if not isinstance(given.value, dict):
        raise given.wrong("no data set")
    _dataset(t, given, given.value, given.keys)
    t.note(given, Outcome.TRANSLATED, f"{len(t.datasets)} data sets")


def _dataset(t: Translation, given: Given, value: Mapping[str, Any], keys: Keys) -> None:
    t.check_block("a data set", value, keys, _OF_DATASET, _LEFT_OF_DATASET)
    inner = value.get("datasets") or value.get("datasets_cfg")
    if isinstance(inner, list | tuple):
        name = "datasets" if value.get("datasets") else "datasets_cfg"
        for number, one in enumerate(inner):
            if not isinstance(one, dict):
                raise t.document.wrong("no data set", (*keys, name, str(number)))
            _dataset(t, given, one, (*keys, name, str(number)))
        return
    for name, ours in (("max_length", "max_length"), ("pack_to_max_length", "packing")):
        if value.get(name) is not None:
            place = Given(f"{given.key}.{name}", value[name], t.document.where((*keys, name)), (*keys, name))
            t.set(place, f"train_dataloader.dataset.{ours}", value[name])
    if template := lookup(value, ("template_map_fn", "template")):
        inner_keys = (*keys, "template_map_fn", "template")
        place = Given(".".join(inner_keys), _last(template), t.document.where(inner_keys), inner_keys)
        training_arguments.own_template(t, place)
    source = value.get("dataset")
    if not isinstance(source, dict):
        t.obstacle = t.obstacle or "tuner does not support its data: give yours with --data"
        return
    t.check_block(
        "the source of the rows", source, (*keys, "dataset"), _OF_SOURCE, "type ignore_verifications data_dir"
    )
    made = _rows(t, source, value)
    if value.get("max_dataset_length"):
        keys = (*keys, "max_dataset_length")
        made["max_rows"] = Given(".".join(keys), value[keys[-1]], t.document.where(keys), keys).whole()
    t.datasets.append(made)


def _rows(t: Translation, source: Mapping[str, Any], value: Mapping[str, Any]) -> dict[str, Any]:
    files = source.get("data_files")
    files = files.get("train") if isinstance(files, dict) else files
    file = files[0] if isinstance(files, list | tuple) and len(files) == 1 else files
    path = str(source.get("path") or source.get("dataset_path"))
    path = file if isinstance(file, str) and path in ("json", "csv", "parquet", "text") else path
    made = {"path": path, "name": source.get("name"), "split": str(source.get("split") or "train")}
    map_fn = value.get("dataset_map_fn")
    word = _last(map_fn) if map_fn is not None else ""
    known = _of_catalog(path)
    if word == "pretrain_map_fn" and t.objective == "sft":
        t.objective = "pretrain"
    if word in _FORMATS:
        return made | {"format": _FORMATS[word]}
    if known:
        return made | {key: known.get(key) for key in ("format", "columns")}
    if word:
        t.note(
            Given("dataset_map_fn", word, t.document.name), Outcome.CHANGED, "format None", "detected from the columns"
        )
    return made


def _of_catalog(path: str) -> dict[str, Any] | None:
    """Return how the catalog reads the data set of this path."""
    for name in catalog.names("datasets"):
        if path not in catalog.text_of("datasets", name):
            continue
        rows = lookup(read_part("datasets", name).values, ("train_dataloader", "dataset"), {})
        if rows.get("path") == path:
            return dict(rows)
    return None


def _micro_batches(t: Translation) -> int:
    """Return how many of mmengine's iterations make an optimizer step: an iteration is a micro-batch."""
    return max(1, t.whole("optim_wrapper.accumulative_counts", 1))


def iterations(ours: str) -> Rule:
    """Return the rule of a number of iterations, as optimizer steps; -1 is none."""

    def rule(t: Translation, given: Given) -> None:
        number, each = given.whole(), _micro_batches(t)
        if number < 1:
            t.leave(given, "it is off")
        else:
            why = f"{number} micro-batches, {each} of them an optimizer step" if each > 1 else None
            t.set(given, ours, math.ceil(number / each), why)

    return rule


def variable(t: Translation, given: Given) -> None:
    """A name at the top that is no key of XTuner's: others are written with it, or nothing is.

    Raises:
        RecipeError: nothing is, and it holds a block or is written like a key of XTuner's.
    """
    word = given.keys[0]
    if word in _KEYS or (word not in t.document.used and len(given.keys) > 1):
        fix = did_you_mean(given.key, sorted(TABLE)) or "Remove it."
        raise RecipeError(f"XTuner has no key {given.key!r}", where=given.where, fix=fix)
    if word in t.document.used:
        t.note(given, Outcome.TAKEN, why="where it is used")
        return
    # Closer than a misprint in general: evaluation_freq stands unused in its own configs.
    if near := get_close_matches(word, sorted(_KEYS), 1, 0.85):
        what = f"XTuner has no key {word!r}, and nothing uses it"
        raise RecipeError(what, where=given.where, fix=f"Did you mean {near[0]!r}?")
    t.leave(given, "nothing in the file uses it")


def _defaults(_: Document) -> Mapping[str, Any]:
    return {
        "optim_wrapper.accumulative_counts": 1,
        "train_dataloader.batch_size": 1,
        "optim_wrapper.optimizer.weight_decay": 0.01,
    }


_HOOK = "tuner has its own metrics, heartbeat and checkpoints; for answers after training: log.num_samples"
_OF_QUANTIZATION = (
    "type llm_int8_threshold llm_int8_has_fp16_weight llm_int8_skip_modules llm_int8_enable_fp32_cpu_offload "
    "bnb_4bit_compute_dtype bnb_4bit_quant_storage"
)
_OF_LLM = (
    "revision cache_dir token device_map low_cpu_mem_usage use_safetensors use_cache rope_scaling "
    "max_position_embeddings moe_implementation expert_in_one_shard load_in_8bit load_in_4bit"
)
_OF_LORA = (
    "type bias task_type fan_in_fan_out init_lora_weights layers_to_transform layers_pattern rank_pattern "
    "alpha_pattern use_rslora use_dora inference_mode"
)
_OF_VISION = (
    "visual_encoder visual_encoder_lora llm_lora freeze_llm freeze_visual_encoder visual_select_layer pretrained_pth "
    "projector_depth model_path quantization_llm quantization_vit"
)
_HOOKS = (
    "timer param_scheduler sampler_seed early_stopping runtime_info logger.type logger.log_metric_by_epoch "
    "logger.ignore_last checkpoint.type checkpoint.by_epoch checkpoint.save_optimizer checkpoint.save_last "
    "checkpoint.save_best checkpoint.rule checkpoint.save_param_scheduler checkpoint.out_dir"
)
_CODE = "tuner uses transformers' own classes; remote code needs a commit as model.revision"
_OWN = "tuner sets it"
_DTYPE = "under DeepSpeed XTuner chooses by the GPUs, and so does tuner"
_OPTIMIZER = "optim_wrapper.optimizer"

_REASONS = {
    " ".join(f"model.llm.quantization_config.{word}" for word in _OF_QUANTIZATION.split()): (
        "bitsandbytes computes in the run's compute type"
    ),
    " ".join(f"model.llm.{word}" for word in _OF_LLM.split()): _OWN,
    " ".join(f"model.lora.{word}" for word in _OF_LORA.split()): (
        "PEFT's standard LoRA with bias 'none'; the objective sets the task"
    ),
    "model.loss_weight model.penalty_type model.penalty_weight": "tuner uses TRL's loss of reward models",
    " ".join(f"model.{word}" for word in _OF_VISION.split()): f"{_VISION}, so there is no such setting",
    "model.peft_model model.use_activation_checkpointing model.tokenizer": _OWN,
    "train_dataloader.sampler train_dataloader.batch_sampler train_dataloader.collate_fn train_dataloader.pin_memory": (
        "tuner shuffles by the seed, and pads or packs by itself"
    ),
    "train_dataloader.persistent_workers train_dataloader.prefetch_factor train_dataloader.drop_last": _OWN,
    "val_dataset val_cfg val_evaluator": "validation: --val FILE, or --val-split 0.05",
    "test_dataset test_dataloader test_cfg test_evaluator": "evaluation: tuner eval",
    "optim_wrapper.type optim_wrapper.loss_scale optim_wrapper.constructor optim_wrapper.paramwise_cfg": (
        "DeepSpeed scales the loss where needed"
    ),
    "optim_wrapper.clip_grad.error_if_nonfinite optim_wrapper.clip_grad.norm_type": "a non-finite norm is an error",
    "train_cfg.type train_cfg.val_interval train_cfg.val_begin train_cfg.by_epoch": _OWN,
    " ".join(f"default_hooks.{word}" for word in _HOOKS.split()): _HOOK,
    "randomness.deterministic randomness.diff_rank_seed": "there is one seed",
    "tokenizer": "tuner uses the model's tokenizer",
    "env_cfg log_level log_processor default_scope": _OWN,
    "strategy strategy_cfg runner_type": "the DeepSpeed config: --deepspeed",
}
"""Words without a counterpart -> why."""

TABLE: Mapping[str, Rule] = {
    "model.type": model_type,
    "model.llm.pretrained_model_name_or_path": training_arguments.model,
    "model.llm.trust_remote_code": _CODE,
    "model.llm.torch_dtype": _DTYPE,
    "model.llm.type": "transformers' Auto classes detect it",
    "model.llm.attn_implementation": Alias("model.attn_implementation"),
    "model.llm.quantization_config.load_in_4bit": bits,
    "model.llm.quantization_config.load_in_8bit": bits,
    "model.llm.quantization_config.bnb_4bit_quant_type": Alias("quantization.quant_type"),
    "model.llm.quantization_config.bnb_4bit_use_double_quant": Alias("quantization.double_quant"),
    "model.lora.r": Alias("adapter.r"),
    "model.lora.lora_alpha": Alias("adapter.lora_alpha"),
    "model.lora.lora_dropout": Alias("adapter.lora_dropout"),
    "model.lora.target_modules": Alias("adapter.target_modules"),
    "model.lora.modules_to_save": Alias("adapter.modules_to_save"),
    "model.beta": setting,
    "model.loss_type": setting,
    "model.label_smoothing": setting,
    "model.use_varlen_attn": "packed samples never attend to each other",
    "model.ref_llm": "the reference is the model before training",
    "model.reward_token_id": "the score is read at the last token",
    "model.max_position_embeddings": "tuner uses the model's own context",
    "train_dataloader.batch_size": Alias("train_dataloader.batch_size"),
    "train_dataloader.num_workers": Alias("train_dataloader.num_workers"),
    "train_dataloader.dataset": dataset,
    "val_dataloader": "validation: --val FILE, or --val-split 0.05",
    f"{_OPTIMIZER}.type": optimizer_type,
    f"{_OPTIMIZER}.lr": Alias(f"{_OPTIMIZER}.lr"),
    f"{_OPTIMIZER}.betas": Alias(f"{_OPTIMIZER}.betas"),
    f"{_OPTIMIZER}.eps": Alias(f"{_OPTIMIZER}.eps"),
    f"{_OPTIMIZER}.weight_decay": Alias(f"{_OPTIMIZER}.weight_decay"),
    "optim_wrapper.clip_grad.max_norm": Alias("optim_wrapper.clip_grad.max_norm"),
    "optim_wrapper.accumulative_counts": Alias("optim_wrapper.accumulative_counts"),
    "optim_wrapper.dtype": _DTYPE,
    "param_scheduler": scheduler,
    "sequence_parallel_size": training_arguments.SHARED_SAMPLES,
    "train_cfg.max_epochs": training_arguments.epochs,
    "train_cfg.max_iters": iterations("train_cfg.max_steps"),
    "custom_hooks": _HOOK,
    "default_hooks.logger.interval": iterations("log.interval"),
    "default_hooks.checkpoint.interval": iterations("checkpoint.interval"),
    "default_hooks.checkpoint.max_keep_ckpts": training_arguments.kept,
    "randomness.seed": Alias("randomness.seed"),
    "visualizer": "trackers: log.trackers=tensorboard",
    "resume": "tuner train --resume auto",
    "load_from": "tuner train --resume CHECKPOINT",
    "launcher": "tuner train --launcher",
    "work_dir": "each run gets its own run directory: --work-dir DIR",
    **by_word(_REASONS),
    "*": variable,
}

_KEYS = {key.partition(".")[0] for key in TABLE} - {"*"}

TOOL = Tool("XTuner", TABLE, _defaults, prepare=_prepare)
