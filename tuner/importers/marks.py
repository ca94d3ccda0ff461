"""Whose a config is: the top-level keys that only one tool's files have, and how an XTuner config begins."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tuner.recipes.document_file import ACCELERATE, KEYS_OF_ACCELERATE

_MARKS = {
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
_OF_TOOLS = {
    ACCELERATE: frozenset(KEYS_OF_ACCELERATE),
    **{tool: frozenset(words.split()) for tool, words in _MARKS.items()},
}
"""Tool, in the words of `tuner import --from` -> top-level keys that only its files have."""
_SHARED = "training-arguments"
_OF_ALL = ("per_device_train_batch_size", "num_train_epochs")
"""Keys that several tools have, and DeepSpeed has not: a file with only these holds transformers' TrainingArguments."""
_IMPORTS_XTUNER = re.compile(r"^\s*(?:from|import)\s+xtuner\b", re.MULTILINE)


def owners(keys: Iterable[str]) -> list[str]:
    """Return the tools with the most identifying keys among these top-level keys; several in a tie."""
    given_keys = {*keys}
    counts = {name: len(given_keys.intersection(marks)) for name, marks in _OF_TOOLS.items()}
    if max_count := max(counts.values()):
        return [name for name, count in counts.items() if count == max_count]
    return [_SHARED] if given_keys.intersection(_OF_ALL) else []


def num_marks(keys: Iterable[str]) -> int:
    """Return how many of these keys only the files of one tool have."""
    given_keys = {*keys}
    return max(len(given_keys & marks) for marks in _OF_TOOLS.values())


def owner_of_python(beginning: str) -> str | None:
    """Return the tool of a Python config that begins so; None: it may be a recipe."""
    return "xtuner" if _IMPORTS_XTUNER.search(beginning) else None
