"""Recipes in YAML and JSON: the keys of a recipe in Python, `_base_` too, each with its line.

It tells such a file from other tools' by its keys; what those hold, `importers` reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tuner import paths
from tuner.errors import RecipeError
from tuner.files import is_writable
from tuner.recipes import foreign
from tuner.recipes.merging import leaves
from tuner.recipes.origin import Keys, Kind
from tuner.recipes.recipe_file import MAX_NUMBER, MAX_TEXT, RecipeFile
from tuner.recipes.schema import RecipeConfig, schema_keys

SUFFIXES = (*foreign.YAML, ".json")
_BASE = "_base_"
_SHARED = "deepspeed"
"""A key of recipes and of several tools, with the same meaning."""
_KEY = re.compile(r"""^\s*"?([A-Za-z_]\w*)"?\s*:""", re.MULTILINE)
_FIX = "Give a recipe's name, or a file of recipe keys."


def is_recipe(path: Path) -> bool:
    """Say whether a YAML or JSON file is a recipe, also one with a mistake in it; another tool's config is none."""
    if path.suffix not in SUFFIXES or not paths.is_file(path):
        return False
    from tuner.recipes import yaml_text  # PyYAML, for files of these names alone

    try:
        return holds_recipe(yaml_text.read(path).values)
    except RecipeError:
        keys = {*_KEY.findall(foreign.beginning(path))}
        return bool(keys.intersection((_BASE, *RecipeConfig.model_fields)) - foreign.words() - {_SHARED})


def holds_recipe(values: Mapping[str, Any]) -> bool:
    """Say whether values are a recipe's: more of its keys, with their blocks, than words that tell other tools."""
    known = schema_keys()
    ours = sum(tuple(key.split(".")) in known for key, _ in leaves(values) if "." in key)
    others = {
        key for key, value in values.items() if not (key in RecipeConfig.model_fields and isinstance(value, dict))
    }
    theirs = max(len(others & marks) for marks in foreign.MARKS.values())
    return _BASE in values or (ours > 0 and ours >= theirs)


def read(path: Path, name: str, kind: Kind = Kind.FILE) -> RecipeFile:
    """Read a recipe file in YAML or JSON; `name` is what messages call it.

    Raises:
        RecipeError: it cannot be read, builds objects, repeats a key, or holds what a recipe in Python may not.
    """
    from tuner.recipes import yaml_text  # PyYAML, for files of these names alone

    document = yaml_text.read(path, name, fix=_FIX)
    file = RecipeFile(name, document.values, document.lines, kind=kind)
    for keys, value in _scalars(document.values):
        if wrong := _wrong(value):
            raise RecipeError(f"{'.'.join(keys)}: {wrong[0]}", where=file.where(keys), fix=wrong[1])
    return file


def _scalars(value: Any, keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*keys, key), key
            yield from _scalars(inner, (*keys, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _scalars(inner, (*keys, str(number)))
    else:
        yield keys, value


def _wrong(value: Any) -> tuple[str, str] | None:
    """Return what is wrong with a value that the schema cannot judge, and what to do."""
    if isinstance(value, str) and len(value) > MAX_TEXT:
        return f"a text longer than {MAX_TEXT} characters", "Put it into a file of its own."
    if isinstance(value, str) and not is_writable(value):
        return "a text with a NUL or half a surrogate pair", "Use text that is valid UTF-8."
    if isinstance(value, str) and value == "None":
        return "None is a text in YAML and JSON", "Write null."
    if isinstance(value, int | float) and not -MAX_NUMBER <= value <= MAX_NUMBER:
        return f"{value} is out of range", f"Use a number between -{MAX_NUMBER:g} and {MAX_NUMBER:g}."
    return None
