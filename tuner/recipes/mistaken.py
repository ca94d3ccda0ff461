"""What a user most likely means by a name that is no recipe's, or by a value that the schema refuses.

`names` has looked at the name; for a wrong one this reads the catalog, and the names beside a missing file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tuner import paths
from tuner.errors import (
    ModelError,
    Option,
    RecipeError,
    Text,
    TunerError,
    brief_repr,
    did_you_mean,
    marked,
    options,
    together,
)
from tuner.hooks import other_tools
from tuner.recipes import catalog
from tuner.recipes.merging import Keys, Kind, Merged, lookup
from tuner.recipes.names import Name, NameKind
from tuner.recipes.schema import schema_keys
from tuner.recipes.schema.block import CONTRADICTION
from tuner.recipes.schema.objectives import OBJECTIVES, objectives_with
from tuner.runs.resume_advice import resume_advice

_MAX_MISTAKES = 20
_EXAMPLE_DATA = "alpaca"
_NOUNS = {"methods": "a method", "objectives": "an objective", "datasets": "a data set"}


def refusal(name: Name, data: Sequence[str] = ()) -> TunerError:
    """Return the error for a name that is not a recipe's: what it names, and how to use that.

    Args:
        name: Of a kind that cannot be trained.
        data: The values of --data, which the suggested command repeats.
    """
    text = name.text
    if name.kind is NameKind.MISSING:
        return _missing(name)
    if name.path is None:  # a word: neither a recipe's nor a model's
        return _part(text, data) or catalog.unknown(text)
    if name.kind is NameKind.DATA:
        is_here = "is a data file, not a recipe" if paths.exists(name.path) else "is a data file's name"
        return RecipeError(f"{text!r} {is_here}", fix=f"Give the model: tuner train --model MODEL --data {quote(text)}")
    if name.kind is NameKind.FOLDER:
        return no_model(text, name.path)
    is_config = name.kind is NameKind.DEEPSPEED
    description = f"a {'launch ' * is_config}config of {name.tool}" if name.tool else name.kind.value
    fix = f"Use: tuner train RECIPE --deepspeed {text}" if is_config else f"Turn it into one: tuner import {text}"
    return RecipeError(f"{text!r} is {description}, not a recipe", fix=fix)


def no_model(path: str, folder: Path) -> ModelError:
    """Return the error for a folder without a model: it may be a run without a result, or hold data."""
    paths.refuse_forbidden(folder, ModelError, "model.path")
    saved = sorted(folder.glob("checkpoints/checkpoint-*"), key=lambda path: (len(path.name), path.name))
    if paths.is_file(folder / "recipe.py"):
        alternative = f", or give one of its checkpoints: {saved[-1]}" if saved else ""
        fix = f"Resume it first: {resume_advice(folder)}{alternative}."
        return ModelError(f"the run {path!r} has no result yet", where="model.path", fix=fix)
    if any(file.suffix in paths.DATA for file in folder.iterdir()):
        fix = f"Give the model first: tuner train --model MODEL --data {path}"
        return ModelError(f"{path!r} holds data and no model", where="model.path", fix=fix)
    message = f"{path!r} has no config.json, and is not a run directory"
    return ModelError(message, where="model.path", fix="Give a folder written by save_pretrained, or a run.")


def _missing(name: Name) -> RecipeError:
    """Return the error for a missing file, with the nearest name in its folder."""
    assert name.path is not None, "a file's name"
    folder = name.path.parent
    is_readable = paths.is_folder(folder) and not paths.forbidden(folder)
    near = did_you_mean(name.path.name, [entry.name for entry in folder.iterdir()] if is_readable else [])
    return RecipeError(f"there is no file {name.text!r}", fix=near or "Check the path, or see the names: tuner list.")


def hub_id(name: str) -> str | None:
    """Return the hub id of the catalog's model with this name; case and the characters `-`, `_` and `.` are ignored."""
    part = _model(name)
    return catalog.path_of(part) if part else None


def _part(name: str, data: Sequence[str]) -> RecipeError | None:
    if model := _model(name):
        rows = options(*(Option("data", path) for path in data)) or Option("data", "FILE")
        recipe = f"{model}_{catalog.DEFAULT_METHOD}_{_EXAMPLE_DATA}_e3"
        fix = f"Write: tuner train --model {catalog.path_of(model)} {rows}, or a full recipe name such as {recipe}."
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
    by_id = {_folded(catalog.path_of(part).rpartition("/")[2]): part for part in known}
    return (by_id | by_name).get(folded)


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
        errors[-1].fix = Text(f"{marked(errors[-1].fix or '')} These are the first {_MAX_MISTAKES} mistakes.".strip())
    return together(errors)


def _keys_of(detail: ErrorDetails, merged: Merged) -> Keys:
    """Return the recipe's key of an error."""
    keys = tuple(str(key) for key in detail["loc"])
    is_of_objective = keys[:1] == ("objective",) and len(keys) == 2
    if detail["type"] == "extra_forbidden" and is_of_objective and objectives_with(keys[1]):
        return ("objective", "type")  # one wrong type, however many settings do not fit it
    if detail["type"] in ("missing", "extra_forbidden"):
        return keys
    # A location may end in a union's branch or a list's index ('target_modules', 'str'): keep the recipe's keys.
    is_default = detail["type"] == CONTRADICTION and isinstance(lookup(merged.values, keys[:-1]), dict)
    while not is_default and lookup(merged.values, keys, ...) is ...:
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
            return RecipeError(f"no key {dotted!r}", where=where, fix=other_tools().key_hint(keys[-1], siblings))
        case "missing":
            return RecipeError(f"{dotted} is missing", where=where, fix=f"Set {dotted}.")
        case "union_tag_not_found":
            return RecipeError(f"{dotted}.type is missing", where=where, fix=f"Set {dotted}.type.")
        case "union_tag_invalid":
            context = detail["ctx"]
            if keys == ("objective",) and (instead := other_tools().instead_of_objective(context["tag"])):
                place = merged.place_of((*keys, "type"))
                return RecipeError(f"tuner has no objective {context['tag']!r}", where=place, fix=instead)
            return _none_of((*keys, "type"), context["tag"], context["expected_tags"], merged)
        case "literal_error":
            return _none_of(keys, detail["input"], detail["ctx"]["expected"], merged)
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
    options = get_args(annotation)
    return [choice for option in options for choice in ([option] if isinstance(option, str) else _choices(option))]


def _wrong_objective(setting: str, merged: Merged) -> RecipeError:
    """Return the error for a setting that the objective does not have; the fix changes the later of the two."""
    kind = merged.values["objective"]["type"]
    message = f"objective.{setting} belongs to {', '.join(objectives_with(setting))}, and objective.type is {kind!r}"
    if reason := OBJECTIVES[kind].lacks.get(setting):
        message += f"; {reason}"
    if merged.order["objective.type"] < merged.order[f"objective.{setting}"]:
        return RecipeError(message, where=merged.place_of(("objective", setting)), fix=f"Remove {setting}.")
    fix = f"Use the recipe's name instead, which brings its own settings: tiny_{kind}_full_sample_e3."
    return RecipeError(message, where=merged.place_of(("objective", "type")), fix=fix)
