"""LLaMA-Factory's YAML and JSON, with the data sets that its `dataset_info.json` registers.

Its defaults that differ from ours are written into the recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.importers import llamafactory_data, llamafactory_v1, rules, training_arguments, words
from tuner.importers.document import Document
from tuner.importers.rules import truth
from tuner.importers.translation import Given, Rule, Tool, Translation
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
        rules.learned(t, given)
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
        rules.own_template(t, given)
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


_WORDS = words.of("llamafactory")
TABLE: Mapping[str, Rule] = {
    **training_arguments.TABLE,
    **_WORDS.rules,
    "disable_gradient_checkpointing": aliases.table()["disable_gradient_checkpointing"],
    **by_word(
        {
            "model_name_or_path": rules.model,
            "stage": rules.learned,
            "finetuning_type": rules.method,
            "quantization_bit": quantization_bit,
            "lora_target": rules.target,
            "additional_target": modules,
            "pissa_init": pissa,
            "adapter_name_or_path": rules.adapter_path,
            "freeze_trainable_layers": freeze_layers,
            "pref_loss": loss,
            "template": template,
            "dataset eval_dataset": llamafactory_data.datasets,
            "max_samples": llamafactory_data.max_samples,
            "train_dataset": llamafactory_v1.datasets,
            "global_batch_size": llamafactory_v1.global_batch_size,
            "cp_size": llamafactory_v1.shared_samples,
            "val_size": rules.held_out,
            "packing neat_packing": packing,
            "default_system": rules.system,
            "flash_attn": rules.attention,
            "pure_bf16": rules.compute_type,
            "torch_dtype": rules.weights_type,
        }
    ),
}

TOOL = Tool(
    "LLaMA-Factory",
    TABLE,
    _defaults,
    llamafactory_data.settle,
    _prepare,
    begin=_begin,
    others=_WORDS.others,
)
