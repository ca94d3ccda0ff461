"""What a user most likely means by a name that is no recipe's, or by a value that the schema refuses.

For a right name it reads nothing; for a wrong one, names of files and the catalog.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tuner import paths
from tuner.errors import RecipeError, TunerError, brief_repr, did_you_mean, together
from tuner.recipes import catalog, document_file
from tuner.recipes.aliases import instead_of_objective, key_hint
from tuner.recipes.merging import Keys, Kind, Merged, lookup
from tuner.recipes.recipe_file import DOCUMENTS, YAML
from tuner.recipes.schema import schema_keys
from tuner.recipes.schema.objectives import objectives_with

DATA = (".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".gz", ".zst", ".bz2")
"""The suffixes of data files; a .json file may also be a recipe or a DeepSpeed config."""
_MAX_MISTAKES = 20
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


def explained(error: ValidationError, merged: Merged) -> TunerError:
    """Return one error for all values that the schema refuses."""
    mistakes: dict[Keys, RecipeError] = {}
    for detail in error.errors(include_url=False):
        if len(mistakes) == _MAX_MISTAKES:
            break
        keys = _keys_of(detail, merged)
        # pydantic reports a wrong value of a union once for each of its branches.
        mistakes.setdefault(keys, _explained_detail(detail, keys, merged))
    errors = [*mistakes.values()]
    if len(errors) == _MAX_MISTAKES:
        errors[-1].fix = f"{errors[-1].fix or ''} These are the first {_MAX_MISTAKES} mistakes.".strip()
    return together(errors)


def _keys_of(detail: ErrorDetails, merged: Merged) -> Keys:
    """Return the recipe's key of an error."""
    keys = tuple(str(key) for key in detail["loc"])
    if detail["type"] == "extra_forbidden" and _of_another_objective(keys):
        return ("objective", "type")  # one wrong type, however many settings do not fit it
    if detail["type"] in ("missing", "extra_forbidden"):
        return keys
    # A location may end in a union's branch or a list's index ('target_modules', 'str'): keep the recipe's keys.
    while lookup(merged.values, keys, ...) is ...:
        keys = keys[:-1]
    return keys


def _explained_detail(detail: ErrorDetails, keys: Keys, merged: Merged) -> RecipeError:
    place = merged.place_of(keys)
    dotted, where = ".".join(keys), None if place.kind is Kind.DEFAULT else place
    match detail["type"]:
        case "extra_forbidden" if keys == ("objective", "type"):
            return _wrong_objective(str(detail["loc"][-1]), merged)
        case "extra_forbidden":
            siblings = (known[-1] for known in schema_keys() if known[:-1] == keys[:-1])
            return RecipeError(f"no key {dotted!r}", where=where, fix=key_hint(keys[-1], siblings))
        case "missing":
            return RecipeError(f"{dotted} is missing", where=where, fix=f"Set {dotted}.")
        case "union_tag_not_found":
            return RecipeError(f"{dotted}.type is missing", where=where, fix=f"Set {dotted}.type.")
        case "union_tag_invalid":
            context = detail["ctx"]
            if keys == ("objective",) and (instead := instead_of_objective(context["tag"])):
                place = merged.place_of((*keys, "type"))
                return RecipeError(f"tuner has no objective {context['tag']!r}", where=place, fix=instead)
            return _none_of((*keys, "type"), context["tag"], context["expected_tags"], merged)
        case "literal_error":
            return _none_of(keys, detail["input"], detail["ctx"]["expected"], merged)
        case "wrong_key":
            return RecipeError(f"{dotted}: {detail['msg']}", where=merged.place_of((*keys, detail["ctx"]["key"])))
    message = str(detail["ctx"]["error"]) if detail["type"] == "value_error" else detail["msg"]
    if isinstance(detail["input"], dict) and keys:
        return RecipeError(f"{dotted}: {message}", where=where)
    return RecipeError(f"{dotted} = {brief_repr(detail['input'])}: {message[:1].lower()}{message[1:]}", where=where)


def _none_of(keys: Keys, value: object, expected: str, merged: Merged) -> RecipeError:
    hint = did_you_mean(value, _choices(schema_keys().get(keys))) if isinstance(value, str) else ""
    message = f"{'.'.join(keys)} = {brief_repr(value)}: input should be {expected}"
    return RecipeError(message, where=merged.place_of(keys), fix=hint or None)


def _choices(annotation: object) -> list[str]:
    """Return the texts of all `Literal`s in an annotation."""
    inner = get_args(annotation)
    return [one for one in inner if isinstance(one, str)] + [text for one in inner for text in _choices(one)]


def _of_another_objective(keys: Keys) -> bool:
    return keys[:1] == ("objective",) and len(keys) == 2 and bool(objectives_with(keys[1]))


def _wrong_objective(setting: str, merged: Merged) -> RecipeError:
    """Return the error for a setting that the objective does not have; the fix changes the later of the two."""
    kind = merged.values["objective"]["type"]
    message = f"objective.{setting} belongs to {', '.join(objectives_with(setting))}, and objective.type is {kind!r}"
    if merged.order["objective.type"] < merged.order[f"objective.{setting}"]:
        return RecipeError(message, where=merged.place_of(("objective", setting)), fix=f"Remove {setting}.")
    fix = f"Use the recipe's name instead, which brings its own settings: tiny_{kind}_full_sample_e3."
    return RecipeError(message, where=merged.place_of(("objective", "type")), fix=fix)
