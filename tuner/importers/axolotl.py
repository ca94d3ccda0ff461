"""Translates Axolotl's YAML, with its list of `datasets`, each with a format of its own.

Older names of its keys are known too; an empty key is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tuner import paths
from tuner.files import JsonObject
from tuner.importers import deepspeed, image_keys, key_tables, reward_keys, shared_rules, training_arguments
from tuner.importers.aliases import Alias, by_word
from tuner.importers.document import ForeignConfig, Keys, Value
from tuner.importers.objective_names import NEAREST, WORDS
from tuner.importers.shared_rules import one_file, place_of_rows, renamed, truth
from tuner.importers.translation import Outcome, Rule, Setting, Tool, Translation, of_objective, when_on
from tuner.recipes.merging import lookup
from tuner.recipes.schema.objectives import OBJECTIVES

_RL = WORDS["axolotl"]
"""Methods that tuner does not have -> the nearest objective."""
_TEMPLATES = {
    **{name: name for name in ("alpaca", "chatml", "gemma", "llama3")},
    **{"phi_3": "phi3", "mistral_v1": "mistral", "deepseek_v2": "deepseek"},
}
"""Axolotl's chat_template -> tuner's."""
_FLAGGED = {
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
    "flex_attention": "flex_attention",
}
_KNOWN_ATTENTION = {"eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"}


def _prepare(t: Translation) -> None:
    values = t.document.values
    adapter = str(values.get("adapter") or "")
    t.method = adapter if adapter in ("lora", "qlora") else "lora" if adapter else "full"
    if t.method == "lora" and (truth(values.get("load_in_4bit")) or truth(values.get("load_in_8bit"))):
        t.method = "qlora"
    elif t.method == "lora" and truth(values.get("peft_use_dora")):
        t.method = "dora"
    rl = str(values.get("rl") or "")
    t.objective = _RL.get(rl, NEAREST.get(rl, "reward" if truth(values.get("reward_model")) else "sft"))
    if rl and rl not in _RL:
        t.obstacle = f"tuner has no {rl}; the nearest is {t.objective}"
    if truth(values.get("process_reward_model")):
        t.obstacle = "tuner trains reward models of whole answers, not of steps"
    reward_keys.require_reward(t, "trl.reward_funcs")
    if values.get("pretraining_dataset"):
        t.objective = "pretrain"


def rl(t: Translation, setting: Setting) -> None:
    """Record the objective; IPO is a loss of DPO in tuner."""
    shared_rules.learned(t, setting)
    if setting.value == "ipo":
        t.set(setting, "objective.loss_type", ["ipo"])


def linear(t: Translation, setting: Setting) -> None:
    """Adapt all linear layers, unless lora_target_modules lists some."""
    if not truth(setting.value):
        t.leave(setting, "the given layers are adapted, or all linear ones")
    elif t.value("lora_target_modules"):
        t.leave(setting, "lora_target_modules lists them")
    else:
        t.set(setting, "adapter.target_modules", "all-linear")


def any_attention(t: Translation, setting: Setting) -> None:
    """Set the attention kernel if transformers has it."""
    is_known = str(setting.value) in _KNOWN_ATTENTION
    why = None if is_known else f"tuner uses transformers' choice for {setting.value!r}"
    t.set(setting, "model.attn_implementation", setting.value if is_known else None, why, changed=not is_known)


def checkpointing(t: Translation, setting: Setting) -> None:
    """Set gradient checkpointing; tuner keeps the activations on the GPU."""
    offloads = str(setting.value).lower() in ("offload", "offload_disk", "unsloth")
    why = "kept on the GPU" if offloads else None
    t.set(setting, "train_cfg.gradient_checkpointing", offloads or truth(setting.value), why, changed=offloads)


def wandb_project(t: Translation, setting: Setting) -> None:
    """Switch on Weights & Biases: a project name does so in Axolotl."""
    t.set(setting, "log.trackers", ["wandb"], "the project: WANDB_PROJECT=NAME before the command")


def image_size(t: Translation, setting: Setting) -> None:
    """Limit the pixels of an image to those of Axolotl's size: a side of a square, or width and height."""
    sides = [replace(setting, value=side).whole() for side in setting.words()]
    if not 1 <= len(sides) <= 2:
        raise setting.wrong("neither a side nor width and height")
    why = "Axolotl pads images to this size; tuner only makes larger ones smaller, and keeps their shape"
    t.set(setting, "train_dataloader.dataset.image_max_pixels", sides[0] * sides[-1], why, changed=True)
    t.has_images = True


def chat_template(t: Translation, setting: Setting) -> None:
    """Set the chat template, or keep the model's own."""
    word = str(setting.value)
    if word.startswith("tokenizer_default"):
        t.note(setting, Outcome.TAKEN, why="the model's own chat template")
    elif word == "jinja":
        t.note(setting, Outcome.TAKEN, why="with chat_template_jinja")
    else:
        shared_rules.named_template(t, setting, _TEMPLATES)


_FORMATS = {
    **dict.fromkeys(("alpaca", "alpaca_chat", "gpteacher", "oasst", "reflection"), "alpaca"),
    "sharegpt": "sharegpt",
    **dict.fromkeys(("completion", "pretrain"), "text"),
}
"""First word of `type` -> row format; for other types the format is detected from the columns."""
_CHATS = ("chat_template", "sharegpt", "chatml", "llama3")
_KNOWN = (*_FORMATS, *_CHATS, "input_output")
_ALPACA = "Alpaca's text (### Instruction: ... ### Response: ...)"
_WRITTEN = {
    **dict.fromkeys(("alpaca", "gpteacher", "oasst", "reflection"), _ALPACA),
    "alpaca_chat": "USER: ... ASSISTANT: ...",
    "sharegpt": "the template that `conversation` names, else Vicuna's",
    "chatml": "ChatML",
    "llama3": "Llama 3's chat template",
}
"""First word of `type` -> how Axolotl renders prompts, if not with `chat_template`."""
_QUESTIONS = {"field_instruction": "instruction", "field_input": "input", "field_output": "output"}
_JUDGED = ("prompt", "chosen", "rejected", "completion", "label")
_PROPERTIES = "message_property_mappings"
_OF_ENTRY = {
    *("path", "name", "split", "train_on_split", "type", "data_files", "field", "text_column", "field_messages"),
    *(_PROPERTIES, "chat_template", "chat_template_jinja", "shards", "conversation", *_QUESTIONS),
    *("field_prompt", "field_chosen", "field_rejected", "field_system", "message_field_content", "roles_to_train"),
}


def datasets(t: Translation, setting: Setting) -> None:
    """Add every entry to the training data; entries of test_datasets to the validation data."""
    entries = setting.value if isinstance(setting.value, list) else [setting.value]
    for number, written in enumerate(entries):
        entry, keys = written if isinstance(written, dict) else {"path": written}, (*setting.keys, str(number))
        if entry.get("type") == "_synthetic":
            t.leave(setting, "synthetic rows for a benchmark: tuner smoke makes its own")
            continue
        if not entry.get("path"):
            raise t.document.wrong("the data set has no path", keys, "Set path to a file or a hub id.")
        t.check_block("a data set", entry, keys, _OF_ENTRY, _WORDS.blocks["dataset"])
        if not isinstance(entry.get(_PROPERTIES) or {}, dict):
            raise t.inner((*keys, _PROPERTIES), entry[_PROPERTIES]).wrong("not a block", "Give role and content in it.")
        for key, rule in (("chat_template", chat_template), ("chat_template_jinja", shared_rules.jinja_template)):
            if entry.get(key):
                rule(t, t.inner((*keys, key), entry[key]))
        dataset = {
            "path": _path(entry),
            "name": entry.get("name"),
            "split": str(entry.get("split") or entry.get("train_on_split") or "train"),
            **_shape(t, setting, keys, entry),
        }
        if entry.get("shards"):
            shards = t.inner((*keys, "shards"), entry["shards"])
            dataset["weight"] = 1 / shards.whole()
            why = "Axolotl takes such a part of the rows at random; these are evenly spread"
            t.note(shards, Outcome.CHANGED, f"weight = {dataset['weight']:g}", why)
        (t.validation if setting.key == "test_datasets" else t.datasets).append(dataset)
    t.note(setting, Outcome.TRANSLATED, f"{len(entries)} data sets")
    _roles(t, setting, entries)


_ASSISTANTS = {"assistant", "gpt", "model"}


def _roles(t: Translation, setting: Setting, entries: Sequence[Value]) -> None:
    """Set which turns are trained by the data sets' `roles_to_train`: without a role, those that are marked."""
    roles = [entry.get("roles_to_train") if isinstance(entry, dict) else None for entry in entries]
    for number, trained_roles in enumerate(roles):
        if trained_roles is None:
            continue
        shown = t.inner((*setting.keys, str(number), "roles_to_train"), trained_roles)
        if set(shown.words()) - _ASSISTANTS:
            t.change(shown, "the loss covers the assistant's turns alone")
        elif shown.words():
            t.note(shown, Outcome.TAKEN, why="as tuner does it")
        elif any(role != [] for role in roles):
            t.change(shown, "the data sets of a recipe choose their turns alike")
        else:
            shared_rules.trained_turns(t, shown, "marked")


def finish(t: Translation) -> None:
    """Set whether prompts are trained: the data sets decide the objective."""
    setting = t.settings.get("train_on_inputs")
    if setting is None or setting.value is None:
        return
    entries = t.value("datasets")
    sets = entries if isinstance(entries, list) else []
    if setting.truth() and any(lookup(data_set, ("roles_to_train",)) is not None for data_set in sets):
        t.change(setting, "roles_to_train of a data set chooses other turns: remove one of them")
    elif setting.truth():
        why = "Axolotl leaves out what the chat template writes between turns"
        shared_rules.trained_turns(t, setting, "everything", why)
    else:
        t.note(setting, Outcome.TAKEN, why="as tuner does it")


def _path(entry: JsonObject) -> str:
    path, file = str(entry["path"]), one_file(entry.get("data_files"))
    if file is None or place_of_rows(path, file) == file:
        return file or path
    return f"{path}/{file}" if paths.local(path) else f"hf://datasets/{path}/{file}"


def _shape(t: Translation, setting: Setting, keys: Keys, entry: JsonObject) -> JsonObject:
    type_ = entry.get("type")
    if isinstance(type_, dict):
        columns = {our_column: str(type_[key]) for key, our_column in _QUESTIONS.items() if type_.get(key)}
        judged = {key: str(type_[f"field_{key}"]) for key in _JUDGED if type_.get(f"field_{key}")}
        format_ = "preference" if "chosen" in judged else "feedback" if "label" in judged else "alpaca"
        _note_type(t, keys, "format and similar keys", format_, "the chat template renders prompts, not `format`")
        return {"format": format_, "columns": renamed(judged or columns), "system": type_.get("system_prompt") or None}
    return _named_shape(t, setting, keys, entry, str(type_ or ""))


def _named_shape(t: Translation, setting: Setting, keys: Keys, entry: JsonObject, type_: str) -> JsonObject:
    word = type_.partition(".")[0].partition(":")[0]
    if (written := _WRITTEN.get(word)) and t.objective != "pretrain":
        why = f"Axolotl renders prompts as {written}, tuner with the model's chat template"
        _note_type(t, keys, type_, _FORMATS.get(word), why)
    if t.objective != "sft" and t.objective != "pretrain":
        if OBJECTIVES[t.objective].facts.generates and word:
            why = "a function of the config's makes the prompts; tuner reads the column prompt"
            _note_type(t, keys, type_, None, why)
        names = ("prompt", "chosen", "rejected")
        columns = {key: str(entry[f"field_{key}"]) for key in names if entry.get(f"field_{key}")}
        return {"format": None, "columns": renamed(columns)}
    if word in ("completion", "pretrain") or setting.key == "pretraining_dataset":
        field = str(entry.get("field") or entry.get("text_column") or "text")
        t.objective = "pretrain"
        return {"format": "text", "columns": renamed({"text": field})}
    if word in _CHATS:
        return _chat(entry)
    if word and word not in _KNOWN:
        why = "tuner detects the format from the columns and renders prompts with the model's chat template"
        _note_type(t, keys, type_, None, why)
    return {"format": _FORMATS.get(word)}


def _note_type(t: Translation, keys: Keys, type_: str, format_: str | None, why: str) -> None:
    shown = replace(t.inner((*keys, "type"), type_), key=f"{keys[0]}[{keys[-1]}].type")
    t.change(shown, why, f"format {format_}")


def _chat(entry: JsonObject) -> JsonObject:
    mappings = entry.get(_PROPERTIES) or {}
    content = mappings.get("content") or entry.get("message_field_content")
    format_ = "sharegpt" if content == "value" or entry.get("type") == "sharegpt" else "messages" if content else None
    field, system = entry.get("field_messages"), entry.get("field_system")
    columns = {} if field in (None, "messages", "conversations", "conversation") else {"messages": str(field)}
    columns |= {"system": str(system)} if system not in (None, "system") else {}
    return {"format": format_ or ("messages" if columns else None), "columns": columns or None}


def _defaults(document: ForeignConfig) -> Mapping[str, Value]:
    values = document.values
    is_adapter = bool(values.get("adapter"))
    of_adapter = {"lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.0} if is_adapter else {}
    names_layers = any(values.get(key) for key in ("lora_target_modules", "lora_target_linear"))
    return {
        **of_adapter,
        **({"lora_target_modules": ["q_proj", "v_proj"]} if is_adapter and not names_layers else {}),
        "sequence_len": 512,
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "num_epochs": 1,
        "sample_packing": False,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "lr_scheduler": "cosine",
        "gradient_checkpointing": False,
        "seed": 42,
        # TRL's beta and cpo_alpha of CPO; Axolotl's manual says so of its gamma.
        **({"rl_beta": 0.1, "simpo_gamma": 0.5, "cpo_alpha": 1.0} if values.get("rl") == "simpo" else {}),
        # Without both keys Axolotl warms up for 3 % of all steps, at most 100 (core/builders/base.py).
        **({"warmup_ratio": 0.03} if values.get("warmup_ratio") is None and values.get("warmup_steps") is None else {}),
    }


_WORDS = key_tables.of("axolotl")
TABLE: Mapping[str, Rule] = {
    **{key: rule for key, rule in training_arguments.TABLE.items() if "*" not in key},
    **_WORDS.rules,
    **{f"trl.{key}": rule for key, rule in reward_keys.RULES.items()},
    **by_word(
        {
            "base_model": shared_rules.model,
            "adapter": shared_rules.method,
            "lora_model_dir": shared_rules.adapter_path,
            "load_in_4bit load_in_8bit": shared_rules.bits,
            "lora_target_linear": linear,
            "rl": rl,
            "dpo_beta": of_objective("dpo simpo", Alias("objective.beta")),
            "orpo_alpha": of_objective("orpo simpo", Alias("objective.beta")),
            "dpo_loss_type": of_objective("dpo", Alias("objective.loss_type")),
            "datasets test_datasets pretraining_dataset": datasets,
            "train_on_inputs": lambda t, setting: None,  # `finish` does it
            "default_system_message": shared_rules.system,
            "val_set_size": shared_rules.held_out,
            "num_epochs": shared_rules.epochs,
            "optimizer": shared_rules.optimizer,
            "lr_scheduler": shared_rules.schedule,
            "noisy_embedding_alpha": shared_rules.noise,
            "cosine_min_lr_ratio": shared_rules.cosine_floor,
            "bf16 fp16 bfloat16 float16": shared_rules.compute_type,
            "gradient_checkpointing": checkpointing,
            "activation_offloading": shared_rules.switched("train_cfg.activation_offloading"),
            "deepcompile": when_on("train_cfg.torch_compile", "deepcompile", "it is off"),
            "processor_type": image_keys.marks_images,
            "freeze_mm_modules": image_keys.of_images("vision", "projector"),
            "image_size": image_size,
            "image_base_dir": image_keys.folder,
            "attn_implementation": any_attention,
            "xformers_attention sage_attention": "transformers has no such kernel",
            **{
                flag: when_on("model.attn_implementation", kernel, "false has no effect")
                for flag, kernel in _FLAGGED.items()
            },
            "wandb_project": wandb_project,
            **{
                f"use_{name.partition('_')[0]}": when_on("log.trackers", [name], "false: none, as without log.trackers")
                for name in ("wandb", "tensorboard", "mlflow", "comet_ml", "trackio")
            },
            "chat_template": chat_template,
            "chat_template_jinja": shared_rules.jinja_template,
            "chat_template_kwargs trl.chat_template_kwargs": shared_rules.template_values,
            "evals_per_epoch": shared_rules.per_epoch("train_cfg.val_interval"),
            "saves_per_epoch": shared_rules.per_epoch("checkpoint.interval"),
            "rpo_alpha": shared_rules.added_loss("sft"),
            "loss_type trl.loss_type": reward_keys.loss_type,
            "deepspeed": deepspeed.chosen,
            "expert_parallel_size": shared_rules.divided_experts,
            "liger_rms_norm liger_glu_activation liger_swiglu liger_rope liger_layer_norm": when_on(
                "model.use_liger_kernel",
                True,
                "false: its kernels are one setting, which another key may enable",
                "all of its kernels together",
            ),
        }
    ),
}

TOOL = Tool("Axolotl", TABLE, _defaults, finish=finish, prepare=_prepare, others=_WORDS.others)
