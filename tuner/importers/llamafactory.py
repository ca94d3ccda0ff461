"""Translates LLaMA-Factory's YAML and JSON, with the data sets in its `dataset_info.json`.

Defaults that differ from those of tuner are written into the recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tuner import paths
from tuner.errors import Key, Option, RecipeError, did_you_mean
from tuner.files import JsonObject
from tuner.importers import aliases, image_keys, key_tables, llamafactory_v1, shared_rules, training_arguments
from tuner.importers.aliases import by_word
from tuner.importers.document import ForeignConfig, Value
from tuner.importers.objective_names import NEAREST, WORDS
from tuner.importers.shared_rules import renamed, truth
from tuner.importers.translation import Outcome, Rule, Setting, Tool, Translation, when_on

_OBJECTIVES = {**WORDS["llamafactory"], "ppo": NEAREST["ppo"]}
_LOSSES = {"kto_pair": "bco_pair", "sigmoid": "sigmoid", "hinge": "hinge", "ipo": "ipo"}
_ALONE = ("orpo", "simpo")
"""The losses of its stage 'dpo' that are objectives in tuner."""
_FINETUNING = ("lora", "oft", "freeze", "full")
_SYSTEM = {
    "qwen": "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    "qwen2_vl": "You are a helpful assistant.",
    "smollm2": "You are a helpful AI assistant named SmolLM, trained by Hugging Face.",
    "zephyr": "You are Zephyr, a helpful assistant.",
    "granite4": "You are Granite, developed by IBM. You are a helpful AI assistant.",
    "gpt_oss": "You are ChatGPT, a large language model trained by OpenAI.",
    "lfm2": "You are a helpful AI assistant.",
    "opencoder": "You are OpenCoder, created by OpenCoder Team.",
    "mimo": "You are a helpful assistant.",
    "minicpm_v": "You are a helpful assistant.",
    "kimi_vl": "You are a helpful assistant",
    "moonlight": "You are a helpful assistant provided by Moonshot-AI.",
    "chatml_de": "Du bist ein freundlicher und hilfsbereiter KI-Assistent.",
    **dict.fromkeys(
        ("vicuna", "llava", "llava_next"),
        "A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's questions.",
    ),
}
"""Template -> its own system prompt (src/llamafactory/data/template.py at 0.9.5), which rows without one get."""
_OTHER_SYSTEM = """
dbrx deepseekcoder ernie gemma4 gemma4n granite3_vision intern2 intern_vl lfm2_vl llama2_zh llava_next_qwen
llava_next_video mimo_v2 mimo_vl minicpm_v_4_6 minicpm_o minimax1 minimax2 qwen2_audio qwen2_omni sailor seed_coder
telechat2 video_llava xuanyuan yi_vl youtu_vl aeva
"""
"""Further templates with a system prompt of their own."""
_CUTS = (
    "of a sample that is too long LLaMA-Factory cuts prompt and answer, each at its end and in proportion; "
    "tuner cuts the end of the sample"
)
_TEMPLATES = {
    **{name: name for name in ("alpaca", "vicuna", "zephyr", "llama2", "llama3", "phi3", "mistral", "gemma")},
    **{"qwen": "chatml", "chatml": "chatml", "intern2": "internlm2", "deepseek": "deepseek"},
}
"""LLaMA-Factory's template -> tuner's, for models that are not in the catalog."""


def _prepare(t: Translation) -> None:
    values = t.document.values
    stage, kind = str(t.value("stage")), str(t.value("finetuning_type"))
    if stage not in _OBJECTIVES:
        raise t.settings["stage"].wrong("not a LLaMA-Factory stage", f"Known: {', '.join(_OBJECTIVES)}.")
    if kind not in _FINETUNING:
        fix = f"Known: {', '.join(_FINETUNING)}."
        raise t.settings["finetuning_type"].wrong("not a LLaMA-Factory finetuning_type", fix)
    pref_loss = values.get("pref_loss")
    t.objective = str(pref_loss) if stage == "dpo" and pref_loss in _ALONE else _OBJECTIVES[stage]
    t.method = kind
    if kind in ("lora", "oft"):
        t.method = "qlora" if values.get("quantization_bit") else "dora" if truth(values.get("use_dora")) else "lora"
    if stage == "ppo":
        t.obstacle = "tuner has no ppo; the nearest is grpo, which needs a reward (docs/grpo.md)"


def loss(t: Translation, setting: Setting) -> None:
    """Set DPO's loss; ORPO and SimPO are objectives of their own in tuner."""
    word = str(setting.value)
    if t.objective == "dpo":
        our_loss, why = _LOSSES.get(word, "sigmoid"), None if word in _LOSSES else f"tuner has no loss {word!r}"
        t.set(setting, "objective.loss_type", [our_loss], why, changed=bool(why), is_learned=bool(why))
    elif t.is_of(("dpo", *_ALONE), setting):
        shared_rules.learned(t, setting)


def quantization_bit(t: Translation, setting: Setting) -> None:
    """Set 4 or 8 bits."""
    bits = setting.whole()
    our_bits = bits if bits in (4, 8) else 4
    why = None if bits == our_bits else f"bitsandbytes supports 4 or 8 bits, not {bits}"
    t.set(setting, "quantization.bits", our_bits, why, changed=bits != our_bits)


def packing(t: Translation, setting: Setting) -> None:
    """Set packing. `neat_packing` switches it on: in tuner, packed samples never attend to each other."""
    if setting.key == "packing" and truth(t.value("neat_packing")):
        t.leave(setting, "neat_packing is true, which packs")
    elif setting.key == "neat_packing" and not truth(setting.value):
        t.leave(setting, "packed samples never attend to each other")
    else:
        t.set(setting, "train_dataloader.dataset.packing", setting.value)


def template(t: Translation, setting: Setting) -> None:
    """Set the chat template if it is of another family than the model, and the template's own system prompt."""
    shared_rules.named_template(t, setting, _TEMPLATES)
    word = str(setting.value)
    if word in _SYSTEM and t.value("default_system") is None and t.objective != "pretrain":
        t.system = _SYSTEM[word]
        t.note(setting, Outcome.TRANSLATED, f"train_dataloader.dataset.system = {t.system!r}", "of the template")
    elif word in _OTHER_SYSTEM.split() and t.value("default_system") is None:
        our_key = Key("train_dataloader.dataset.system", "TEXT")
        t.change(setting, f"LLaMA-Factory's template has a system prompt of its own: {our_key}")


def thinks(t: Translation, setting: Setting) -> None:
    """Set whether answers think; LLaMA-Factory takes the thoughts out of the rows of one that does not."""
    shared_rules.thinks(t, setting)
    if not setting.truth():
        t.set(setting, "train_dataloader.dataset.thinking", "strip")


_TURNS = {"train_on_prompt": "everything", "mask_history": "last"}
_LAST_PAIR = (
    "of an answer that calls tools, LLaMA-Factory trains what follows the last result alone; tuner the calls too"
)


def turns(t: Translation, setting: Setting) -> None:
    """Set which turns are trained.

    Raises:
        RecipeError: the config has two keys for it, which LLaMA-Factory refuses.
    """
    if not setting.truth():
        t.note(setting, Outcome.TAKEN, why="as tuner does it")
        return
    if all(truth(t.value(key)) for key in _TURNS):
        raise setting.wrong(f"{' and '.join(_TURNS)} exclude each other", "Remove one of them.")
    why = _LAST_PAIR if setting.key == "mask_history" else None
    shared_rules.trained_turns(t, setting, _TURNS[setting.key], why)


def cutoff(t: Translation, setting: Setting) -> None:
    """Set the length of the longest sample, and say how longer ones are cut."""
    why = None if t.objective == "pretrain" else _CUTS
    t.set(setting, "train_dataloader.dataset.max_length", setting.value, why, changed=why is not None)


def freeze_layers(t: Translation, setting: Setting) -> None:
    """Set how many of the last layers are trained."""
    if t.method == "freeze" and setting.whole() > 0:
        t.set(setting, "train_cfg.trainable_layers", setting.value)
    else:
        t.leave(setting, "only the last layers can be trained, with finetuning_type freeze")


def pissa(t: Translation, setting: Setting) -> None:
    """Initialize the adapter with PiSSA, in `pissa_iter` iterations; -1 is the exact decomposition."""
    rounds = t.whole("pissa_iter", 16)
    begins = "pissa" if rounds == -1 else f"pissa_niter_{rounds}"
    t.set(setting, "adapter.init_lora_weights", begins if truth(setting.value) else True)


def new_adapter(t: Translation, setting: Setting) -> None:
    """Record that LLaMA-Factory merges the adapter of the config, and trains another one."""
    if setting.truth() and t.value("adapter_name_or_path") is not None:
        t.change(setting, "tuner trains the adapter on: merge it into the model first (tuner export --merge)")
    else:
        t.note(setting, Outcome.TAKEN, why="as tuner does it")


_INFO = "dataset_info.json"
_COLUMNS = {
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output", "system": "system"},
    "sharegpt": {"messages": "conversations", "system": "system", "tools": "tools"},
    "openai": {"messages": "messages", "system": "system", "tools": "tools"},
    "preference": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected", "system": "system"},
}
"""Formatting -> LLaMA-Factory's name of a column -> the row format's name."""
_FORMATS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "openai": "messages"}
_MEDIA = ("videos", "audios")
_PARENTS = 4
"""How many folders above the config are searched for its `data` folder, as for examples/train_lora."""


def datasets(t: Translation, setting: Setting) -> None:
    """Add the named data sets, each as it is registered."""
    registry = _registry(t)
    registered = [dataset for name in setting.words() if (dataset := _one(t, setting, name, registry))]
    if not setting.words():
        raise setting.wrong("has no data set")
    if not registered:
        return
    (t.datasets if setting.key == "dataset" else t.validation).extend(registered)
    shown = ", ".join(str(dataset.get("path")) for dataset in registered)
    t.note(setting, Outcome.TRANSLATED, f"data {shown}")
    if setting.key == "eval_dataset" and len(registered) > 1:
        t.note(setting, Outcome.CHANGED, why=f"validation uses only the first: {registered[0].get('path')}")


def max_samples(t: Translation, setting: Setting) -> None:
    """Record the limit of rows of each data set, which `finish` sets."""
    t.note(setting, Outcome.TRANSLATED, f"max_rows = {setting.whole()} of each data set")


def finish(t: Translation) -> None:
    """Set the limit of rows from `max_samples` for every data set, and record what no key of the config says."""
    if max_rows := t.whole("max_samples", 0):
        for dataset in (*t.datasets, *t.validation):
            dataset["max_rows"] = min(max_rows, dataset.get("max_rows") or max_rows)
    if t.objective == "pretrain":
        why = "LLaMA-Factory joins all texts and cuts them at cutoff_len; tuner packs whole texts, best fit first"
        t.note_way("blocks of text", why)
    else:
        why = "LLaMA-Factory trains what the template writes behind an answer, as ChatML's newline; tuner the end token"
        t.note_way("the end of an answer", why)


def _registry(t: Translation) -> ForeignConfig | None:
    """Return `dataset_info.json` from the data folder, searched in the working folder and above the config."""
    folder = Path(str(t.value("dataset_dir", "data")))
    above = [t.document.folder, *t.document.folder.absolute().parents][:_PARENTS]
    for place in (folder, *(parent / folder for parent in above)):
        if paths.is_file(place / _INFO):
            return ForeignConfig.of_yaml(place / _INFO)
    return None


def _one(t: Translation, setting: Setting, name: str, registry: ForeignConfig | None) -> JsonObject | None:
    if registry is None:
        if Path(name).suffix or "/" in name:
            return {"path": name}
        why = f"{_INFO} is missing, so {name!r} is unknown: give it with {Option('data', 'FILE')}"
        t.note(setting, Outcome.CHANGED, f"data {name}", why)
        return {"path": f"{t.value('dataset_dir', 'data')}/{name}.json"}
    info = registry.values.get(name)
    if not isinstance(info, dict):
        problem = f"{name!r} is not registered in {registry.name}"
        raise RecipeError(problem, where=setting.where, fix=did_you_mean(name, registry.values) or "Register it there.")
    for block in ("columns", "tags"):
        if not isinstance(info.get(block) or {}, dict):
            problem = f"the {block} of the data set {name!r} are not a block"
            raise registry.wrong(problem, (name, block), "Write each name in it with that of your file.")
    columns = info.get("columns") or {}
    if any(columns.get(key) for key in _MEDIA):
        t.obstacle = f"its data {name!r} has video or sound, which tuner does not train on (docs/vision.md)"
        t.leave(setting, t.obstacle)
        return None
    dataset: JsonObject = {"path": _path(name, info, registry), "name": info.get("subset")}
    dataset["split"] = info.get("split") or "train"
    drawn = Setting(f"{name}.num_samples", info.get("num_samples"), registry.where((name, "num_samples")))
    if drawn.value:
        dataset["max_rows"] = drawn.whole()
    dataset |= _shape(name, info, registry)
    if images := columns.get("images"):
        t.has_images = True
        _set_images(t, dataset, images, registry)
        return dataset
    _note_unread(t, name, info)
    if info.get("num_samples"):
        shared_rules.draws_rows(t, replace(setting, key=f"{_INFO}: {name}.num_samples", value=info["num_samples"]))
    return dataset


def _set_images(t: Translation, dataset: JsonObject, column: str, registry: ForeignConfig) -> None:
    """Set the column of a data set's images, and LLaMA-Factory's folder of images if it is another."""
    if column != "images":
        dataset["columns"] = {**(dataset["columns"] or {}), "images": column}
    if not t.value("media_dir") and paths.local(dataset["path"]) and Path(dataset["path"]).parent != registry.folder:
        dataset["image_folder"] = str(registry.folder)


def _path(name: str, info: JsonObject, registry: ForeignConfig) -> str:
    for key in ("hf_hub_url", "ms_hub_url", "om_hub_url"):
        if info.get(key) and not info.get("file_name"):
            return str(info[key])
    file = info.get("file_name")
    if not file:
        problem = f"the data set {name!r} has neither a file nor a hub id"
        raise registry.wrong(problem, (name,), "Set file_name or hf_hub_url there.")
    full_path = registry.folder / str(info.get("folder") or "") / str(file)
    if not full_path.resolve().is_relative_to(registry.folder.resolve()):
        problem = f"the file {str(file)!r} of {name!r} is outside of {registry.folder}"
        raise registry.wrong(problem, (name, "file_name"), f"Move it there, or give it with {Option('data')}.")
    return str(full_path)


def _shape(name: str, info: JsonObject, registry: ForeignConfig) -> JsonObject:
    """Return the row format, and the columns with other names than the format's own."""
    formatting = str(info.get("formatting") or "alpaca")
    if formatting not in _FORMATS:
        problem = f"the data set {name!r} has the formatting {formatting!r}"
        raise registry.wrong(problem, (name, "formatting"), "Known: alpaca, sharegpt, openai.")
    columns, tags = info.get("columns") or {}, info.get("tags") or {}
    if info.get("ranking") or columns.get("chosen"):
        return _preference(columns, formatting)
    if columns.get("kto_tag"):
        return _feedback(columns, formatting)
    if set(columns) == {"prompt"}:
        return {"format": "text", "columns": renamed({"text": columns["prompt"]})}
    is_chat = formatting == "sharegpt" and (tags.get("content_tag", "value") == "content")
    our_format = "messages" if is_chat else _FORMATS[formatting]
    our_names = _COLUMNS["openai" if is_chat else formatting]
    their_columns = {our_names[key]: value for key, value in columns.items() if key in our_names and value}
    return {"format": our_format, "columns": renamed(their_columns)}


def _note_unread(t: Translation, name: str, info: JsonObject) -> None:
    """Record columns that LLaMA-Factory reads only if they are registered, and tuner always."""
    columns, formatting = info.get("columns") or {}, str(info.get("formatting") or "alpaca")
    unread = [key for key in ("system", *(["history"] if formatting == "alpaca" else [])) if not columns.get(key)]
    if unread:
        why = f"LLaMA-Factory reads {' and '.join(unread)} only if {_INFO} names them; tuner reads such columns"
        t.note_way(f"{name}.columns", why)


def _preference(columns: JsonObject, formatting: str) -> JsonObject:
    prompt = columns.get("prompt") or columns.get("messages")
    if formatting == "alpaca" and columns.get("query"):
        prompt = f"{{{columns.get('prompt', 'instruction')}}}\n{{{columns['query']}}}"
    their_columns = {key: str(columns.get(key, key)) for key in ("chosen", "rejected")}
    if prompt and prompt not in ("prompt", "instruction", "conversations", "messages"):  # found by themselves
        their_columns["prompt"] = prompt
    return {"format": "preference", "columns": renamed(their_columns)}


def _feedback(columns: JsonObject, formatting: str) -> JsonObject:
    their_columns = {"messages": columns.get("messages", "messages")}
    if formatting == "alpaca":
        their_columns = {
            "prompt": columns.get("prompt", "instruction"),
            "completion": columns.get("response", "output"),
        }
    return {"format": "feedback", "columns": renamed({**their_columns, "label": columns["kto_tag"]})}


_IMAGE_DEFAULTS = {
    "freeze_vision_tower": True,
    "freeze_multi_modal_projector": True,
    "image_max_pixels": 768 * 768,
    "image_min_pixels": 32 * 32,
}
"""LLaMA-Factory's defaults for a model that reads images (hparams/finetuning_args.py, model_args.py)."""


def _defaults(document: ForeignConfig) -> Mapping[str, Value]:
    """Return LLaMA-Factory's defaults; gradient checkpointing is on."""
    values = document.values
    rank = values.get("lora_rank") or 8
    method = values.get("finetuning_type") or "lora"
    is_adapter = method in ("lora", "oft")
    of_adapter = {"lora_rank": rank, "lora_dropout": 0.0, "lora_target": "all"} if is_adapter else {}
    if is_adapter and str(rank).isdecimal():
        of_adapter["lora_alpha"] = 2 * int(rank)
    general = training_arguments.defaults(document)
    general.pop("gradient_checkpointing")
    if "global_batch_size" in values:  # a key of the rewrite, which decides the accumulation
        general.pop("gradient_accumulation_steps")
    return {
        "stage": "sft",
        "finetuning_type": "lora",
        **general,
        **of_adapter,
        "cutoff_len": 2048,
        "packing": values.get("stage") == "pt",
        "disable_gradient_checkpointing": False,
        **({"freeze_trainable_layers": 2} if method == "freeze" else {}),
        **({"pref_beta": 0.1, "simpo_gamma": 0.5} if values.get("pref_loss") == "simpo" else {}),
        **_IMAGE_DEFAULTS,
    }


def _begin(document: ForeignConfig) -> ForeignConfig:
    return llamafactory_v1.as_release(document) if llamafactory_v1.is_version_1(document) else document


_WORDS = key_tables.of("llamafactory")
TABLE: Mapping[str, Rule] = {
    **training_arguments.TABLE,
    **_WORDS.rules,
    "disable_gradient_checkpointing": aliases.table()["disable_gradient_checkpointing"],
    **by_word(
        {
            "model_name_or_path": shared_rules.model,
            "stage": shared_rules.learned,
            "finetuning_type": shared_rules.method,
            "quantization_bit": quantization_bit,
            "lora_target": shared_rules.target,
            "pissa_init": pissa,
            "adapter_name_or_path": shared_rules.adapter_path,
            "create_new_adapter": new_adapter,
            "freeze_trainable_layers": freeze_layers,
            "pref_loss": loss,
            "use_dft_loss": shared_rules.dynamic_fine_tuning,
            "expert_model_parallel_size": shared_rules.divided_experts,
            "template": template,
            "enable_thinking": thinks,
            " ".join(_TURNS): turns,
            "cutoff_len": cutoff,
            "pref_ftx": shared_rules.added_loss("sft"),
            "use_muon": when_on("optim_wrapper.optimizer.type", "Muon", "optim names the optimizer"),
            "dataset eval_dataset": datasets,
            "max_samples": max_samples,
            "train_dataset": llamafactory_v1.datasets,
            "val_size": shared_rules.held_out,
            "packing neat_packing": packing,
            "default_system": shared_rules.system,
            "flash_attn": aliases.table()["flash_attn"],
            "freeze_vision_tower": image_keys.of_images("vision"),
            "freeze_multi_modal_projector": image_keys.of_images("projector"),
            "freeze_language_model": image_keys.of_images("language"),
            "image_max_pixels": image_keys.of_images("train_dataloader.dataset.image_max_pixels"),
            "image_min_pixels": image_keys.of_images("train_dataloader.dataset.image_min_pixels"),
            "media_dir": image_keys.folder,
            "pure_bf16": shared_rules.compute_type,
            "torch_dtype": shared_rules.weights_type,
        }
    ),
}

TOOL = Tool("LLaMA-Factory", TABLE, _defaults, finish, _prepare, begin=_begin, others=_WORDS.others)
