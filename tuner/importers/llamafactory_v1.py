"""Configs of LLaMA-Factory's rewrite (`USE_V1=1`), put into the words of its releases.

Source: LLaMA-Factory 26d949a, src/llamafactory/v1/config, core/data_engine.py and examples/v1.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tuner import paths
from tuner.importers.document import Document, Keys
from tuner.importers.translation import Given, Outcome, Translation

_SIGNS = ("model_class", "train_dataset", "peft_config", "kernel_config", "quant_config")
_SAME = {"model": "model_name_or_path", "micro_batch_size": "per_device_train_batch_size"}
_BLOCKS: dict[str, dict[str, str]] = {
    "peft_config": {"name": "finetuning_type", "r": "lora_rank", "target_modules": "lora_target"},
    "quant_config": {"name": "quantization_method"},
    "optim_config": {"name": "optim", "wd": "weight_decay"},
    "lr_scheduler_config": {"name": "lr_scheduler_type"},
}
"""Block -> its words that are others at the top of a release's config."""
_DEFAULTS: dict[str, Any] = {
    "finetuning_type": "full",
    "per_device_train_batch_size": 1,
    "learning_rate": 1e-4,
    "num_train_epochs": 3,
    "lr_scheduler_type": "constant",
    "weight_decay": 0.01,
    "logging_steps": 1,
    "bf16": True,
}
"""What the rewrite means by a word that is not written; AdamW's decay is torch's."""
_CONVERTERS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "pair": "preference", None: "messages"}


def is_version_1(document: Document) -> bool:
    """Return whether a config has the words of the rewrite."""
    return "model" in document.values and any(sign in document.values for sign in _SIGNS)


def as_release(document: Document) -> Document:
    """Return the config in the words of a release; each value keeps the line where it was written."""
    values: dict[str, Any] = {}
    lines: dict[Keys, int] = {}

    def put(word: str, value: Any, keys: Keys) -> None:
        values[word] = value
        at = next((document.lines[keys[:end]] for end in range(len(keys), 0, -1) if keys[:end] in document.lines), None)
        if at is not None:
            lines[word,] = at

    for key, value in document.values.items():
        if key in _BLOCKS and isinstance(value, dict):
            for inner, one in value.items():
                put(_BLOCKS[key].get(inner, str(inner)), one, (key, inner))
        elif key == "dist_config" and isinstance(value, dict) and value.get("name") == "deepspeed":
            put("deepspeed", value.get("config_file"), (key, "config_file"))
        elif key == "enable_activation_checkpointing":
            put("disable_gradient_checkpointing", not value, (key,))
        elif value is not None:
            put(_SAME.get(key, key), value, (key,))
    for word, value in {"stage": _stage(document), **_DEFAULTS}.items():
        values.setdefault(word, value)
    return replace(document, values=values, lines={**document.lines, **lines})


def _stage(document: Document) -> str:
    """Return what is trained: a config does not say it, its model_class and its rows do."""
    if document.values.get("model_class") == "cls":
        return "rm"
    listed = _sets(document)
    sets = listed.values.values() if listed else ()
    has_pairs = any(isinstance(one, dict) and one.get("converter") == "pair" for one in sets)
    return "dpo" if has_pairs or "pref_loss" in document.values else "sft"


def _sets(document: Document) -> Document | None:
    """Return the file that lists the data sets; None where the word is a data set itself, or the file is not here."""
    name = Path(str(document.values.get("train_dataset", "")))
    above = (document.folder, *document.folder.absolute().parents)
    found = next((one for one in (name, *(folder / name for folder in above)) if paths.is_file(one)), None)
    return Document.of_yaml(found) if found and name.suffix in (".yaml", ".yml") else None


def datasets(t: Translation, given: Given) -> None:
    """Take the data sets that a file lists, or the one file or hub id that is named."""
    listed = _sets(t.document)
    if listed is None:
        t.datasets.append({"path": str(given.value)})
        t.note(given, Outcome.TRANSLATED, f"data {given.value}")
        return
    for name, info in listed.values.items():
        if not isinstance(info, dict):
            raise listed.wrong(f"the data set {name!r} is not a mapping", (name,))
        t.datasets.append(_one(t, name, info, listed))
    t.note(given, Outcome.TRANSLATED, f"data {', '.join(str(one['path']) for one in t.datasets)}")
    if 0 < sum("max_rows" in one for one in t.datasets) < len(t.datasets):
        t.note(
            given, Outcome.CHANGED, "max_rows", "a mixture takes the rows of all its data sets: num_samples is left out"
        )


def _one(t: Translation, name: str, info: dict[str, Any], listed: Document) -> dict[str, Any]:
    converter = info.get("converter")
    if converter not in _CONVERTERS:
        what = f"the data set {name!r} has the converter {converter!r}"
        raise listed.wrong(what, (name, "converter"), "Known: alpaca, sharegpt, pair.")
    path = info.get("path") or info.get("hf_hub_url") or info.get("file_name")
    if not path:
        raise listed.wrong(f"the data set {name!r} has neither a file nor a hub id", (name,), "Set path there.")
    one: dict[str, Any] = {
        "path": str(Path(str(info.get("dataset_dir") or "")) / str(path)) if info.get("file_name") else str(path)
    }
    one |= {"split": info.get("split") or "train", "format": _CONVERTERS[converter]}
    if most := info.get("num_samples") or info.get("size"):
        one["max_rows"] = int(most)
    return one


def global_batch_size(t: Translation, given: Given) -> None:
    """Take the samples of a step over all ranks."""
    t.set(given, "train_cfg.global_batch_size", given.whole())


def shared_samples(t: Translation, given: Given) -> None:
    """Take how many ranks share a sample."""
    t.set(given, "train_cfg.sequence_parallel_size", given.whole())
