"""The weights that a run starts from: a model, the result of a run, or an adapter on its base; and the chat template.

It reads small JSON files of a folder and asks no hub; `path_checks` says whether weights are there.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from tuner import assets, paths
from tuner.assets import without_generation_marks
from tuner.errors import Key, Option, RecipeError, options
from tuner.files import JsonObject, read_json_object, read_text
from tuner.recipes import catalog
from tuner.recipes.merging import Kind, Layer, Merged, Place, lookup, nested
from tuner.recipes.names import MODEL_CONFIG, RESULT
from tuner.recipes.recipe_file import read_part
from tuner.recipes.schema import LOADERS
from tuner.recipes.schema.objectives import OBJECTIVES

_KINDS = (MODEL_CONFIG, paths.ADAPTER)
_OF_A_RUN = re.compile(rf"{RESULT}|checkpoints|checkpoint-\d+")
_MODEL = ("model", "path")
_WEIGHTS = ("r", "lora_alpha", "target_modules", "use_dora", "use_rslora", "modules_to_save")
"""Settings that the trained weights of an adapter fix; its dropout may change."""

_LEFT_OUT = {"use_dora": False, "use_rslora": False, "lora_dropout": 0.0}
"""Values for keys that older versions of PEFT leave out if they are off."""


class Start(NamedTuple):
    """Whole weights (a folder or a hub id, and its commit), and the folder of the adapter on them, or None."""

    path: str
    revision: str | None = None
    adapter: str | None = None


def find(text: str, flag: str) -> Start:
    """Return the weights that `text` names: for a run its result, for an adapter its base and the adapter.

    Raises:
        RecipeError: an adapter that does not name its base, or a base that is missing.
    """
    folder = result_of(text)
    if folder is None or not _is_adapter(Path(folder)):
        return Start(folder or text)
    adapter = adapter_facts(folder)
    base = adapter.get("base_model_name_or_path") or ""
    local = paths.local(base) if base else None
    if not base or (local and not paths.exists(local)):
        message = f"the base of {text!r} is missing: {base!r}" if base else f"{text!r} does not name its base"
        fix = f"Set it: {options(Option('model', 'BASE'), Option('adapter', text))}."
        raise RecipeError(message, where=flag, fix=fix)
    return Start(base, adapter.get("revision"), folder)


def result_of(text: str) -> str | None:
    """Return the local folder that `text` names (for a run, the folder of its result), or None for a hub id."""
    folder = paths.local(text)
    if folder is None or text.startswith(assets.ASSET):
        return None
    holds = any(paths.is_file(folder / file) for file in _KINDS)
    inner = folder / RESULT
    return str(inner) if not holds and any(paths.is_file(inner / file) for file in _KINDS) else text


def name_of(path: str) -> str:
    """Return the name for a run on a model: the last part of its path, or the run's name for a run's result."""
    parts = [part for part in paths.expanded(path).absolute().parts if not _OF_A_RUN.fullmatch(part)]
    last = catalog.part_named(path) or (parts[-1] if paths.local(path) else path.rpartition("/")[2])
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", last).lstrip("-.") or "model"


def adapter_facts(folder: str) -> JsonObject:
    """Return an adapter's configuration as PEFT wrote it.

    Raises:
        RecipeError: it cannot be read, or is not a LoRA.
    """
    file = paths.expanded(folder) / paths.ADAPTER
    adapter = read_json_object(file)
    if "peft_type" not in adapter:
        raise RecipeError(f"{str(file)!r} cannot be read", where=paths.ADAPTED, fix="Copy it again.")
    if adapter["peft_type"] != "LORA":
        fix = f"Merge it first: tuner export {folder} DEST --merge, then {Option('model', 'DEST')}."
        raise RecipeError(f"{folder!r} is an adapter of {adapter['peft_type']}, not LoRA", where=paths.ADAPTED, fix=fix)
    return adapter


def lay_adapter_and_template(merged: Merged) -> None:
    """Set what the adapter at `adapter.path` fixes, then the chat template and the length that suit the model.

    Raises:
        RecipeError: the user's own values contradict the adapter or the model.
    """
    _lay_adapter(merged)
    _lay_template(merged)


def _lay_adapter(merged: Merged) -> None:
    """Set rank, scale and layers of the adapter at `adapter.path` to those of its weights."""
    block, path = merged.get(("adapter",)), merged.get(("adapter", "path"))
    if not isinstance(path, str):
        return
    folder = result_of(path) or path
    if not _is_adapter(paths.expanded(folder)):
        return  # `path_checks` refuses it later; a run's own recipe must load without the adapter that it began with
    adapter_config, where = adapter_facts(folder), merged.place_of(("adapter", "path"))
    _check_base(merged, adapter_config, folder)
    _check_ends(merged, adapter_config, folder)
    values: JsonObject = {"path": folder} if folder != path else {}
    for key in (*_WEIGHTS, "lora_dropout"):
        value, old, place = adapter_config.get(key), block.get(key), merged.place_of(("adapter", key))
        if (value or None) == (old or None) or (isinstance(value, list) and _alike(value, old)):
            continue
        if key not in _WEIGHTS and place.kind is not Kind.PACKAGE:
            continue
        if place.kind is Kind.FLAG and key in block:
            message = f"adapter.{key} = {old!r}: the adapter in {folder!r} has {value!r}"
            raise RecipeError(message, where=place, fix="Remove it, or put a new adapter on a merged model.")
        values[key] = value if value is not None else _LEFT_OUT.get(key)
    if values:
        derived = Place(Kind.DERIVED, f"{folder}/{paths.ADAPTER}")
        merged.lay(Layer({"adapter": values}, lambda keys: where if keys[-1] == "path" else derived))


def _alike(value: list[object], old: object) -> bool:
    return isinstance(old, list | tuple) and sorted(map(str, value)) == sorted(map(str, old))


def _check_base(merged: Merged, adapter_config: JsonObject, folder: str) -> None:
    base, model = adapter_config.get("base_model_name_or_path"), merged.get(_MODEL)
    if base and isinstance(model, str) and base != model and not (paths.local(base) or paths.local(model)):
        message = f"the adapter in {folder!r} was trained on {base!r}, not on {model!r}"
        raise RecipeError(message, where=merged.place_of(_MODEL), fix=f"Train it on its base: {Option('model', base)}.")


def _check_ends(merged: Merged, adapter_config: JsonObject, folder: str) -> None:
    objective, task = merged.get(("objective", "type")), adapter_config.get("task_type")
    if (task == "SEQ_CLS") != (objective in OBJECTIVES and OBJECTIVES[objective].facts.scores):
        message = f"the adapter in {folder!r} is of task {task}, which objective {objective} cannot train"
        fix = f"Merge it into its base first: tuner export {folder} DEST --merge, then {Option('model', 'DEST')}."
        raise RecipeError(message, where=paths.ADAPTED, fix=fix)


def _is_adapter(folder: Path) -> bool:
    return paths.is_file(folder / paths.ADAPTER) and not paths.is_file(folder / MODEL_CONFIG)


_KEY = "model.chat_template"
_TEMPLATE = ("model", "chat_template")


def chat_template_of(folder: Path) -> str | None:
    """Return the chat template in a folder with a tokenizer, or None if it has no readable one."""
    file = folder / "chat_template.jinja"
    try:
        if paths.is_file(file):
            return read_text(file)
    except (OSError, ValueError):
        return None
    template = read_json_object(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):  # several by name
        entries = (entry for entry in template if isinstance(entry, dict))
        template = next((entry.get("template") for entry in entries if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _lay_template(merged: Merged) -> None:
    """Set the chat template and the largest sample length for a model that the recipe was not written for.

    Raises:
        RecipeError: the user's own file sets the template of the previous model.
    """
    path = merged.get(_MODEL)
    if not isinstance(path, str) or merged.place_of(_MODEL).kind is Kind.PACKAGE:
        return
    _fit_length(merged, path)
    old_template = merged.get(_TEMPLATE)
    if merged.order_of(_TEMPLATE) >= merged.order_of(_MODEL):
        return
    before = next((old.value for old in merged.origins["model.path"].overridden if old.value), None)
    part = catalog.part_named(path)
    new_template = lookup(read_part("models", part).values, _TEMPLATE) if part else None
    is_copy_of_own = isinstance(before, str) and _last(before) == _last(path)  # of the recipe's model
    if old_template == new_template or is_copy_of_own:
        return
    if old_template is not None and not part and (folder := tokenizer_folder(merged.values)):
        own_template = chat_template_of(folder)
        if own_template is None:
            keeps = f"chat template: the recipe's {old_template!r}, because {path} has none ({Key(_KEY, 'NAME')})"
            merged.notes.append(keeps)
        if own_template is None or _same_template(catalog.chat_template(old_template), own_template):
            return
    place, note = merged.place_of(_TEMPLATE), None
    if old_template is not None and place.kind is Kind.FILE:
        message = f"model.chat_template = {old_template!r} is not the template of {path!r}"
        fix = f"Add {Key(_KEY, new_template)} for the model's own, or {Key(_KEY, old_template)} to keep yours."
        raise RecipeError(message, where=place, fix=fix)
    if old_template is not None:
        previous = f"{before}'s" if before else "the recipe's"
        instead = f"{new_template!r}, that of {path}" if new_template else f"{path}'s own"
        note = f"chat template: {instead}, not {previous} {old_template!r} ({Key(_KEY, old_template)} keeps that one)"
    merged.lay(Layer.at(merged.place_of(_MODEL), nested(_TEMPLATE, new_template), note=note))


def _same_template(first: str, second: str) -> bool:
    """Return whether two chat templates differ in their marks of generation alone."""
    return without_generation_marks(first) == without_generation_marks(second)


def tokenizer_folder(values: JsonObject) -> Path | None:
    """Return the folder with the tokenizer: the adapter's if training saved one there; None if it is on the hub."""
    adapter = (values.get("adapter") or {}).get("path")
    if adapter and paths.is_file(paths.expanded(adapter) / "tokenizer_config.json"):
        return paths.expanded(adapter)
    return paths.local(values["model"]["path"])


def _fit_length(merged: Merged, path: str) -> None:
    limit = merged.get(("architecture", "max_position_embeddings"))
    for loader in LOADERS:
        keys = (loader, "dataset", "max_length")
        length, place = merged.get(keys), merged.place_of(keys)
        if not (isinstance(limit, int) and isinstance(length, int) and place.kind is Kind.PACKAGE):
            continue
        if limit < length:
            derived = Place(Kind.DERIVED, f"derived: the context of {path}")
            # One line is enough for training and validation.
            note = f"max_length: {limit}, the context length of {path} (instead of {length})"
            merged.lay(Layer.at(derived, nested(keys, limit), note=note if note not in merged.notes else None))


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2].lower()
