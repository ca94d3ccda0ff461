"""How each tool is told to fine-tune a model on rows: at its own defaults, or at settings that are equal for all.

At its own defaults a tool gets the model, the rows, the method, the epochs, a seed and a place for the result, and
beside these only what it does not run without. What that is, or what made it equal, is in `Asked.beside`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.tools import CLOCK, ROOT, Command, environment

METHODS = ("full", "lora", "qlora")
OWN, EQUAL = "own", "equal"
BATCH = 8
MAX_LENGTH = 2048
ADAPTER = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0}
RATES = {("sft", "full"): 2e-5, ("sft", "lora"): 2e-4, ("dpo", "full"): 1e-6, ("dpo", "lora"): 1e-5}
"""The equal learning rates; QLoRA has LoRA's."""
EQUAL_SETTINGS = (
    f"{BATCH} rows a step in one micro-batch, not packed; AdamW without decay, gradients clipped at 1; cosine without "
    f"warm-up from 2e-5 (full) or 2e-4 (LoRA, QLoRA), in DPO from 1e-6 or 1e-5 at beta 0.1; adapters of all linear "
    f"layers with r=16, lora_alpha=32 and no dropout; loss of the answers alone; fp32; no recomputation; at most "
    f"{MAX_LENGTH} tokens"
)


@dataclass(frozen=True)
class Task:
    """What one tool is to train."""

    model: Path
    rows: Path
    """A JSON Lines file of {"messages": [...]}, or of {"prompt": text, "chosen": text, "rejected": text}."""
    epochs: int
    method: str
    settings: str
    seed: int
    cpu: bool
    changes: Mapping[str, str] = field(default_factory=dict)
    """Options in the tool's own names."""

    @property
    def is_dpo(self) -> bool:
        with self.rows.open(encoding="utf-8") as lines:
            return "chosen" in json.loads(next(lines))

    @property
    def rate(self) -> float:
        return RATES["dpo" if self.is_dpo else "sft", "full" if self.method == "full" else "lora"]


@dataclass(frozen=True)
class Asked:
    """A tool's command, where its result will be, and what was set beyond model, rows, method, epochs and seed."""

    command: Command
    result: Path
    beside: str


def tuner(task: Task, folder: Path) -> Asked:
    argv = ["train", "--model", task.model, "--data", task.rows, "--epochs", task.epochs, "--seed", task.seed]
    argv += ["--val-split", 0]  # the others train on all rows
    argv += ["--method", f"dpo_{task.method}" if task.is_dpo else task.method, "--work-dir", folder / "run"]
    sets: dict[str, Any] = {}
    if task.settings == EQUAL:
        sets |= {"train_dataloader.batch_size": BATCH, "accumulative_counts": 1, "optimizer.lr": task.rate}
        sets |= {"warmup_ratio": 0.0, "weight_decay": 0.0, "gradient_checkpointing": False}
        sets |= {"optim_wrapper.dtype": "fp32", "train_dataloader.dataset.max_length": MAX_LENGTH}
        sets |= {} if task.is_dpo else {"train_dataloader.dataset.packing": False}
        sets |= {} if task.method == "full" else {f"adapter.{name}": value for name, value in ADAPTER.items()}
    sets |= task.changes
    argv += [part for name, value in sets.items() for part in ("--set", f"{name}={value}")]
    # Another bench or a test may use this machine's memory; what is measured is known to fit.
    argv = [sys.executable, "-m", "tuner", *map(str, argv), "--ignore-fit"]
    command = Command(argv, {"PYTHONPATH": os.pathsep.join((str(CLOCK), str(ROOT)))})
    return Asked(command, folder / "run" / "final", _listed(sets, "{}={}"))


def trl(task: Task, folder: Path) -> Asked:
    (folder / "rows").mkdir()  # `datasets` reads all that is in a folder
    is_split = task.settings == EQUAL and not task.is_dpo
    _written(folder / "rows" / "train.jsonl", task, _prompt_and_completion if is_split else _messages)
    flags = {"model_name_or_path": task.model, "dataset_name": folder / "rows", "num_train_epochs": task.epochs}
    flags |= {"output_dir": folder / "run", "seed": task.seed, "report_to": "none"}
    flags |= {} if task.method == "full" else {"use_peft": True}
    flags |= {"load_in_4bit": True} if task.method == "qlora" else {}
    # Its default of bf16 is refused without a GPU unless the CPU is asked for.
    beside: dict[str, Any] = {"use_cpu": True} if task.cpu else {}
    if task.settings == EQUAL:
        beside |= _trainers(task) | {"max_length": MAX_LENGTH, "gradient_checkpointing": False}
        beside |= {} if task.method == "full" else {"lora_r": ADAPTER["r"], "lora_target_modules": "all-linear"}
        beside |= {} if task.method == "full" else {name: ADAPTER[name] for name in ("lora_alpha", "lora_dropout")}
    beside |= task.changes
    words = [part for name, value in (flags | beside).items() for part in (f"--{name}", str(value))]
    argv = [str(environment("trl") / "bin" / "trl"), "dpo" if task.is_dpo else "sft", *words]
    split = ["rows of prompt and completion"] if is_split else []
    return Asked(Command(argv, {}), folder / "run", _listed(beside, "--{} {}", split))


def llamafactory(task: Task, folder: Path) -> Asked:
    _written(folder / "rows.jsonl", task, _messages_and_answers)
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    columns = {"messages": "messages"} | ({"chosen": "chosen", "rejected": "rejected"} if task.is_dpo else {})
    info = {
        "file_name": "rows.jsonl",
        "formatting": "sharegpt",
        "columns": columns,
        "tags": tags | {"system_tag": "system"},
    }
    (folder / "dataset_info.json").write_text(json.dumps({"rows": info | ({"ranking": True} if task.is_dpo else {})}))
    config = {"model_name_or_path": str(task.model), "dataset": "rows", "num_train_epochs": task.epochs}
    config |= {"output_dir": str(folder / "run"), "dataset_dir": str(folder), "seed": task.seed, "report_to": "none"}
    config |= {"stage": "dpo" if task.is_dpo else "sft", "do_train": True}
    config |= {"finetuning_type": "full" if task.method == "full" else "lora"}
    config |= {"quantization_bit": 4} if task.method == "qlora" else {}
    beside: dict[str, Any] = {}
    if task.settings == EQUAL:
        config["model_name_or_path"] = str(in_fp32(task.model, folder / "model"))
        beside |= _trainers(task) | {"cutoff_len": MAX_LENGTH, "disable_gradient_checkpointing": True}
        beside |= {} if task.method == "full" else {"lora_rank": ADAPTER["r"], "lora_target": "all"}
        beside |= {} if task.method == "full" else {name: ADAPTER[name] for name in ("lora_alpha", "lora_dropout")}
    beside |= _typed(task.changes)
    file = folder / "train.yaml"  # JSON is YAML, and its reader of JSON fails on any file
    file.write_text(json.dumps(config | beside))
    argv = [str(environment("llamafactory") / "bin" / "llamafactory-cli"), "train", str(file)]
    return Asked(Command(argv, {}), folder / "run", _listed(beside, "{}: {}", ["`dataset_info.json`"]))


def axolotl(task: Task, folder: Path) -> Asked:
    rows = _written(folder / "rows.jsonl", task, _messages_and_answers)
    data = {"path": str(rows), "ds_type": "json", "type": "chat_template"}
    data |= {"type": "chat_template.default", "split": "train"} if task.is_dpo else {}
    config: dict[str, Any] = {"base_model": str(task.model), "datasets": [data], "num_epochs": task.epochs}
    config |= {"output_dir": str(folder / "run"), "dataset_prepared_path": str(folder / "prepared"), "seed": task.seed}
    config |= {"rl": "dpo"} if task.is_dpo else {}
    config |= {} if task.method == "full" else {"adapter": task.method}
    config |= {"load_in_4bit": True} if task.method == "qlora" else {}
    # It has no learning rate, rank or alpha of its own (these are of its examples/llama-3/lora-1b.yml), and it wants a
    # batch size (this is its schema's).
    beside: dict[str, Any] = {"micro_batch_size": 1, "learning_rate": 2e-5 if task.method == "full" else 2e-4}
    beside |= {} if task.method == "full" else {"lora_r": 16, "lora_alpha": 32, "lora_target_linear": True}
    if task.cpu:
        # Else it loads weights in fp16 and multiplies them with fp32; and its kernels for adapters need a GPU.
        beside |= {"bf16": False}
        kernels = ("mlp", "qkv", "o", "embedding")
        beside |= {} if task.method == "full" else {f"lora_{name}_kernel": False for name in kernels}
    if task.settings == EQUAL:
        beside |= {"micro_batch_size": BATCH, "learning_rate": task.rate, "lr_scheduler": "cosine", "warmup_steps": 0}
        beside |= {
            "optimizer": "adamw_torch",
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
            "gradient_checkpointing": False,
        }
        beside |= {"bf16": False, "tf32": False, "sequence_len": MAX_LENGTH}
        beside |= {} if task.method == "full" else {name: ADAPTER[name] for name in ("lora_alpha", "lora_dropout")}
    beside |= _typed(task.changes)
    file = folder / "train.yaml"
    file.write_text(json.dumps(config | beside))
    argv = [str(environment("axolotl") / "bin" / "axolotl"), "train", str(file)]
    return Asked(Command(argv, {"AXOLOTL_DO_NOT_TRACK": "1"}), folder / "run", _listed(beside, "{}: {}"))


def in_fp32(model: Path, folder: Path) -> Path:
    """Return a copy of a model that every tool loads in fp32: LLaMA-Factory takes the type in config.json."""
    shutil.copytree(model, folder, copy_function=os.symlink)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}), encoding="utf-8")
    return folder


TOOLS: dict[str, Callable[[Task, Path], Asked]] = {
    "tuner": tuner, "trl": trl, "llamafactory": llamafactory, "axolotl": axolotl,
}  # fmt: skip


def _trainers(task: Task) -> dict[str, Any]:
    """Return the equal settings in the names of transformers' own arguments."""
    return {
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": 1,
        "learning_rate": task.rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch",
        "bf16": False,
    }


def _typed(changes: Mapping[str, str]) -> dict[str, Any]:
    """Return options with the types that YAML would give their values."""
    import yaml

    return {name: yaml.safe_load(value) for name, value in changes.items()}


def _listed(options: Mapping[str, Any], form: str, first: list[str] | None = None) -> str:
    return ", ".join([*(first or []), *(f"`{form.format(*item)}`" for item in options.items())]) or "nothing"


def _written(file: Path, task: Task, shape: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    """Write the rows in the shape that a tool reads."""
    with task.rows.open(encoding="utf-8") as lines, file.open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(shape(json.loads(line))) + "\n" for line in lines)
    return file


def _messages(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as conversations, so that every tool applies the chat template."""
    if "messages" in row:
        return row
    answers = {name: [{"role": "assistant", "content": row[name]}] for name in ("chosen", "rejected")}
    return {"prompt": [{"role": "user", "content": row["prompt"]}], **answers}


def _messages_and_answers(row: dict[str, Any]) -> dict[str, Any]:
    if "messages" in row:
        return row
    pair = _messages(row)
    return {"messages": pair["prompt"], "chosen": pair["chosen"][0], "rejected": pair["rejected"][0]}


def _prompt_and_completion(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose last answer TRL trains on alone."""
    return {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]}
