"""ms-swift's command lines `swift sft|pt|rlhf`, the shell scripts that call it, and its YAML and JSON.

`--dataset` takes `id[:subset][#rows]`, several; ids are ModelScope's there unless --use_hf is true.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tuner import paths
from tuner.importers import key_tables, shared_rules, training_arguments
from tuner.importers.document import Document
from tuner.importers.shared_rules import truth
from tuner.importers.translation import Given, Outcome, Rule, Tool, Translation
from tuner.recipes.aliases import by_word

_RLHF = {"dpo": "dpo", "orpo": "orpo", "kto": "kto", "rm": "reward"}
_DATASET = re.compile(r"(?P<path>.+?)(?::(?P<name>[^:#/]+))?(?:#(?P<rows>\d{1,15}))?", re.DOTALL)


def _prepare(t: Translation) -> None:
    said = t.document.values
    kind = str(said.get("tuner_type") or said.get("train_type") or said.get("sft_type") or "lora")
    quantized = said.get("quant_bits") or truth(said.get("load_in_4bit"))
    t.method = "full" if kind == "full" else "qlora" if quantized else "dora" if truth(said.get("use_dora")) else "lora"
    command = t.document.command[1] if t.document.command[:1] == ("swift",) else "sft"
    rlhf = str(said.get("rlhf_type") or ("dpo" if command == "rlhf" else ""))
    t.objective = "pretrain" if command == "pt" else _RLHF.get(rlhf, "sft")
    if rlhf and rlhf not in _RLHF:
        t.obstacle = f"tuner does not support {rlhf}: it trains on rows"
    if str(said.get("task_type") or "causal_lm") not in ("causal_lm", "seq_cls"):
        t.obstacle = f"tuner does not train {said['task_type']}"


def datasets(t: Translation, given: Given) -> None:
    """Take each data set, with its subset and its number of rows."""
    words = given.words(None)
    if not words:
        raise given.wrong("has no data set")
    for word in words:
        found = _DATASET.fullmatch(word)
        assert found is not None, "every text has a path"
        rows = int(found["rows"]) if found["rows"] else None
        if found["rows"] == "0":
            raise given.wrong("no rows are requested", "Use #N with N above 0.")
        made = {"path": found["path"], "name": found["name"], "split": "train", "max_rows": rows}
        (t.validation if given.key == "val_dataset" else t.datasets).append(made)
    on_hub = [word for word in words if paths.local(word.partition("#")[0].partition(":")[0]) is None]
    if on_hub and not truth(t.value("use_hf")):
        why = "ids are ModelScope's in ms-swift and the Hugging Face hub's in tuner"
        t.note(given, Outcome.CHANGED, f"data {' '.join(words)}", why)
    else:
        t.note(given, Outcome.TRANSLATED, f"data {' '.join(words)}")


def max_length(t: Translation, given: Given) -> None:
    """Take the length of a row; unasked, ms-swift takes as much as the model does."""
    why = "in ms-swift this is the model's whole context: --set max_length=N" if given.is_default else None
    t.set(given, "train_dataloader.dataset.max_length", given.value, why, changed=given.is_default)


def accumulation(t: Translation, given: Given) -> None:
    """Take the accumulation; unasked, ms-swift divides 16 samples a step by the ranks, which are not known here."""
    why = "on N ranks ms-swift divides it: --set accumulative_counts=..." if given.is_default else None
    t.set(given, "optim_wrapper.accumulative_counts", given.value, why, changed=given.is_default)


def _defaults(document: Document) -> Mapping[str, Any]:
    said = document.values
    is_full = str(said.get("tuner_type") or said.get("train_type") or "lora") == "full"
    adapter = (
        {} if is_full else {"lora_rank": 8, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": "all-linear"}
    )
    general = training_arguments.defaults(document)
    batch = str(said.get("per_device_train_batch_size") or 1)
    return {
        **general,
        **adapter,
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
    }


_WORDS = key_tables.of("swift")
TABLE: Mapping[str, Rule] = {
    **training_arguments.TABLE,
    **_WORDS.rules,
    **by_word(
        {
            "model model_id_or_path": shared_rules.model,
            "torch_dtype": shared_rules.weights_type,
            "attn_impl": shared_rules.attention,
            "tuner_type train_type sft_type": shared_rules.method,
            "rlhf_type": shared_rules.learned,
            "target_modules": shared_rules.target,
            "adapters": shared_rules.adapter_path,
            "dataset val_dataset": datasets,
            "split_dataset_ratio": shared_rules.held_out,
            "system": shared_rules.system,
            "template": shared_rules.own_template,
            "max_length": max_length,
            "gradient_accumulation_steps": accumulation,
            "max_epochs": shared_rules.epochs,
        }
    ),
}

TOOL = Tool("ms-swift", TABLE, _defaults, prepare=_prepare, others=_WORDS.others)
