"""What a run starts from: a model by its folder or hub id, a run's result, or an adapter on its base.

It reads small JSON files of a folder and asks no hub; whether weights are there is `path_checks` to say.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from tuner import assets, paths
from tuner.errors import RecipeError
from tuner.files import read_json_object
from tuner.recipes import catalog
from tuner.recipes.merging import Layer, Merged
from tuner.recipes.origin import Kind, Place
from tuner.recipes.schema.objectives import scores

_WHOLE = "config.json"
_RESULT = "final"
"""Where a run directory has its result."""
_KINDS = (_WHOLE, paths.ADAPTER)
_OF_A_RUN = re.compile(rf"{_RESULT}|checkpoints|checkpoint-\d+")
_MODEL = ("model", "path")
_WEIGHTS = ("r", "lora_alpha", "target_modules", "use_dora", "use_rslora", "modules_to_save")
"""What the trained weights of an adapter were made for; its dropout is free."""

_LEFT_OUT = {"use_dora": False, "use_rslora": False, "lora_dropout": 0.0}
"""What older versions of PEFT do not write of a LoRA without it."""


class Start(NamedTuple):
    """Whole weights (a folder or a hub id, and its commit), and the folder of the adapter on them, if there is one."""

    path: str
    revision: str | None = None
    adapter: str | None = None


def is_model(name: str) -> bool:
    """Return whether what stands in a recipe's place is a model: a folder, or an id on the hub with its owner."""
    path = paths.expanded(name)
    if name.endswith((".py", ".yaml", ".yml")) or paths.is_file(path):
        return False
    if "/" in name:
        return paths.is_folder(path) or paths.local(name) is None
    return holds_model(path)


def holds_model(folder: Path) -> bool:
    """Return whether a folder, or its result as a run, holds a model or an adapter."""
    return any(paths.is_file(place / file) for place in (folder, folder / _RESULT) for file in _KINDS)


def find(text: str, flag: str) -> Start:
    """Return what `text` means: of a run its result, of an adapter its base with it.

    Raises:
        RecipeError: an adapter that does not say what its base is, or whose base is gone.
    """
    folder = result_of(text)
    if folder is None or not _is_adapter(Path(folder)):
        return Start(folder or text)
    told = adapter_facts(folder)
    base = told.get("base_model_name_or_path") or ""
    local = paths.local(base) if base else None
    if not base or (local and not paths.exists(local)):
        what = f"the base of {text!r} is missing: {base!r}" if base else f"{text!r} does not name its base"
        raise RecipeError(what, where=flag, fix=f"Set it: --model BASE --adapter {text}.")
    return Start(base, told.get("revision"), folder)


def result_of(text: str) -> str | None:
    """Return the local folder that `text` means, of a run that of its result; None for an id on the hub."""
    folder = paths.local(text)
    if folder is None or text.startswith(assets.ASSET):
        return None
    holds = any(paths.is_file(folder / file) for file in _KINDS)
    inner = folder / _RESULT
    return str(inner) if not holds and any(paths.is_file(inner / file) for file in _KINDS) else text


def name_of(path: str) -> str:
    """Return what to call a run on a model: the last part of its path, of a run's result the run's."""
    parts = [part for part in paths.expanded(path).absolute().parts if not _OF_A_RUN.fullmatch(part)]
    last = catalog.part_named(path) or (parts[-1] if paths.local(path) else path.rpartition("/")[2])
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", last).lstrip("-.") or "model"


def adapter_facts(folder: str) -> dict[str, Any]:
    """Return an adapter's configuration as PEFT wrote it.

    Raises:
        RecipeError: it is not readable, or of another kind than LoRA.
    """
    file = paths.expanded(folder) / paths.ADAPTER
    facts = read_json_object(file)
    if "peft_type" not in facts:
        raise RecipeError(f"{str(file)!r} cannot be read", where=paths.ADAPTED, fix="Copy it again.")
    if facts["peft_type"] != "LORA":
        fix = f"Merge it first: tuner export {folder} DEST --merge, then --model DEST."
        what = f"{folder!r} is an adapter of {facts['peft_type']}, not LoRA"
        raise RecipeError(what, where=paths.ADAPTED, fix=fix)
    return facts


def settle(merged: Merged) -> None:
    """Let the adapter at `adapter.path` say what its weights are: rank, scale, layers.

    Raises:
        RecipeError: the user asks for another rank than it has, it was trained on another model, or for other ends.
    """
    block, path = merged.get(("adapter",)), merged.get(("adapter", "path"))
    if not isinstance(path, str):
        return
    folder = result_of(path) or path
    if not _is_adapter(paths.expanded(folder)):
        return  # `path_checks` refuses it: a run's own recipe is read when the adapter that it began with is gone
    told, where = adapter_facts(folder), merged.place_of(("adapter", "path"))
    _check_base(merged, told, folder)
    _check_ends(merged, told, folder)
    values: dict[str, Any] = {"path": folder} if folder != path else {}
    for key in (*_WEIGHTS, "lora_dropout"):
        value, old, place = told.get(key), block.get(key), merged.place_of(("adapter", key))
        if (value or None) == (old or None) or (isinstance(value, list) and _alike(value, old)):
            continue
        if key not in _WEIGHTS and place.kind is not Kind.PACKAGE:
            continue
        if place.kind is Kind.FLAG and key in block:
            what = f"adapter.{key} = {old!r}: the adapter in {folder!r} has {value!r}"
            raise RecipeError(what, where=place, fix="Remove it, or put a new adapter on a merged model.")
        values[key] = value if value is not None else _LEFT_OUT.get(key)
    if values:
        derived = Place(Kind.DERIVED, f"{folder}/{paths.ADAPTER}")
        merged.lay(Layer({"adapter": values}, lambda keys: where if keys[-1] == "path" else derived))


def _alike(value: list[Any], old: Any) -> bool:
    return isinstance(old, list | tuple) and sorted(map(str, value)) == sorted(map(str, old))


def _check_base(merged: Merged, told: dict[str, Any], folder: str) -> None:
    base, model = told.get("base_model_name_or_path"), merged.get(_MODEL)
    if base and isinstance(model, str) and base != model and not (paths.local(base) or paths.local(model)):
        what = f"the adapter in {folder!r} was trained on {base!r}, not on {model!r}"
        raise RecipeError(what, where=merged.place_of(_MODEL), fix=f"Train it on its base: --model {base}.")


def _check_ends(merged: Merged, told: dict[str, Any], folder: str) -> None:
    objective = merged.get(("objective", "type"))
    if (told.get("task_type") == "SEQ_CLS") != scores(objective):
        what = f"the adapter in {folder!r} is of task {told.get('task_type')}, which objective {objective} cannot train"
        fix = f"Merge it into its base first: tuner export {folder} DEST --merge, then --model DEST."
        raise RecipeError(what, where=paths.ADAPTED, fix=fix)


def _is_adapter(folder: Path) -> bool:
    return paths.is_file(folder / paths.ADAPTER) and not paths.is_file(folder / _WHOLE)
