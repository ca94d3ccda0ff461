"""Names in place of a recipe that mean data, a model or a part of a name, and the command to write instead.

For a right name it reads nothing; for a wrong one, names of files and the catalog.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from tuner import paths
from tuner.errors import RecipeError, did_you_mean
from tuner.recipes import catalog, document_file
from tuner.recipes.recipe_file import DOCUMENTS, YAML

DATA = (".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".gz", ".zst", ".bz2")
"""The suffixes of data files; a .json file may also be a recipe or a DeepSpeed config."""
_EXAMPLE_DATA = "alpaca"
_PATH = re.compile(r"""path["']?\s*[=:]\s*["']([^"']+)["']""")
_ROWS = re.compile(r"\{[^\n]*\}[ \t\r]*\n\s*\{")
"""The beginning of JSON Lines."""
_DEEPSPEED = re.compile(r'"(zero_optimization|fp16|bf16|train_\w*batch_size\w*|gradient_\w+|optimizer|scheduler)"\s*:')
_NOUNS = {"methods": "a method", "objectives": "an objective", "datasets": "a data set"}


def refusal(name: str, data: Sequence[str] = ()) -> RecipeError | None:
    """Return an error for a name that means data, a model or a missing file; None if it may be a recipe.

    Args:
        name: As the user wrote it.
        data: The values of --data, which the suggested command repeats.
    """
    if name.endswith(DATA):
        return _of_data(name)
    if name.endswith(DOCUMENTS):
        path = paths.expanded(name)
        return _document(name, path) if paths.exists(path) else missing(name)
    if "/" in name or name.endswith(".py"):
        return None
    try:
        catalog.read(name)
    except RecipeError:
        return _part(name, data)
    return None


def _of_data(name: str) -> RecipeError:
    is_here = "is a data file, not a recipe" if paths.exists(paths.expanded(name)) else "is a data file's name"
    fix = f"Give the model: tuner train --model MODEL --data {shlex.quote(name)}"
    return RecipeError(f"{name!r} {is_here}", fix=fix)


def _document(name: str, path: Path) -> RecipeError | None:
    """Return an error if a YAML or JSON file is not a recipe; None if reading it as one reports its mistakes."""
    if document_file.is_recipe(path):
        return None
    if name.endswith(YAML):
        return document_file.refusal_of_tool(name)
    if holds_rows(path):
        return _of_data(name)
    text = document_file.beginning(path)
    fix = f"Use: tuner train RECIPE --deepspeed {name}"
    return RecipeError(f"{name!r} is a DeepSpeed config, not a recipe", fix=fix) if _DEEPSPEED.search(text) else None


def holds_rows(path: Path) -> bool:
    """Return whether a JSON file begins like data: a list, or one object on each line."""
    text = document_file.beginning(path).lstrip()
    return text.startswith("[") or bool(_ROWS.match(text))


def missing(name: str) -> RecipeError:
    """Return an error for a missing file, with the nearest name in its folder."""
    folder = paths.expanded(name).parent
    names = [entry.name for entry in folder.iterdir()] if paths.is_folder(folder) else []
    near = did_you_mean(Path(name).name, names)
    return RecipeError(f"there is no file {name!r}", fix=near or "Check the path, or see the names: tuner list.")


def hub_id(name: str) -> str | None:
    """Return the hub id of the catalog's model with this name; case and the characters `-`, `_` and `.` are ignored."""
    part = _model(name)
    return _path_of(part) if part else None


def _part(name: str, data: Sequence[str]) -> RecipeError | None:
    if model := _model(name):
        rows = " ".join(f"--data {shlex.quote(one)}" for one in data) or "--data FILE"
        recipe = f"{model}_{catalog.DEFAULT_METHOD}_{_EXAMPLE_DATA}_e3"
        fix = f"Write: tuner train --model {_path_of(model)} {rows}, or a full recipe name such as {recipe}."
        return RecipeError(f"{name!r} is a model, not a recipe", fix=fix)
    kind = next((kind for kind in _NOUNS if name in catalog.names(kind)), None)
    if kind is None:
        return None
    if kind == "datasets":
        fix = f"Write a full recipe name such as qwen3_8b_{catalog.DEFAULT_METHOD}_{name}_e3. See: tuner list"
    else:
        method = name if kind == "methods" else f"{name}_{catalog.DEFAULT_METHOD}"
        fix = f"Write: tuner train --model MODEL --method {method} --data FILE. See: tuner list"
    return RecipeError(f"{name!r} is {_NOUNS[kind]}, not a recipe", fix=fix)


def _model(name: str) -> str | None:
    """Return the model part with this name or this end of a hub id; case, dashes, dots and underscores are ignored."""
    known, folded = catalog.names("models"), _folded(name)
    if name in known:
        return name
    by_name = {_folded(part): part for part in known}
    if folded in by_name:
        return by_name[folded]
    by_id = {_folded(_path_of(part).rpartition("/")[2]): part for part in known}
    return by_id.get(folded)


def _path_of(part: str) -> str:
    match = _PATH.search(catalog.text_of("models", part))
    return match[1] if match else part


def _folded(name: str) -> str:
    return re.sub(r"[-_.]", "", name).lower()
