"""Files in YAML and JSON in place of a recipe: a recipe with the keys of one in Python, or another tool's config.

The keys of a file tell which of the two it is; `importers` reads what other tools' files hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tuner import paths
from tuner.errors import RecipeError
from tuner.files import is_writable, open_regular
from tuner.recipes import yaml_text
from tuner.recipes.merging import Keys, Kind, leaves
from tuner.recipes.recipe_file import DOCUMENTS, MAX_NUMBER, MAX_TEXT, YAML, RecipeFile
from tuner.recipes.schema import RecipeConfig, schema_keys

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
"""Tool, in the words of `tuner import --from` -> top-level keys that only its files have."""
_SHARED = "training-arguments"
_OF_ALL = ("per_device_train_batch_size", "num_train_epochs", "gradient_accumulation_steps")
"""Keys that several tools have: a file with only these holds transformers' TrainingArguments."""
_IMPORTS_XTUNER = re.compile(r"^\s*(?:from|import)\s+xtuner\b", re.MULTILINE)


def telltale_keys() -> frozenset[str]:
    """Return every key that identifies a tool's files."""
    return frozenset[str]().union(*MARKS.values())


def tools_with(keys: Iterable[str]) -> list[str]:
    """Return the tools with the most identifying keys among these top-level keys; several in a tie."""
    known = {*keys}
    counts = {name: len(known.intersection(marks)) for name, marks in MARKS.items()}
    if most := max(counts.values()):
        return [name for name, count in counts.items() if count == most]
    return [_SHARED] if known.intersection(_OF_ALL) else []


def tool_of(path: Path) -> str | None:
    """Return the tool that a YAML file belongs to, by its keys, or None."""
    return next(iter(tools_with(re.findall(r"^([A-Za-z_]\w*) *:", beginning(path), re.MULTILINE))), None)


def says_what_to_train(path: Path) -> bool:
    """Return whether a YAML file is a training config of another tool, and not a launch config of accelerate."""
    return path.suffix in YAML and tool_of(path) not in (None, _ACCELERATE)


def refusal_of_tool(name: str) -> RecipeError | None:
    """Return an error if a file is another tool's YAML; None if no tool has its keys."""
    owner = tool_of(Path(name))
    if owner == _ACCELERATE:
        fix = f"Use: tuner train RECIPE --deepspeed {name}"
        return RecipeError(f"{name!r} is a launch config of accelerate, not a recipe", fix=fix)
    if owner is None:
        return None
    return RecipeError(f"{name!r} is a config of {owner}, not a recipe", fix=f"Turn it into one: tuner import {name}")


def xtuner_error(path: Path, where: object) -> RecipeError | None:
    """Return an error if the file is an XTuner config, which a recipe cannot build on; otherwise None."""
    if not imports_xtuner(path):
        return None
    message = "this is an XTuner config, which contains XTuner's own classes"
    fix = f"Turn it into a recipe: tuner import {path} -o {path.stem}_recipe.py."
    return RecipeError(message, where=where, fix=fix)


def imports_xtuner(path: Path) -> bool:
    """Return whether a Python file is an XTuner config."""
    return bool(_IMPORTS_XTUNER.search(beginning(path)))


def beginning(path: Path) -> str:
    """Return the beginning of a file's text; an empty text if it cannot be read."""
    try:
        with open_regular(path) as stream:
            return stream.read(_MAX_BYTES).decode("utf-8", errors="replace")
    except (OSError, ValueError):
        return ""


_BASE = "_base_"
_SHARED = "deepspeed"
"""A key of recipes and of several tools, with the same meaning."""
_KEY = re.compile(r"""^\s*"?([A-Za-z_]\w*)"?\s*:""", re.MULTILINE)
_FIX = "Give a recipe's name, or a file of recipe keys."


def is_recipe(path: Path) -> bool:
    """Return whether a YAML or JSON file is a recipe, perhaps with a mistake in it, and not another tool's config."""
    if path.suffix not in DOCUMENTS or not paths.is_file(path):
        return False
    try:
        return holds_recipe(yaml_text.read(path).values)
    except RecipeError:
        keys = {*_KEY.findall(beginning(path))}
        return bool(keys.intersection((_BASE, *RecipeConfig.model_fields)) - telltale_keys() - {_SHARED})


def holds_recipe(values: Mapping[str, object]) -> bool:
    """Return whether values have more keys of a recipe, with their blocks, than identifying keys of another tool."""
    known = schema_keys()
    ours = sum(tuple(key.split(".")) in known for key, _ in leaves(values) if "." in key)
    others = {
        key for key, value in values.items() if not (key in RecipeConfig.model_fields and isinstance(value, dict))
    }
    theirs = max(len(others & marks) for marks in MARKS.values())
    return _BASE in values or (ours > 0 and ours >= theirs)


def read_document(path: Path, name: str, kind: Kind = Kind.FILE) -> RecipeFile:
    """Read a recipe file in YAML or JSON; `name` is what messages call it.

    Raises:
        RecipeError: it cannot be read, builds objects, repeats a key, or holds what a recipe in Python may not.
    """
    document = yaml_text.read(path, name, fix=_FIX)
    file = RecipeFile(name, document.values, document.lines, kind=kind)
    for keys, value in _scalars(document.values):
        if wrong := _wrong(value):
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


def _wrong(value: object) -> tuple[str, str] | None:
    """Return what is wrong with a value that the schema does not check, and what to do; None if it is right."""
    if isinstance(value, str) and len(value) > MAX_TEXT:
        return f"a text longer than {MAX_TEXT} characters", "Put it into a file of its own."
    if isinstance(value, str) and not is_writable(value):
        return "a text with a NUL or half a surrogate pair", "Use text that is valid UTF-8."
    if isinstance(value, str) and value == "None":
        return "None is a text in YAML and JSON", "Write null."
    if isinstance(value, int | float) and not -MAX_NUMBER <= value <= MAX_NUMBER:
        return f"{value} is out of range", f"Use a number between -{MAX_NUMBER:g} and {MAX_NUMBER:g}."
    return None
