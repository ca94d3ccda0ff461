"""Files in YAML and JSON in place of a recipe: a recipe with the keys of one in Python, or another tool's config.

The keys of a file tell which of the two it is; `importers` reads what other tools' files hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tuner.errors import RecipeError
from tuner.files import text_part
from tuner.recipes import yaml_text
from tuner.recipes.merging import Keys, Kind, leaves
from tuner.recipes.recipe_file import YAML, RecipeFile, wrong_scalar
from tuner.recipes.schema import RecipeConfig, schema_keys

_MAX_BYTES = 64_000
ACCELERATE = "accelerate"
"""The tool that has launch configs: they say how to train, and not what."""
_MARKS = {
    ACCELERATE: "compute_environment distributed_type deepspeed_config",
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
"""Tool, in the words of `tuner import --from` -> top-level keys that only its files have."""
_SHARED = "training-arguments"
_OF_ALL = ("per_device_train_batch_size", "num_train_epochs")
"""Keys that several tools have, and DeepSpeed has not: a file with only these holds transformers' TrainingArguments."""
XTUNER = "xtuner"
_IMPORTS_XTUNER = re.compile(r"^\s*(?:from|import)\s+xtuner\b", re.MULTILINE)


def tools_with(keys: Iterable[str]) -> list[str]:
    """Return the tools with the most identifying keys among these top-level keys; several in a tie."""
    given_keys = {*keys}
    counts = {name: len(given_keys.intersection(marks)) for name, marks in MARKS.items()}
    if max_count := max(counts.values()):
        return [name for name, count in counts.items() if count == max_count]
    return [_SHARED] if given_keys.intersection(_OF_ALL) else []


def owners(path: Path) -> tuple[bool, list[str]]:
    """Return whether a YAML or JSON file is a recipe, and the tools that it may belong to.

    YAML that cannot be read is nobody's, so it is read as a recipe, and the error says where it is wrong.
    """
    try:
        values = yaml_text.read(path).values
    except RecipeError:
        return path.suffix in YAML, []
    return holds_recipe(values), tools_with(values)


def holds_rows(beginning: str) -> bool:
    """Return whether a JSON file begins like data: a list, or one object on each line."""
    return beginning.lstrip().startswith("[") or bool(_ROWS.match(beginning.lstrip()))


def holds_deepspeed(beginning: str) -> bool:
    """Return whether a JSON file begins with keys of a DeepSpeed config."""
    return bool(_DEEPSPEED.search(beginning))


def imports_xtuner(beginning: str) -> bool:
    """Return whether a Python file begins as an XTuner config."""
    return bool(_IMPORTS_XTUNER.search(beginning))


def beginning(path: Path) -> str:
    """Return the beginning of a file's text; an empty text if it cannot be read."""
    return text_part(path, max_bytes=_MAX_BYTES)


_ROWS = re.compile(r"\{[^\n]*\}[ \t\r]*\n\s*\{")
"""The beginning of JSON Lines."""
_DEEPSPEED = re.compile(r'"(zero_optimization|fp16|bf16|train_\w*batch_size\w*|gradient_\w+|optimizer|scheduler)"\s*:')
_FIX = "Give a recipe's name, or a file of recipe keys."


def holds_recipe(values: Mapping[str, object]) -> bool:
    """Return whether values have more keys of a recipe, with their blocks, than identifying keys of another tool."""
    known = schema_keys()
    num_recipe_keys = sum(tuple(key.split(".")) in known for key, _ in leaves(values) if "." in key)
    other_keys = {
        key for key, value in values.items() if not (key in RecipeConfig.model_fields and isinstance(value, dict))
    }
    num_tool_keys = max(len(other_keys & marks) for marks in MARKS.values())
    return "_base_" in values or (num_recipe_keys > 0 and num_recipe_keys >= num_tool_keys)


def read_document(path: Path, name: str, kind: Kind = Kind.FILE) -> RecipeFile:
    """Read a recipe file in YAML or JSON; `name` is what messages call it.

    Raises:
        RecipeError: it cannot be read, builds objects, repeats a key, or holds what a recipe in Python may not.
    """
    document = yaml_text.read(path, name, fix=_FIX)
    file = RecipeFile(name, document.values, document.lines, kind=kind)
    for keys, value in _scalars(document.values):
        wrong = ("None is a text in YAML and JSON", "Write null.") if value == "None" else wrong_scalar(value)
        if wrong:
            raise RecipeError(f"{'.'.join(keys)}: {wrong[0]}", where=file.where(keys), fix=wrong[1])
    return file


def _scalars(value: object, keys: Keys = ()) -> Iterator[tuple[Keys, object]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*keys, key), key
            yield from _scalars(inner, (*keys, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _scalars(inner, (*keys, str(number)))
    else:
        yield keys, value
