"""Translates XTuner 0.1's configs: classes are recognized by name, and nothing in the file is run.

A name that is set above and used below belongs to the value that uses it; an unused name is reported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches

from tuner.errors import Option
from tuner.files import JsonObject
from tuner.importers import key_tables, shared_rules, xtuner_llava
from tuner.importers.aliases import by_word
from tuner.importers.document import ForeignConfig, Keys, Value, last_name
from tuner.importers.objective_names import WORDS
from tuner.importers.translation import Outcome, Rule, Setting, Tool, Translation
from tuner.recipes.merging import lookup

_OBJECTIVES = WORDS["xtuner"]
_FORMATS = {
    "alpaca_map_fn": "alpaca",
    "alpaca_zh_map_fn": "alpaca",
    "oasst1_map_fn": "oasst1",
    "openai_map_fn": "messages",
    "llava_map_fn": "llava",
    "pretrain_map_fn": "text",
    "msagent_react_map_fn": "msagent",
    "moss_map_fn": "moss",
}
_OF_DATASET = {
    *("type", "dataset", "datasets", "datasets_cfg", "max_length", "pack_to_max_length", "max_dataset_length"),
    *("dataset_map_fn", "template_map_fn"),
}
_OF_SOURCE = {"path", "dataset_path", "dataset_name", "name", "split", "data_files"}


def _prepare(t: Translation) -> None:
    if "training_args" in t.document.values:
        problem = "an XTuner config for Hugging Face's Trainer (training_args, train_dataset), which is not supported"
        raise t.document.wrong(problem, ("training_args",), "Use the config of the same name without _hf.")
    model = t.document.values.get("model")
    model = model if isinstance(model, dict) else {}
    kind = last_name(model.get("type", "SupervisedFinetune"))
    t.objective = _OBJECTIVES.get(kind, "sft")
    if xtuner_llava.is_llava(model):
        xtuner_llava.prepare(t, model)
        return
    if kind not in _OBJECTIVES:
        t.obstacle = f"{kind} is a model that only XTuner makes, which is not translated (docs/vision.md)"
    quantized = lookup(model, ("llm", "quantization_config"))
    t.method = ("qlora" if quantized else "lora") if model.get("lora") else "full"


def scheduler(t: Translation, setting: Setting) -> None:
    """Set the linear warm-up, and the schedule after it."""
    stages = setting.value if isinstance(setting.value, list) else [setting.value]
    stages = [stage for stage in stages if isinstance(stage, dict)]
    epochs = t.number("train_cfg.max_epochs", 1) or 1
    warm = next((stage for stage in stages if last_name(stage.get("type")) == "LinearLR" and len(stages) > 1), None)
    main: JsonObject = next((stage for stage in stages if stage is not warm), {})
    kinds = {"CosineAnnealingLR": "cosine", "LinearLR": "linear", "ConstantLR": "constant", "PolyLR": "polynomial"}
    kind = kinds.get(last_name(main.get("type")), "cosine")
    t.set(setting, "param_scheduler.type", kind, f"of {', '.join(last_name(stage.get('type')) for stage in stages)}")
    # `end` is in epochs unless by_epoch is false: warmup_ratio x max_epochs.
    end = replace(setting, key=f"{setting.key}.end", value=warm.get("end") or 0).number() if warm else 0.0
    if warm and warm.get("by_epoch") is False:
        t.set(setting, "param_scheduler.warmup_steps", math.ceil(end / _micro_batches(t)))
    else:
        t.set(setting, "param_scheduler.warmup_ratio", min(1.0, end / epochs))
    floor, rate = main.get("eta_min"), t.number("optim_wrapper.optimizer.lr", 0)
    if isinstance(floor, int | float) and floor and kind == "cosine" and 0 < floor < rate:
        t.set(setting, "param_scheduler.min_lr_ratio", floor / rate)
    elif floor:
        t.note(setting, Outcome.CHANGED, why=f"eta_min {floor}: tuner's {kind} ends at 0")


def dataset(t: Translation, setting: Setting) -> None:
    """Add the data, one set or several, and set how rows become samples."""
    if not isinstance(setting.value, dict):
        raise setting.wrong("no data set")
    _dataset(t, setting, setting.value, setting.keys)
    t.note(setting, Outcome.TRANSLATED, f"{len(t.datasets)} data sets")


def _dataset(t: Translation, setting: Setting, value: Mapping[str, Value], keys: Keys) -> None:
    has_images = xtuner_llava.has_images(value)
    read = xtuner_llava.OF_DATASET if has_images else _OF_DATASET
    t.check_block("a data set", value, keys, read, _WORDS.blocks["images" if has_images else "dataset"])
    inner = value.get("datasets") or value.get("datasets_cfg")
    if isinstance(inner, list | tuple):
        name = "datasets" if value.get("datasets") else "datasets_cfg"
        for number, inner_value in enumerate(inner):
            if not isinstance(inner_value, dict):
                raise t.document.wrong("no data set", (*keys, name, str(number)))
            _dataset(t, setting, inner_value, (*keys, name, str(number)))
        return
    if template := lookup(value, ("template_map_fn", "template")):
        shared_rules.named_template(t, t.inner((*keys, "template_map_fn", "template"), last_name(template)))
    if has_images:
        of_images = xtuner_llava.rows_of_images(t, value, keys)
        rows = _rows(t, {"path": value["data_path"]}, value)
        t.datasets.append({key: rows.get(key) for key in ("path", "format", "columns")} | of_images)
        return
    for name, our_key in (("max_length", "max_length"), ("pack_to_max_length", "packing")):
        if value.get(name) is not None:
            t.set(t.inner((*keys, name), value[name]), f"train_dataloader.dataset.{our_key}", value[name])
    dataset = value.get("dataset")
    if not isinstance(dataset, dict):
        t.obstacle = t.obstacle or f"tuner does not support its data: give yours with {Option('data')}"
        return
    t.check_block("the source of the rows", dataset, (*keys, "dataset"), _OF_SOURCE, _WORDS.blocks["source"])
    rows = _rows(t, dataset, value)
    if value.get("max_dataset_length"):
        rows["max_rows"] = t.inner((*keys, "max_dataset_length"), value["max_dataset_length"]).whole()
    t.datasets.append(rows)


def _rows(t: Translation, dataset: Mapping[str, Value], value: Mapping[str, Value]) -> JsonObject:
    path = shared_rules.place_of_rows(dataset.get("path") or dataset.get("dataset_path"), dataset.get("data_files"))
    rows = {"path": path, "name": dataset.get("name"), "split": str(dataset.get("split") or "train")}
    map_fn = value.get("dataset_map_fn")
    word = last_name(map_fn) if map_fn is not None else ""
    if word == "pretrain_map_fn" and t.objective == "sft":
        t.objective = "pretrain"
    if word in _FORMATS:
        return rows | {"format": _FORMATS[word]}
    if part_dataset := _of_catalog(path):
        return rows | {key: part_dataset.get(key) for key in ("format", "columns")}
    if word:
        setting = Setting("dataset_map_fn", word, t.document.name)
        t.note(setting, Outcome.CHANGED, "format None", "detected from the columns")
    return rows


def _of_catalog(path: str) -> JsonObject | None:
    """Return the values of the catalog's part for the data set at this path."""
    every = (lookup(values, ("train_dataloader", "dataset"), {}) for _, values in shared_rules.parts_that_name(path))
    return next((dict(rows) for rows in every if rows.get("path") == path), None)


def _micro_batches(t: Translation) -> int:
    """Return the number of mmengine iterations per optimizer step: an iteration is a micro-batch."""
    return max(1, t.whole("optim_wrapper.accumulative_counts", 1))


def iterations(our_key: str) -> Rule:
    """Return the rule for a number of iterations, converted to optimizer steps; -1 means off."""

    def rule(t: Translation, setting: Setting) -> None:
        number, micro_batches = setting.whole(), _micro_batches(t)
        if number < 1:
            t.leave(setting, "it is off")
        else:
            why = f"{number} micro-batches, {micro_batches} of them an optimizer step" if micro_batches > 1 else None
            t.set(setting, our_key, math.ceil(number / micro_batches), why)

    return rule


def variable(t: Translation, setting: Setting) -> None:
    """Record a name at the top that is not a key of XTuner: other values use it, or it is unused."""
    word = setting.keys[0]
    if word in _KEYS or (word not in t.document.used and len(setting.keys) > 1):
        t.note_unknown(setting, "", TABLE)
    elif word in t.document.used:
        t.note(setting, Outcome.TAKEN, why="where it is used")
    # A stricter limit than for other misspelt keys: XTuner's own configs have an unused evaluation_freq.
    elif get_close_matches(word, sorted(_KEYS), 1, 0.85):
        t.note_unknown(setting, "", _KEYS)
    else:
        t.leave(setting, "nothing in the file uses it")


def _defaults(document: ForeignConfig) -> Mapping[str, Value]:
    model = document.values.get("model")
    of_llava = xtuner_llava.defaults(model) if isinstance(model, dict) and xtuner_llava.is_llava(model) else {}
    return {
        **of_llava,
        "optim_wrapper.accumulative_counts": 1,
        "train_dataloader.batch_size": 1,
        "optim_wrapper.optimizer.weight_decay": 0.01,
    }


_WORDS = key_tables.of("xtuner")
TABLE: Mapping[str, Rule] = {
    **_WORDS.rules,
    **xtuner_llava.RULES,
    **by_word(
        {
            "model.type": shared_rules.learned,
            "model.llm.pretrained_model_name_or_path": shared_rules.model,
            "model.llm.quantization_config.load_in_4bit model.llm.quantization_config.load_in_8bit": xtuner_llava.bits,
            "train_dataloader.dataset": dataset,
            "optim_wrapper.optimizer.type": shared_rules.optimizer,
            "param_scheduler": scheduler,
            "train_cfg.max_epochs": shared_rules.epochs,
            "train_cfg.max_iters": iterations("train_cfg.max_steps"),
            "default_hooks.logger.interval": iterations("log.interval"),
            "default_hooks.checkpoint.interval": iterations("checkpoint.interval"),
            "default_hooks.checkpoint.max_keep_ckpts": shared_rules.kept,
            "*": variable,
        }
    ),
}

_KEYS = {key.partition(".")[0] for key in TABLE} - {"*"}

TOOL = Tool("XTuner", TABLE, _defaults, prepare=_prepare)
