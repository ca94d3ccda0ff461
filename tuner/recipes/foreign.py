"""Other tools' config files given as a recipe: whose a file is, and what to do with it.

It looks at a file's beginning alone, and reads none of its values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from tuner.errors import RecipeError

YAML = (".yaml", ".yml")
_MAX_BYTES = 64_000
_ACCELERATE = "accelerate"
_MARKS = {
    _ACCELERATE: "compute_environment distributed_type deepspeed_config",
    "llamafactory": (
        "model_name_or_path finetuning_type cutoff_len stage do_train dataset_dir lora_target template "
        "quantization_bit dist_config model_class train_dataset peft_config quant_config kernel_config"
    ),
    "axolotl": "base_model sequence_len micro_batch_size val_set_size num_epochs sample_packing",
    "roll": (
        "actor_train sft_train student hydra strategy_args actor_infer rollout_batch_size exp_name "
        "student_pretrain pretrain"
    ),
    "torchtune": "checkpointer metric_logger log_every_n_steps enable_activation_checkpointing tokenizer _component_",
    "ms-swift": "tuner_type train_type torch_dtype split_dataset_ratio attn_impl model lora_rank",
    "trl": (
        "dataset_name dataset_mixture use_peft dataset_train_split max_seq_length env model_name_or_path "
        "model_revision torch_dtype max_prompt_length lora_modules_to_save"
    ),
}
MARKS = {tool: frozenset(words.split()) for tool, words in _MARKS.items()}
"""Tool, as `tuner import --from` has it -> keys at the top that tell its files from others'."""
_SHARED = "training-arguments"
_OF_ALL = ("per_device_train_batch_size", "num_train_epochs", "gradient_accumulation_steps")
"""Words that several tools have: they are of transformers' own where no key is another's."""
_IMPORTS_XTUNER = re.compile(r"^\s*(?:from|import)\s+xtuner\b", re.MULTILINE)


def words() -> frozenset[str]:
    """Return every key that tells a tool's files from others'."""
    return frozenset[str]().union(*MARKS.values())


def tools_with(keys: Iterable[str]) -> list[str]:
    """Return the tools that have the most of these keys at the top as tell-tale ones; several may have as many."""
    found = {*keys}
    counts = {name: len(found.intersection(marks)) for name, marks in MARKS.items()}
    if most := max(counts.values()):
        return [name for name, count in counts.items() if count == most]
    return [_SHARED] if found.intersection(_OF_ALL) else []


def tool(path: Path) -> str | None:
    """Return whose YAML a file is, told by its keys, or None where that is not known."""
    return next(iter(tools_with(re.findall(r"^([A-Za-z_]\w*) *:", beginning(path), re.MULTILINE))), None)


def trains(path: Path) -> bool:
    """Say whether a YAML file is one that says what to train, not how DeepSpeed is launched."""
    return path.suffix in YAML and tool(path) not in (None, _ACCELERATE)


def refusal(name: str) -> RecipeError | None:
    """Return the refusal of another tool's YAML in place of a recipe; None where no tool is known by its keys."""
    owner = tool(Path(name))
    if owner == _ACCELERATE:
        fix = f"Use: tuner train RECIPE --deepspeed {name}"
        return RecipeError(f"{name!r} is a launch config of accelerate, not a recipe", fix=fix)
    if owner is None:
        return None
    return RecipeError(f"{name!r} is a config of {owner}, not a recipe", fix=f"Turn it into one: tuner import {name}")


def xtuner_error(path: Path, where: object) -> RecipeError | None:
    """Return the refusal of a config of XTuner's as the base of a recipe; None where the file is none."""
    if not imports_xtuner(path):
        return None
    what = "this is an XTuner config, which contains XTuner's own classes"
    return RecipeError(what, where=where, fix=f"Turn it into a recipe: tuner import {path} -o {path.stem}_recipe.py.")


def imports_xtuner(path: Path) -> bool:
    """Say whether a Python file is a config of XTuner's."""
    return bool(_IMPORTS_XTUNER.search(beginning(path)))


def beginning(path: Path) -> str:
    """Return the first text of a file, nothing of one that cannot be read."""
    try:
        with path.open("rb") as stream:
            return stream.read(_MAX_BYTES).decode("utf-8", errors="replace")
    except (OSError, ValueError):
        return ""
