"""LLaMA-Factory's YAML and JSON, with the data sets that its `dataset_info.json` registers.

Its defaults that differ from ours are written into the recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuner import paths
from tuner.errors import RecipeError, did_you_mean
from tuner.importers import key_tables, llamafactory_v1, shared_rules, training_arguments
from tuner.importers.document import Document
from tuner.importers.shared_rules import renamed, truth
from tuner.importers.translation import Given, Outcome, Rule, Tool, Translation
from tuner.recipes import aliases, catalog
from tuner.recipes.aliases import by_word

_OBJECTIVES = {"sft": "sft", "pt": "pretrain", "rm": "reward", "dpo": "dpo", "kto": "kto", "ppo": "sft"}
_LOSSES = {"kto_pair": "bco_pair", "sigmoid": "sigmoid", "hinge": "hinge", "ipo": "ipo"}
_FINETUNING = ("lora", "oft", "freeze", "full")
_TEMPLATES = {
    **{name: name for name in ("alpaca", "vicuna", "zephyr", "llama2", "llama3", "phi3", "mistral", "gemma")},
    **{"qwen": "chatml", "chatml": "chatml", "intern2": "internlm2", "deepseek": "deepseek"},
}
"""Its template -> ours, for models of which the catalog knows no template."""


def _prepare(t: Translation) -> None:
    said = t.document.values
    stage, kind = str(t.value("stage")), str(t.value("finetuning_type"))
    if stage not in _OBJECTIVES:
        raise t.given["stage"].wrong("not a LLaMA-Factory stage", f"Known: {', '.join(_OBJECTIVES)}.")
    if kind not in _FINETUNING:
        raise t.given["finetuning_type"].wrong(
            "not a LLaMA-Factory finetuning_type", f"Known: {', '.join(_FINETUNING)}."
        )
    t.objective = "orpo" if stage == "dpo" and said.get("pref_loss") == "orpo" else _OBJECTIVES[stage]
    t.method = kind
    if kind in ("lora", "oft"):
        t.method = "qlora" if said.get("quantization_bit") else "dora" if truth(said.get("use_dora")) else "lora"
    if stage == "ppo":
        t.obstacle = "tuner trains on rows, not on a reward model's scores: the source's stage is ppo"


def loss(t: Translation, given: Given) -> None:
    """Take DPO's loss; ORPO is an objective of its own here."""
    word = str(given.value)
    if t.objective == "dpo" and word in _LOSSES:
        t.set(given, "objective.loss_type", [_LOSSES[word]])
    elif t.objective == "dpo":
        t.set(given, "objective.loss_type", ["sigmoid"], f"tuner has no loss {word!r}", changed=True)
    elif t.objective == "orpo":
        shared_rules.learned(t, given)
    else:
        t.leave(given, f"belongs to dpo, and the stage is {t.objective}")


def quantization_bit(t: Translation, given: Given) -> None:
    """Take 4 or 8 bits."""
    bits = given.whole()
    ours = bits if bits in (4, 8) else 4
    why = None if bits == ours else f"bitsandbytes supports 4 or 8 bits, not {bits}"
    t.set(given, "quantization.bits", ours, why, changed=bits != ours)


def modules(t: Translation, given: Given) -> None:
    """Take modules that are trained whole beside the adapter."""
    t.set(given, "adapter.modules_to_save", given.words())


def packing(t: Translation, given: Given) -> None:
    """Take packing; `neat_packing` turns it on whatever `packing` says, as packed samples never see each other here."""
    if given.key == "packing" and truth(t.value("neat_packing")):
        t.leave(given, "neat_packing is true, which packs")
    elif given.key == "neat_packing" and not truth(given.value):
        t.leave(given, "packed samples never attend to each other")
    else:
        t.set(given, "train_dataloader.dataset.packing", given.value)


def template(t: Translation, given: Given) -> None:
    """Take the chat template only for a model of which the catalog knows none."""
    word = str(given.value)
    if word not in _TEMPLATES or catalog.part_named(str(t.value("model_name_or_path"))):
        shared_rules.own_template(t, given)
    else:
        t.set(given, "model.chat_template", _TEMPLATES[word])


def freeze_layers(t: Translation, given: Given) -> None:
    """Take how many of the last layers are trained."""
    if t.method == "freeze" and given.whole() > 0:
        t.set(given, "train_cfg.trainable_layers", given.value)
    else:
        t.leave(given, "only the last layers can be trained, with finetuning_type freeze")


def pissa(t: Translation, given: Given) -> None:
    """Begin an adapter with the largest part of the base, found in `pissa_iter` rounds; -1 is all of it, exactly."""
    rounds = t.whole("pissa_iter", 16)
    if truth(given.value):
        t.set(given, "adapter.init_lora_weights", "pissa" if rounds == -1 else f"pissa_niter_{rounds}")
    else:
        t.set(given, "adapter.init_lora_weights", True)


_INFO = "dataset_info.json"
_COLUMNS = {
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output", "system": "system"},
    "sharegpt": {"messages": "conversations", "system": "system", "tools": "tools"},
    "openai": {"messages": "messages", "system": "system", "tools": "tools"},
    "preference": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected", "system": "system"},
}
"""Formatting -> their word of a column -> ours of the format."""
_FORMATS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "openai": "messages"}
_MEDIA = ("images", "videos", "audios")
_PARENTS = 4
"""How many folders above the config its `data` folder is looked for, as in examples/train_lora."""


def datasets(t: Translation, given: Given) -> None:
    """Take the data sets that are named, each as it is registered."""
    registry = _registry(t)
    found = [one for name in given.words() if (one := _one(t, given, name, registry))]
    if not given.words():
        raise given.wrong("has no data set")
    if not found:
        return
    (t.datasets if given.key == "dataset" else t.validation).extend(found)
    shown = ", ".join(str(one.get("path")) for one in found)
    t.note(given, Outcome.TRANSLATED, f"data {shown}")
    if given.key == "eval_dataset" and len(found) > 1:
        t.note(given, Outcome.CHANGED, why=f"validation uses only the first: {found[0].get('path')}")


def max_samples(t: Translation, given: Given) -> None:
    """Take how many rows of each data set there are, counted together in a mixture."""
    named = t.given.get("dataset")
    if named and len(named.words()) > 1:
        t.note(given, Outcome.CHANGED, "max_rows", "in the source for each data set, in tuner for all rows together")
    else:
        t.note(given, Outcome.TRANSLATED, "train_dataloader.dataset.max_rows")


def settle(t: Translation) -> None:
    """Give every data set the number of rows that the config says of all."""
    if most := t.whole("max_samples", 0):
        for one in (*t.datasets, *t.validation):
            one["max_rows"] = min(most, one.get("max_rows") or most)


def _registry(t: Translation) -> Document | None:
    """Return the registration beside the data, which is looked for here and above the config."""
    folder = Path(str(t.value("dataset_dir", "data")))
    above = [t.document.folder, *t.document.folder.absolute().parents][:_PARENTS]
    for one in (folder, *(parent / folder for parent in above)):
        if paths.is_file(one / _INFO):
            return Document.of_yaml(one / _INFO)
    return None


def _one(t: Translation, given: Given, name: str, registry: Document | None) -> dict[str, Any] | None:
    if registry is None:
        if Path(name).suffix or "/" in name:
            return {"path": name}
        why = f"{_INFO} is missing, so {name!r} is unknown: give it with --data FILE"
        t.note(given, Outcome.CHANGED, f"data {name}", why)
        return {"path": f"{t.value('dataset_dir', 'data')}/{name}.json"}
    info = registry.values.get(name)
    if not isinstance(info, dict):
        what = f"{name!r} is not registered in {registry.name}"
        raise RecipeError(what, where=given.where, fix=did_you_mean(name, registry.values) or "Register it there.")
    if any((info.get("columns") or {}).get(key) for key in _MEDIA):
        t.obstacle = f"its data {name!r} has images, sound or video, and tuner trains text models"
        t.note(given, Outcome.LEFT_OUT, why=t.obstacle)
        return None
    return _registered(name, info, registry)


def _registered(name: str, info: dict[str, Any], registry: Document) -> dict[str, Any]:
    one: dict[str, Any] = {"path": _path(name, info, registry), "name": info.get("subset")}
    one["split"] = info.get("split") or "train"
    if info.get("num_samples"):
        one["max_rows"] = int(info["num_samples"])
    return one | _shape(name, info, registry)


def _path(name: str, info: dict[str, Any], registry: Document) -> str:
    for key in ("hf_hub_url", "ms_hub_url", "om_hub_url"):
        if info.get(key) and not info.get("file_name"):
            return str(info[key])
    file = info.get("file_name")
    if not file:
        what = f"the data set {name!r} has neither a file nor a hub id"
        raise registry.wrong(what, (name,), "Set file_name or hf_hub_url there.")
    whole = registry.folder / str(info.get("folder") or "") / str(file)
    if not whole.resolve().is_relative_to(registry.folder.resolve()):
        what = f"the file {str(file)!r} of {name!r} is outside of {registry.folder}"
        raise registry.wrong(what, (name, "file_name"), "Move it there, or give it with --data.")
    return str(whole)


def _shape(name: str, info: dict[str, Any], registry: Document) -> dict[str, Any]:
    """Return format and columns, where they are not what the format has by itself."""
    formatting = str(info.get("formatting") or "alpaca")
    if formatting not in _FORMATS:
        what = f"the data set {name!r} has the formatting {formatting!r}"
        raise registry.wrong(what, (name, "formatting"), "Known: alpaca, sharegpt, openai.")
    columns, tags = info.get("columns") or {}, info.get("tags") or {}
    if info.get("ranking") or columns.get("chosen"):
        return _preference(columns, formatting)
    if columns.get("kto_tag"):
        return _feedback(columns, formatting)
    if set(columns) == {"prompt"}:
        return {"format": "text", "columns": renamed({"text": columns["prompt"]})}
    is_chat = formatting == "sharegpt" and (tags.get("content_tag", "value") == "content")
    ours = "messages" if is_chat else _FORMATS[formatting]
    known = _COLUMNS["openai" if is_chat else formatting]
    theirs = {known[key]: value for key, value in columns.items() if key in known and value}
    return {"format": ours, "columns": renamed(theirs)}


def _preference(columns: dict[str, Any], formatting: str) -> dict[str, Any]:
    prompt = columns.get("prompt") or columns.get("messages")
    if formatting == "alpaca" and columns.get("query"):
        prompt = f"{{{columns.get('prompt', 'instruction')}}}\n{{{columns['query']}}}"
    theirs = {key: str(columns.get(key, key)) for key in ("chosen", "rejected")}
    if prompt and prompt not in ("prompt", "instruction", "conversations", "messages"):  # found by themselves
        theirs["prompt"] = prompt
    return {"format": "preference", "columns": renamed(theirs)}


def _feedback(columns: dict[str, Any], formatting: str) -> dict[str, Any]:
    if formatting == "alpaca":
        theirs = {"prompt": columns.get("prompt", "instruction"), "completion": columns.get("response", "output")}
        return {"format": "feedback", "columns": renamed({**theirs, "label": columns["kto_tag"]})}
    theirs = {"messages": columns.get("messages", "messages"), "label": columns["kto_tag"]}
    return {"format": "feedback", "columns": renamed(theirs)}


def _defaults(document: Document) -> Mapping[str, Any]:
    """Return what LLaMA-Factory means by what is not written; its gradient checkpointing is on."""
    said = document.values
    rank = said.get("lora_rank") or 8
    method = said.get("finetuning_type") or "lora"
    is_adapter = method in ("lora", "oft")
    of_adapter = {"lora_rank": rank, "lora_dropout": 0.0, "lora_target": "all"} if is_adapter else {}
    if is_adapter and str(rank).isdecimal():
        of_adapter["lora_alpha"] = 2 * int(rank)
    general = training_arguments.defaults(document)
    general.pop("gradient_checkpointing")
    if "global_batch_size" in said:  # of the rewrite: it says how often gradients are added up
        general.pop("gradient_accumulation_steps")
    return {
        "stage": "sft",
        "finetuning_type": "lora",
        **general,
        **of_adapter,
        "cutoff_len": 2048,
        "packing": said.get("stage") == "pt",
        "disable_gradient_checkpointing": False,
        **({"freeze_trainable_layers": 2} if method == "freeze" else {}),
    }


def _begin(document: Document) -> Document:
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
            "additional_target": modules,
            "pissa_init": pissa,
            "adapter_name_or_path": shared_rules.adapter_path,
            "freeze_trainable_layers": freeze_layers,
            "pref_loss": loss,
            "template": template,
            "dataset eval_dataset": datasets,
            "max_samples": max_samples,
            "train_dataset": llamafactory_v1.datasets,
            "global_batch_size": llamafactory_v1.global_batch_size,
            "cp_size": llamafactory_v1.shared_samples,
            "val_size": shared_rules.held_out,
            "packing neat_packing": packing,
            "default_system": shared_rules.system,
            "flash_attn": shared_rules.attention,
            "pure_bf16": shared_rules.compute_type,
            "torch_dtype": shared_rules.weights_type,
        }
    ),
}

TOOL = Tool(
    "LLaMA-Factory",
    TABLE,
    _defaults,
    settle,
    _prepare,
    begin=_begin,
    others=_WORDS.others,
)
