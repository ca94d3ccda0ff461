"""Translates torchtune's YAML: `_component_` names a builder, `${...}` refers to another value of the file.

The builder's name tells the model, its size and LoRA; the checkpoint's folder tells which weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from tuner.importers import key_tables, shared_rules
from tuner.importers.document import Block, Document, Value
from tuner.importers.translation import Outcome, Rule, Setting, Tool, Translation, recorded_with
from tuner.recipes.aliases import by_word
from tuner.recipes.merging import lookup

_UNKNOWN = re.compile(r"\$\{[^:}]*\}")
_METHOD = re.compile(r"\.(qlora|lora|qdora|dora)_")
_DATASETS = {
    "alpaca_dataset": ("tatsu-lab/alpaca", "alpaca"),
    "alpaca_cleaned_dataset": ("yahma/alpaca-cleaned", "alpaca"),
    "grammar_dataset": ("liweili/c4_200m", None),
    "samsum_dataset": ("Samsung/samsum", None),
    "slimorca_dataset": ("Open-Orca/SlimOrca-Dedup", "sharegpt"),
    "stack_exchange_paired_dataset": ("lvwerra/stack-exchange-paired", None),
    "hh_rlhf_helpful_dataset": ("RLHFlow/HH-RLHF-Helpful-standard", None),
    "cnn_dailymail_articles_dataset": ("ccdv/cnn_dailymail", None),
    "wikitext_dataset": ("EleutherAI/wikitext_document_level", "text"),
}
"""Builder -> the data set that it reads, and the row format."""
_ALPACA = {"alpaca_dataset", "alpaca_cleaned_dataset"}
_ALPACA_PROMPT = (
    "torchtune renders Alpaca's text (### Instruction: ...) and computes the loss on it too; "
    "tuner renders only the question, with the chat template, and computes the loss on the answer"
)
_OWN = {"chat_dataset", "instruct_dataset", "preference_dataset", "text_completion_dataset", "multimodal_chat_dataset"}
_OF_DATASET = {
    *("_component_", "split", "data_files", "source", "conversation_style", "packed", "train_on_input", "column_map"),
    *("conversation_column", "column"),
}
_LEFT_OF_DATASET = (
    "name subset filter_fn new_system_prompt max_seq_len add_eos split_across_pack image_dir image_tag images_col "
    "texts_col model_transform transform message_transform tokenizer partition include_filter_fn masking_strategy "
    "packing_strategy seed weight"
)
_OTHERS = {
    "tasks": "evaluates a model: tuner eval",
    "eleuther": "evaluates a model: tuner eval",
    "prompt": "generates answers: tuner chat",
    "max_new_tokens": "generates answers: tuner chat",
    "grpo_size": "learns from rewards (GRPO), and tuner trains on rows",
    "grpo_samples": "learns from rewards (GRPO), and tuner trains on rows",
    "postprocessing": "learns from rewards (GRPO), and tuner trains on rows",
    "ppo_epochs": "learns from rewards (PPO), and tuner trains on rows",
    "policy_model": "learns from rewards (PPO), and tuner trains on rows",
    "datasets": "trains on images with data sets of its own recipe, which are not translated (docs/vision.md)",
}
"""Key at the top -> what a config with this key does that a recipe cannot do."""
_MODULES = {"output_proj": "o_proj"}
_RATE = 2e-5


def _component(t: Translation, key: str) -> str:
    return str(lookup(t.document.values, (key, "_component_")) or "")


def _refuse_others(document: Document) -> None:
    """Refuse configs of torchtune recipes that do not train on rows."""
    values = document.values
    for key, problem in _OTHERS.items():
        if key in values:
            raise document.wrong(
                f"a torchtune config that {problem}", (key,), "Give a config of full, LoRA or DPO training."
            )
    if not {"optimizer", "dataset"} & values.keys() and "quantizer" in values:
        problem = "a torchtune config that quantizes a model and does not train"
        raise document.wrong(problem, ("quantizer",), "Give a config of full, LoRA or DPO training.")


def _begin(document: Document) -> Document:
    _refuse_others(document)
    # The tokenizer's path may refer to a value from the command line: only paths that the recipe needs must be known.
    return document.resolved(whole=False)


def _prepare(t: Translation) -> None:
    match = _METHOD.search(_component(t, "model"))
    method = match[1].replace("qdora", "dora") if match else "full"
    t.method = "dora" if method == "lora" and lookup(t.document.values, ("model", "use_dora")) else method
    loss = _component(t, "loss").rpartition(".")[2]
    t.objective = "dpo" if loss in ("DPOLoss", "RSOLoss", "IPOLoss") else "sft"
    recipe = {key for key in ("teacher_model", "policy_model", "reward_and_value_model") if key in t.document.values}
    if recipe or "KD" in loss:
        t.obstacle = "its recipe distils or learns from rewards, which tuner does not support"
    if "_dataset" in _component(t, "dataset") and "text_completion" in _component(t, "dataset"):
        t.objective = "pretrain"


def checkpoint_dir(t: Translation, setting: Setting) -> None:
    """Take the folder with the weights as the model."""
    if _UNKNOWN.search(str(setting.value)):
        raise setting.wrong("is not defined in this file", "Write out the folder.")
    t.model = replace(setting, value=str(setting.value).rstrip("/").removesuffix("/original"))


def dataset(t: Translation, setting: Setting) -> None:
    """Add the data set that a builder reads."""
    if isinstance(setting.value, list) and setting.value:
        for number, one in enumerate(setting.value):
            dataset(t, replace(setting, value=one, keys=(*setting.keys, str(number))))
        return
    if not isinstance(setting.value, dict):
        raise setting.wrong("not a data set")
    value = setting.value
    name = str(value.get("_component_") or "").rpartition(".")[2]
    t.check_block("a data set", value, setting.keys, _OF_DATASET, _LEFT_OF_DATASET)
    split = str(value.get("split") or "train")
    files = value.get("data_files")
    source = files if isinstance(files, str) else value.get("source")
    columns = {ours: str(theirs) for ours, theirs in _columns(value).items() if theirs and ours != theirs} or None
    if name in _DATASETS:
        path, format_ = _DATASETS[name]
        rows = {"path": str(source or path), "format": format_, "split": split, "columns": columns}
    elif name in _OWN or source:
        format_ = "text" if "completion" in name else None
        style = value.get("conversation_style")
        format_ = {"sharegpt": "sharegpt", "openai": "messages"}.get(str(style), format_)
        rows = {"path": str(source), "format": format_, "split": split, "columns": columns}
    else:
        t.obstacle = t.obstacle or f"tuner has no data set {name!r}: give yours with --data"
        t.note(setting, Outcome.LEFT_OUT, why=t.obstacle)
        return
    is_validation = setting.key == "dataset_val"
    (t.validation if is_validation else t.datasets).append(rows)
    t.note(setting, Outcome.TRANSLATED, f"data {rows['path']}")
    if value.get("packed") is not None and not is_validation:
        t.set(setting, "train_dataloader.dataset.packing", value["packed"])
    if name in _ALPACA:
        t.note(setting, Outcome.CHANGED, "format alpaca", _ALPACA_PROMPT)
    elif value.get("train_on_input"):
        t.note(setting, Outcome.CHANGED, why="train_on_input: the loss covers only the answers")


def _columns(value: Mapping[str, Value]) -> Block:
    mapped = value.get("column_map")
    if isinstance(mapped, dict):
        ours = {"input": "prompt", "output": "completion"}
        return {ours.get(str(key), str(key)): theirs for key, theirs in mapped.items()}
    if value.get("conversation_column"):
        return {"conversations": value["conversation_column"]}
    return {"text": value["column"]} if value.get("column") else {}


def modules(t: Translation, setting: Setting) -> None:
    """Set the layers that get an adapter, including the feed-forward layers if apply_lora_to_mlp is set."""
    words = [_MODULES.get(word, word) for word in setting.words()]
    words += ["gate_proj", "up_proj", "down_proj"] if lookup(t.document.values, ("model", "apply_lora_to_mlp")) else []
    t.set(setting, "adapter.target_modules", words)


def optimizer(t: Translation, setting: Setting) -> None:
    """Set the optimizer from its class name."""
    shared_rules.optimizer(t, replace(setting, value=str(setting.value).rpartition(".")[2]))


def schedule(t: Translation, setting: Setting) -> None:
    """Set the learning-rate schedule."""
    name = str(setting.value)
    kind = next((one for one in ("cosine", "linear", "constant") if one in name), "cosine")
    t.set(setting, "param_scheduler.type", kind)


def clip(t: Translation, setting: Setting) -> None:
    """Set the largest gradient norm."""
    if setting.value == "none":
        t.set(setting, "optim_wrapper.clip_grad", None)
    else:
        t.set(setting, "optim_wrapper.clip_grad.max_norm", setting.value)


def output_layer(t: Translation, setting: Setting) -> None:
    """Record that the head gets no adapter: the chunked loss uses the head's weight directly."""
    if shared_rules.truth(setting.value):
        t.note(setting, Outcome.CHANGED, why="the output layer gets no adapter in tuner")
    else:
        t.leave(setting, "always so")


def _defaults(document: Document) -> Mapping[str, Value]:
    values = document.values
    # The defaults of every lora_* builder in torchtune 0.6.
    of_adapter = {"model.lora_rank": 8, "model.lora_alpha": 16, "model.lora_dropout": 0.0}
    is_adapter = _METHOD.search(str(lookup(values, ("model", "_component_")) or ""))
    return {
        **(of_adapter if is_adapter else {}),
        "batch_size": 1,
        "gradient_accumulation_steps": 1,
        "epochs": 1,
        "clip_grad_norm": "none",
        "optimizer.lr": _RATE,
        "lr_scheduler._component_": "constant" if "lr_scheduler" not in values else "cosine",
        "tokenizer.max_seq_len": 2048,
        "enable_activation_checkpointing": False,
        "optimizer.weight_decay": 0.01,
        **({"_warmup": 0.0} if lookup(values, ("lr_scheduler", "num_warmup_steps")) is None else {}),
        **({} if lookup(values, ("dataset", "packed")) is not None else {"_packed": False}),
    }


_WORDS = key_tables.of("torchtune")
TABLE: Mapping[str, Rule] = {
    **_WORDS.rules,
    **by_word(
        {
            "model._component_": shared_rules.learned,
            "model.lora_attn_modules": modules,
            "model.apply_lora_to_mlp": recorded_with("lora_attn_modules"),
            "model.apply_lora_to_output": output_layer,
            "checkpointer.checkpoint_dir": checkpoint_dir,
            "dataset dataset_val": dataset,
            "packed": recorded_with("the data set"),
            "optimizer._component_": optimizer,
            "lr_scheduler._component_": schedule,
            "lr_scheduler.num_warmup_steps": shared_rules.warmup_steps,
            "loss._component_": recorded_with("the objective"),
            "epochs": shared_rules.epochs,
            "clip_grad_norm": clip,
            "compile": shared_rules.switched("train_cfg.torch_compile"),
            "log_every_n_steps": shared_rules.interval("log.interval"),
        }
    ),
}

TOOL = Tool("torchtune", TABLE, _defaults, prepare=_prepare, begin=_begin, others=_WORDS.others)
