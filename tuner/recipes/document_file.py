"""Files in YAML and JSON in place of a recipe: a recipe with the keys of one in Python, or another tool's config.

The keys of a file tell which of the two it is; `importers` reads what other tools' files hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from tuner.errors import RecipeError
from tuner.files import text_part
from tuner.hooks import other_tools
from tuner.recipes import yaml_text
from tuner.recipes.merging import Keys, Kind, leaves
from tuner.recipes.recipe_file import YAML, RecipeFile, wrong_scalar
from tuner.recipes.schema import RecipeConfig, schema_keys

_MAX_BYTES = 64_000
ACCELERATE = "accelerate"
"""The tool that has launch configs: they say how to train, and not what."""
KEYS_OF_ACCELERATE = ("distributed_type", "deepspeed_config", "compute_environment")
"""Top-level keys that only its files have."""


def owners(path: Path) -> tuple[bool, list[str]]:
    """Return whether a YAML or JSON file is a recipe, and the tools that it may belong to.

    YAML that cannot be read is nobody's, so it is read as a recipe, and the error says where it is wrong.
    """
    try:
        values = yaml_text.read_yaml(path).values
    except RecipeError:
        return path.suffix in YAML, []
    return holds_recipe(values), other_tools().owners(values)


def holds_rows(beginning: str) -> bool:
    """Return whether a JSON file begins like data: a list, or one object on each line."""
    return beginning.lstrip().startswith("[") or bool(_ROWS.match(beginning.lstrip()))


def holds_deepspeed(beginning: str) -> bool:
    """Return whether a JSON file begins with keys of a DeepSpeed config."""
    return bool(_DEEPSPEED.search(beginning))


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
    return "_base_" in values or (num_recipe_keys > 0 and num_recipe_keys >= other_tools().num_marks(other_keys))


def read_document(path: Path, name: str, kind: Kind = Kind.FILE) -> RecipeFile:
    """Read a recipe file in YAML or JSON; `name` is what messages call it.

    Raises:
        RecipeError: it cannot be read, builds objects, repeats a key, or holds what a recipe in Python may not.
    """
    document = yaml_text.read_yaml(path, name, fix=_FIX)
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
