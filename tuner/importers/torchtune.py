"""Translates torchtune's YAML: `_component_` names a builder, `${...}` refers to another value of the file.

The builder's name tells the model, its size and LoRA; the checkpoint's folder tells which weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from tuner.errors import Key, Option
from tuner.files import JsonObject
from tuner.importers import key_tables, reward_keys, shared_rules
from tuner.importers.aliases import Alias, by_word
from tuner.importers.document import ForeignConfig, Value
from tuner.importers.key_tables import Changes
from tuner.importers.translation import (
    Function,
    Outcome,
    Rule,
    Setting,
    Tool,
    Translation,
    of_objective,
    recorded_with,
    unlike_default,
)
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
    *("conversation_column", "column", "name", "subset", "new_system_prompt", "image_dir", "weight"),
}
_OTHERS = {
    "tasks": "evaluates a model: tuner eval",
    "eleuther": "evaluates a model: tuner eval",
    "prompt": "generates answers: tuner chat",
    "max_new_tokens": "generates answers: tuner chat",
    **dict.fromkeys(
        ("policy_model", "ppo_epochs", "ppo_batch_size"), "trains with PPO; tuner has grpo and rloo (docs/grpo.md)"
    ),
    "datasets": "trains on images with data sets of its own recipe, which are not translated (docs/vision.md)",
}
"""Key at the top -> what a config with this key does that a recipe cannot do."""
_MODULES = {"output_proj": "o_proj"}
_GROUP = ("grpo_samples", "grpo_size")
"""Keys with the completions of a prompt, which configs of GRPO alone have."""
_ONLINE = ("ppo_epochs", "postprocessing")
"""Keys that GRPO and PPO share."""
_KD = ("teacher_model", "teacher_checkpointer")
_GSM8K = {"path": "openai/gsm8k", "name": "main", "split": "train", "format": "alpaca"}
_GSM8K_REWARD = "torchtune rewards the form of the answer and its number; tuner the number alone"
_RATE = 2e-5
_ANSWERS = "answers: tuner chat"


def _component(t: Translation, key: str) -> str:
    return str(lookup(t.document.values, (key, "_component_")) or "")


def _refuse_others(document: ForeignConfig) -> None:
    """Refuse configs of torchtune recipes that no recipe of tuner does."""
    values = document.values
    is_grpo = any(key in values for key in _GROUP)
    problems = {key: problem for key, problem in _OTHERS.items() if not (is_grpo and key in _ONLINE)}
    if not {"optimizer", "dataset"} & values.keys():
        problems["quantizer"] = "quantizes a model and does not train"
    for key, problem in problems.items():
        if key in values:
            fix = "Give a config of full, LoRA or DPO training."
            raise document.wrong(f"a torchtune config that {problem}", (key,), fix)


def _begin(document: ForeignConfig) -> ForeignConfig:
    _refuse_others(document)
    # The tokenizer's path may refer to a value from the command line: only paths that the recipe needs must be known.
    return document.resolved(is_complete=False)


def _prepare(t: Translation) -> None:
    match = _METHOD.search(_component(t, "model"))
    method = match[1].replace("qdora", "dora") if match else "full"
    t.method = "dora" if method == "lora" and lookup(t.document.values, ("model", "use_dora")) else method
    loss = _component(t, "loss").rpartition(".")[2]
    t.objective = "dpo" if loss in ("DPOLoss", "RSOLoss", "IPOLoss") else "sft"
    if any(key in t.document.values for key in _GROUP) or "GRPO" in loss:
        t.objective = "grpo"
    elif any(key in t.document.values for key in _KD):
        t.objective = "distill"
    if "text_completion_dataset" in _component(t, "dataset"):
        t.objective = "pretrain"


def _folder(setting: Setting) -> Setting:
    """Return the setting of a checkpoint's folder; Llama's has its weights in another layout below it."""
    if _UNKNOWN.search(str(setting.value)):
        raise setting.wrong("is not defined in this file", "Write out the folder.")
    return replace(setting, value=str(setting.value).rstrip("/").removesuffix("/original"))


def dataset(t: Translation, setting: Setting) -> None:
    """Add the data set that a builder reads."""
    if isinstance(setting.value, list) and setting.value:
        for number, entry in enumerate(setting.value):
            dataset(t, replace(setting, value=entry, keys=(*setting.keys, str(number))))
        return
    if not isinstance(setting.value, dict):
        raise setting.wrong("not a data set")
    value = setting.value
    name = str(value.get("_component_") or "").rpartition(".")[2]
    t.check_block("a data set", value, setting.keys, _OF_DATASET, _WORDS.blocks["dataset"])
    split = str(value.get("split") or "train")
    files = value.get("data_files")
    source = files if isinstance(files, str) else value.get("source")
    columns = {
        our_column: str(their_column)
        for our_column, their_column in _columns(value).items()
        if their_column and our_column != their_column
    } or None
    if name == "gsm8k_dataset":
        rows: JsonObject = {**_GSM8K}
        t.set(setting, "objective.rewards", [{"type": "math"}], _GSM8K_REWARD, changed=True)
    elif name in _DATASETS:
        path, format_ = _DATASETS[name]
        rows = {"path": str(source or path), "format": format_, "split": split, "columns": columns}
    elif name in _OWN or source:
        format_ = "text" if "completion" in name else None
        style = value.get("conversation_style")
        format_ = {"sharegpt": "sharegpt", "openai": "messages"}.get(str(style), format_)
        rows = {"path": str(source), "format": format_, "split": split, "columns": columns}
    else:
        t.obstacle = t.obstacle or f"tuner has no data set {name!r}: give yours with {Option('data')}"
        t.note(setting, Outcome.LEFT_OUT, why=t.obstacle)
        return
    rows |= {"name": value.get("name") or value.get("subset") or rows.get("name")}
    rows |= {"system": value["new_system_prompt"]} if value.get("new_system_prompt") else {}
    rows |= {"image_folder": str(value["image_dir"])} if value.get("image_dir") else {}
    rows |= {"weight": value["weight"]} if value.get("weight") not in (None, 1, 1.0) else {}
    is_validation = setting.key == "dataset_val"
    (t.validation if is_validation else t.datasets).append(rows)
    t.note(setting, Outcome.TRANSLATED, f"data {rows['path']}")
    if value.get("packed") is not None and not is_validation:
        t.set(setting, "train_dataloader.dataset.packing", value["packed"])
    if name in _ALPACA:
        t.change(t.inner((*setting.keys, "_component_"), name), _ALPACA_PROMPT, "format alpaca")
    elif value.get("train_on_input"):
        shared_rules.trained_turns(t, t.inner((*setting.keys, "train_on_input"), True), "everything")


def _columns(value: Mapping[str, Value]) -> JsonObject:
    mapped = value.get("column_map")
    if isinstance(mapped, dict):
        our_columns = {"input": "prompt", "output": "completion"}
        return {our_columns.get(str(key), str(key)): their_column for key, their_column in mapped.items()}
    if value.get("conversation_column"):
        return {"conversations": value["conversation_column"]}
    return {"text": value["column"]} if value.get("column") else {}


def modules(t: Translation, setting: Setting) -> None:
    """Set the layers that get an adapter, including the feed-forward layers if apply_lora_to_mlp is set."""
    words = [_MODULES.get(word, word) for word in setting.words()]
    words += ["gate_proj", "up_proj", "down_proj"] if lookup(t.document.values, ("model", "apply_lora_to_mlp")) else []
    t.set(setting, "adapter.target_modules", words)


def rollouts(t: Translation, setting: Setting) -> None:
    """Set the optimizer steps: torchtune counts rollouts of an epoch."""
    steps = setting.whole() * t.whole("epochs", 1) * t.whole("ppo_epochs", 1)
    t.set(setting, "train_cfg.max_steps", steps, "rollouts of an epoch x epochs x ppo_epochs")


def forward_batch(t: Translation, setting: Setting) -> None:
    """Set the micro-batch of GRPO: completions, of which `batch_size` prompts have `grpo_samples` each."""
    micro = setting.whole()
    group = t.whole(next((key for key in _GROUP if t.value(key) is not None), ""), 1)
    t.set(setting, "train_dataloader.batch_size", micro)
    t.set(setting, "optim_wrapper.accumulative_counts", max(1, t.whole("batch_size", 1) * group // micro))


def micro_batch(t: Translation, setting: Setting) -> None:
    """Set the micro-batch; in GRPO `batch_size` counts prompts."""
    if t.objective == "grpo":
        t.note(setting, Outcome.TRANSLATED, why="prompts of a step on each rank, with forward_batch_size")
    else:
        t.set(setting, "train_dataloader.batch_size", setting.value)


def in_folder(rule: Function) -> Function:
    """Return the rule for a checkpoint's folder, as the model that it holds."""
    return lambda t, setting: rule(t, _folder(setting))


def _defaults(document: ForeignConfig) -> Mapping[str, Value]:
    values = document.values
    # The defaults of every lora_* builder in torchtune 0.6.
    of_adapter = {"model.lora_rank": 8, "model.lora_alpha": 16, "model.lora_dropout": 0.0}
    is_adapter = _METHOD.search(str(lookup(values, ("model", "_component_")) or ""))
    return {
        **(of_adapter if is_adapter else {}),
        "batch_size": 1,
        "gradient_accumulation_steps": 1,
        "epochs": 1,
        "clip_grad_norm": 0,
        "optimizer.lr": _RATE,
        "lr_scheduler._component_": "constant" if "lr_scheduler" not in values else "cosine",
        "tokenizer.max_seq_len": 2048,
        **({"forward_batch_size": 1} if any(key in values for key in _GROUP) else {}),
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
            # The chunked loss uses the head's weight directly.
            "model.apply_lora_to_output": Changes("the output layer gets no adapter in tuner"),
            "checkpointer.checkpoint_dir": in_folder(shared_rules.model),
            "dataset dataset_val": dataset,
            "packed": recorded_with("the data set"),
            "optimizer._component_": shared_rules.optimizer,
            "lr_scheduler._component_": Alias(
                "param_scheduler.type", {".*linear.*": "linear", ".*constant.*": "constant", ".*": "cosine"}
            ),
            "lr_scheduler.num_warmup_steps": shared_rules.warmup_steps,
            "loss._component_": recorded_with("the objective"),
            "epochs": shared_rules.epochs,
            "clip_grad_norm": shared_rules.clipping,
            "compile": shared_rules.switched("train_cfg.torch_compile"),
            "tokenizer.max_seq_len": unlike_default(
                "train_dataloader.dataset.max_length",
                f"torchtune cuts no sample: {Key('train_dataloader.dataset.max_length', 'N')}",
            ),
            "grpo_samples grpo_size": of_objective("grpo", Alias("objective.num_generations")),
            "loss.epsilon": of_objective("grpo", Alias("objective.epsilon"), "tuner's loss has no such setting"),
            "loss.kl_coeff": of_objective("grpo", Alias("objective.beta"), "tuner's loss has no such setting"),
            "max_generated_tokens": of_objective("grpo", Alias("objective.max_completion_length"), _ANSWERS),
            "temperature": of_objective("grpo", Alias("objective.temperature"), _ANSWERS),
            "top_k": of_objective("grpo", Alias("objective.top_k"), _ANSWERS),
            "ppo_epochs": of_objective("grpo", Alias("objective.num_iterations"), "belongs to PPO"),
            "num_steps": rollouts,
            "forward_batch_size": of_objective("grpo", forward_batch),
            "batch_size": micro_batch,
            "teacher_checkpointer.checkpoint_dir": in_folder(reward_keys.teacher),
            "kd_ratio": Changes("the loss is the divergence alone", harmless=frozenset()),
            "log_every_n_steps": shared_rules.interval("log.interval"),
        }
    ),
}

TOOL = Tool("torchtune", TABLE, _defaults, prepare=_prepare, begin=_begin, others=_WORDS.others)
