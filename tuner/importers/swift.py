"""Translates ms-swift's command lines `swift sft|pt|rlhf`, shell scripts that call it, and its YAML and JSON.

`--dataset` takes one or more `id[:subset][#rows]`; ids are on ModelScope unless --use_hf is true.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace

from tuner import paths
from tuner.errors import Key, RecipeError
from tuner.files import JsonObject, read_named_text
from tuner.importers import aliases, image_keys, key_tables, reward_keys, shared_rules, training_arguments
from tuner.importers.aliases import Alias, by_word
from tuner.importers.document import ForeignConfig, Value
from tuner.importers.objective_names import NEAREST, WORDS
from tuner.importers.shared_rules import truth
from tuner.importers.translation import Outcome, Rule, Setting, Tool, Translation, recorded_with, unlike_default

_RLHF = WORDS["swift"]
"""Methods that tuner does not have -> the nearest objective; for all others dpo."""
_BETAS = {"cpo": 0.1, "grpo": 0.04, "gkd": 0.5, "simpo": 2.0}
_MAX_PROMPT = 100_000
_DATASET = re.compile(r"(?P<path>.+?)(?::(?P<name>[^:#/]+))?(?:#(?P<rows>\d{1,15}))?", re.DOTALL)


def _prepare(t: Translation) -> None:
    values = t.document.values
    kind = str(values.get("tuner_type") or values.get("train_type") or values.get("sft_type") or "lora")
    quantized = values.get("quant_bits") or truth(values.get("load_in_4bit"))
    adapter = "qlora" if quantized else "dora" if truth(values.get("use_dora")) else "lora"
    t.method = "full" if kind == "full" else adapter
    command = t.document.command[1] if t.document.command[:1] == ("swift",) else "sft"
    rlhf = str(values.get("rlhf_type") or ("dpo" if command == "rlhf" else ""))
    t.objective = "pretrain" if command == "pt" else _RLHF.get(rlhf, NEAREST.get(rlhf, "dpo")) if rlhf else "sft"
    if rlhf and rlhf not in _RLHF:
        t.obstacle = f"tuner has no {rlhf}; the nearest is {t.objective}"
    if t.objective in ("cpo", "simpo") and (loss := values.get("loss_type")):
        t.objective = "simpo" if loss == "simpo" else "cpo"
    task = str(values.get("task_type") or "causal_lm")
    if task != "causal_lm" and not (task == "seq_cls" and t.objective == "reward"):
        t.obstacle = f"tuner does not train {task}"
    if t.value("reward_model") is None:
        reward_keys.require_reward(t, "reward_funcs")


def label_smoothing(t: Translation, setting: Setting) -> None:
    """Set DPO's; TRL's CPO smoothes the labels of SimPO too."""
    if t.objective == "simpo" and setting.number():
        t.change(setting, "simpo has no smoothing of its labels")
    else:
        t.apply(Alias("objective.label_smoothing"), setting)


def datasets(t: Translation, setting: Setting) -> None:
    """Add each data set, with its subset and its number of rows."""
    words = setting.words(None)
    if not words:
        raise setting.wrong("has no data set")
    for word in words:
        match = _DATASET.fullmatch(word)
        assert match is not None, "every text has a path"
        rows = int(match["rows"]) if match["rows"] else None
        if match["rows"] == "0":
            raise setting.wrong("no rows are requested", "Use #N with N above 0.")
        dataset = {"path": match["path"], "name": match["name"], "split": "train", "max_rows": rows}
        (t.validation if setting.key == "val_dataset" else t.datasets).append(dataset)
        if rows:
            shared_rules.draws_rows(t, replace(setting, value=rows))
    on_hub = [word for word in words if paths.local(word.partition("#")[0].partition(":")[0]) is None]
    if on_hub and not truth(t.value("use_hf")):
        why = "ids are ModelScope's in ms-swift and the Hugging Face hub's in tuner"
        t.note(setting, Outcome.CHANGED, f"data {' '.join(words)}", why)
    else:
        t.note(setting, Outcome.TRANSLATED, f"data {' '.join(words)}")


def system(t: Translation, setting: Setting) -> None:
    """Set the system prompt: a text, or a file with it."""
    path = paths.local(str(setting.value))
    if path is None or path.suffix != ".txt":
        shared_rules.system(t, setting)
    elif paths.is_file(path):
        text = read_named_text(path, RecipeError, max_bytes=_MAX_PROMPT, fix="Give the text itself.", name=str(path))
        shared_rules.system(t, replace(setting, value=text))
    else:
        why = f"{path} is missing: {Key('train_dataloader.dataset.system', 'TEXT')}"
        t.change(setting, why)


_TURNS = {"default": "all", "last_round": "last", "all": "everything"}


def loss_scale(t: Translation, setting: Setting) -> None:
    """Set which turns are trained; what weighs the words of answers has no counterpart."""
    word = str(setting.value)
    if word in _TURNS and t.objective == "sft":
        shared_rules.trained_turns(t, setting, _TURNS[word])
    elif word in ("default", "last_round"):
        t.note(setting, Outcome.TAKEN, why="as tuner does it")
    else:
        why = f"tuner has {', '.join(_TURNS)}; rows can give turns and spans weights (docs/choosing-turns.md)"
        t.change(setting, why)


def columns(t: Translation, setting: Setting) -> None:
    """Set the columns: in ms-swift the data set's name -> the format's name, the other way round than in tuner."""
    try:
        mapped = json.loads(setting.value) if isinstance(setting.value, str) else setting.value
    except ValueError:
        mapped = None
    if not isinstance(mapped, dict):
        t.change(setting, f"name them: {Key('train_dataloader.dataset.columns', 'COLUMNS')}")
        return
    our_columns = {"query": "prompt", "response": "completion", "rejected_response": "rejected"}
    names = {our_columns.get(str(name), str(name)): str(column) for column, name in mapped.items()}
    t.set(setting, "train_dataloader.dataset.columns", names)


def init_weights(t: Translation, setting: Setting) -> None:
    """Set how an adapter begins, in PEFT's words."""
    word = str(setting.value)
    t.set(setting, "adapter.init_lora_weights", setting.truth() if word.lower() in ("true", "false") else word)


def _begin(document: ForeignConfig) -> ForeignConfig:
    """Add Qwen-VL's limits of pixels, which a script sets in front of the command."""
    limits = {key.lower(): document.environ[key] for key in ("MAX_PIXELS", "MIN_PIXELS") if key in document.environ}
    return replace(document, values={**limits, **document.values})


def _defaults(document: ForeignConfig) -> Mapping[str, Value]:
    values = document.values
    is_full = str(values.get("tuner_type") or values.get("train_type") or "lora") == "full"
    adapter = {"lora_rank": 8, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": "all-linear"}
    batch = str(values.get("per_device_train_batch_size") or 1)
    return {
        **training_arguments.defaults(document),
        **({} if is_full else adapter),
        "learning_rate": 1e-5 if is_full else 1e-4,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": max(1, 16 // int(batch)) if batch.isdigit() and int(batch) else 1,
        "lr_scheduler_type": "cosine",
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "logging_steps": 5,
        "gradient_checkpointing": True,
        "max_length": 2048,
        "packing": False,
        "freeze_vit": True,
        "freeze_aligner": True,
        **_of_rlhf(str(values.get("rlhf_type") or "")),
    }


def _of_rlhf(kind: str) -> JsonObject:
    """Return the defaults of ms-swift's methods that differ from those of TRL (swift/arguments/rlhf_args.py)."""
    online = {"temperature": 0.9, "loss_type": "grpo"} if kind == "grpo" else {}
    margin = {"simpo_gamma": 1.0} if kind == "simpo" else {}
    likelihood = {"cpo_alpha": 1.0} if kind in ("cpo", "simpo") else {}
    return {**online, **margin, **likelihood, **({"beta": _BETAS[kind]} if kind in _BETAS else {})}


_WORDS = key_tables.of("swift")
TABLE: Mapping[str, Rule] = {
    **training_arguments.TABLE,
    **_WORDS.rules,
    **reward_keys.RULES,
    **by_word(
        {
            "model model_id_or_path": shared_rules.model,
            "torch_dtype": shared_rules.weights_type,
            "attn_impl": aliases.table()["attn_impl"],
            "tuner_type train_type sft_type": shared_rules.method,
            "rlhf_type": shared_rules.learned,
            "target_modules": shared_rules.target,
            "adapters": shared_rules.adapter_path,
            "dataset val_dataset": datasets,
            "split_dataset_ratio": shared_rules.held_out,
            "task_type": recorded_with("the objective"),
            "loss_scale": loss_scale,
            "system": system,
            "columns": columns,
            "rpo_alpha": shared_rules.added_loss("sft"),
            "label_smoothing": label_smoothing,
            "loss_type": reward_keys.loss_type,
            "enable_dft_loss": shared_rules.dynamic_fine_tuning,
            "reward_model": reward_keys.reward_model,
            "teacher_model": reward_keys.teacher,
            "init_weights": init_weights,
            "template": shared_rules.named_template,
            "enable_thinking": shared_rules.thinks,
            "max_length": unlike_default(
                "train_dataloader.dataset.max_length",
                f"in ms-swift this is the model's whole context: {Key('max_length', 'N')}",
            ),
            # 16 samples a step, divided by the ranks, whose number is unknown at import.
            "gradient_accumulation_steps": unlike_default(
                "optim_wrapper.accumulative_counts",
                f"on N ranks ms-swift divides it: {Key('accumulative_counts', '...')}",
            ),
            "freeze_vit": image_keys.of_images("vision"),
            "freeze_aligner": image_keys.of_images("projector"),
            "freeze_llm": image_keys.of_images("language"),
            "aligner_lr": image_keys.of_images("optim_wrapper.optimizer.projector_lr"),
            "max_pixels": image_keys.of_images("train_dataloader.dataset.image_max_pixels"),
            "min_pixels": image_keys.of_images("train_dataloader.dataset.image_min_pixels"),
            "max_epochs": shared_rules.epochs,
        }
    ),
}

TOOL = Tool("ms-swift", TABLE, _defaults, prepare=_prepare, begin=_begin, others=_WORDS.others)
