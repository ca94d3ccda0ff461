"""Converts configs of LLaMA-Factory's rewrite (`USE_V1=1`) to the keys of its releases.

Source: LLaMA-Factory 26d949a, src/llamafactory/v1/config, core/data_engine.py and examples/v1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tuner import paths
from tuner.files import JsonObject
from tuner.importers.document import ForeignConfig, Keys, Value
from tuner.importers.translation import Outcome, Setting, Translation
from tuner.recipes.merging import line_of

_SIGNS = ("model_class", "train_dataset", "peft_config", "kernel_config", "quant_config")
_SAME = {"model": "model_name_or_path", "micro_batch_size": "per_device_train_batch_size"}
_BLOCKS: dict[str, dict[str, str]] = {
    "peft_config": {"name": "finetuning_type", "r": "lora_rank", "target_modules": "lora_target"},
    "quant_config": {"name": "quantization_method"},
    "optim_config": {"name": "optim", "wd": "weight_decay"},
    "lr_scheduler_config": {"name": "lr_scheduler_type"},
}
"""Block -> its keys that have another name in a release's config."""
_DEFAULTS: JsonObject = {
    "finetuning_type": "full",
    "per_device_train_batch_size": 1,
    "learning_rate": 1e-4,
    "num_train_epochs": 3,
    "lr_scheduler_type": "constant",
    "weight_decay": 0.01,
    "logging_steps": 1,
    "bf16": True,
}
"""Defaults of the rewrite; AdamW's weight decay is torch's default."""
_LIGER = "liger_kernel"
"""Its word for Liger's kernels, one of those in kernel_config.name."""
_CONVERTERS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "pair": "preference", None: "messages"}


def is_version_1(document: ForeignConfig) -> bool:
    """Return whether a config has keys of the rewrite."""
    return "model" in document.values and any(sign in document.values for sign in _SIGNS)


def as_release(document: ForeignConfig) -> ForeignConfig:
    """Return the config with the keys of a release; each value keeps its line, and the key that the user is told."""
    found = [*_of_release(document.values)]
    lines: dict[Keys, int] = {(word,): line for word, _, keys in found if (line := line_of(document.lines, keys))}
    values = {word: value for word, value, _ in found}
    values |= {word: value for word, value in {"stage": _stage(document), **_DEFAULTS}.items() if word not in values}
    written = {word: ".".join(keys) for word, _, keys in found}
    return replace(document, values=values, lines={**document.lines, **lines}, written=written)


def _of_release(values: JsonObject) -> Iterator[tuple[str, Value, Keys]]:
    """Yield the keys of a release, each with its value and the keys of the rewrite."""
    for key, value in values.items():
        block = value if isinstance(value, dict) else {}
        if key in _BLOCKS and isinstance(value, dict):
            yield from ((_BLOCKS[key].get(name, str(name)), inner, (key, name)) for name, inner in block.items())
        elif key == "dist_config" and block.get("name") == "deepspeed":
            yield "deepspeed", block.get("config_file"), (key, "config_file")
        elif key == "kernel_config" and _LIGER in (kernels := re.split(r"\s*,\s*", str(block.get("name")).strip())):
            yield "enable_liger_kernel", True, (key, "name")
            if kernels != [_LIGER]:
                yield key, value, (key,)
        elif key == "enable_activation_checkpointing":
            yield "disable_gradient_checkpointing", not value, (key,)
        elif value is not None:
            yield _SAME.get(key, key), value, (key,)


def _stage(document: ForeignConfig) -> str:
    """Return the stage, which follows from the config's model_class and its data."""
    if document.values.get("model_class") == "cls":
        return "rm"
    listed = _sets(document)
    sets = listed.values.values() if listed else ()
    has_pairs = any(isinstance(dataset, dict) and dataset.get("converter") == "pair" for dataset in sets)
    return "dpo" if has_pairs or "pref_loss" in document.values else "sft"


def _sets(document: ForeignConfig) -> ForeignConfig | None:
    """Return the file that lists the data sets; None if train_dataset is a data set itself, or the file is missing."""
    name = Path(str(document.values.get("train_dataset", "")))
    above = (document.folder, *document.folder.absolute().parents)
    listed = next((place for place in (name, *(folder / name for folder in above)) if paths.is_file(place)), None)
    return ForeignConfig.of_yaml(listed) if listed and name.suffix in (".yaml", ".yml") else None


def datasets(t: Translation, setting: Setting) -> None:
    """Add the data sets that a file lists, or the one file or hub id."""
    listed = _sets(t.document)
    if listed is None:
        t.datasets.append({"path": str(setting.value)})
        t.note(setting, Outcome.TRANSLATED, f"data {setting.value}")
        return
    for name, info in listed.values.items():
        if not isinstance(info, dict):
            raise listed.wrong(f"the data set {name!r} is not a mapping", (name,))
        t.datasets.append(_one(t, name, info, listed))
    t.note(setting, Outcome.TRANSLATED, f"data {', '.join(str(dataset['path']) for dataset in t.datasets)}")


def _one(t: Translation, name: str, info: JsonObject, listed: ForeignConfig) -> JsonObject:
    converter = info.get("converter")
    if converter not in _CONVERTERS:
        problem = f"the data set {name!r} has the converter {converter!r}"
        raise listed.wrong(problem, (name, "converter"), "Known: alpaca, sharegpt, pair.")
    path = info.get("path") or info.get("hf_hub_url") or info.get("file_name")
    if not path:
        raise listed.wrong(f"the data set {name!r} has neither a file nor a hub id", (name,), "Set path there.")
    full_path = Path(str(info.get("dataset_dir") or "")) / str(path) if info.get("file_name") else path
    dataset: JsonObject = {
        "path": str(full_path),
        "split": info.get("split") or "train",
        "format": _CONVERTERS[converter],
    }
    if max_rows := info.get("num_samples") or info.get("size"):
        dataset["max_rows"] = int(max_rows)
    return dataset
