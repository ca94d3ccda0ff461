"""What a recipe says for one model and another model does not take: its chat template, its length.

It reads small files of the model's folder and renders nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tuner import paths
from tuner.assets import without_generation_marks
from tuner.errors import RecipeError
from tuner.files import read_json_object
from tuner.recipes import catalog
from tuner.recipes.merging import Layer, Merged, lookup, nested
from tuner.recipes.origin import Kind, Place
from tuner.recipes.part import read_part
from tuner.recipes.schema import LOADERS

_KEY = "model.chat_template"
_MODEL, _TEMPLATE = ("model", "path"), ("model", "chat_template")


def own(folder: Path) -> str | None:
    """Return the chat template in a folder with a tokenizer, or None where it has none, or no readable one."""
    file = folder / "chat_template.jinja"
    try:
        if paths.is_file(file):
            return file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    template = read_json_object(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):  # several by name
        template = next((one.get("template") for one in template if one.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def settle(merged: Merged) -> None:
    """Let a model that the recipe was not written for have its own chat template, and no longer samples than it takes.

    Raises:
        RecipeError: the user's own file names another template for the model before.
    """
    path = merged.get(_MODEL)
    if not isinstance(path, str) or merged.place_of(_MODEL).kind is Kind.PACKAGE:
        return
    _fit_length(merged, path)
    named = merged.get(_TEMPLATE)
    if merged.order_of(_TEMPLATE) >= merged.order_of(_MODEL):
        return
    before = next((old.value for old in merged.origins["model.path"].overridden if old.value), None)
    part = catalog.part_named(path)
    wanted = lookup(read_part("models", part).values, _TEMPLATE) if part else None
    if named == wanted or (before and _last(before) == _last(path)):  # a copy of the recipe's own model
        return
    if named is None:
        _replace(merged, wanted)
        return
    if not part and not _has_other(merged, path, named):
        return
    _refuse_of_file(merged, named, wanted, path)
    whose = f"{before}'s" if before else "the recipe's"
    instead = f"{wanted!r}, that of {path}" if wanted else f"{path}'s own"
    note = f"chat template: {instead}, not {whose} {named!r} (--set {_KEY}={named} keeps that one)"
    _replace(merged, wanted, note)


def _replace(merged: Merged, wanted: str | None, note: str | None = None) -> None:
    merged.lay(Layer.at(merged.place_of(_MODEL), nested(_TEMPLATE, wanted), note=note))


def _has_other(merged: Merged, path: str, named: str) -> bool:
    """Return whether a model has, or on the hub may have, another template than the named one; note if it has none."""
    folder = tokenizer_folder(merged.values)
    if folder is None:
        return True
    template = own(folder)
    if template is None:
        merged.notes.append(f"chat template: the recipe's {named!r}, because {path} has none (--set {_KEY}=NAME)")
        return False
    return without_generation_marks(catalog.chat_template(named)) != without_generation_marks(template)


def tokenizer_folder(values: dict[str, Any]) -> Path | None:
    """Return the folder with the tokenizer: an adapter's, where training saved one there; None for the hub's."""
    adapter = (values.get("adapter") or {}).get("path")
    if adapter and paths.is_file(paths.expanded(adapter) / "tokenizer_config.json"):
        return paths.expanded(adapter)
    return paths.local(values["model"]["path"])


def _refuse_of_file(merged: Merged, named: str, wanted: str | None, path: str) -> None:
    place = merged.place_of(_TEMPLATE)
    if place.kind is Kind.FILE:
        what = f"model.chat_template = {named!r} is not the template of {path!r}"
        fix = f"Add --set {_KEY}={wanted} for the model's own, or --set {_KEY}={named} to keep yours."
        raise RecipeError(what, where=place, fix=fix)


def _fit_length(merged: Merged, path: str) -> None:
    limit = merged.get(("architecture", "max_position_embeddings"))
    for loader in LOADERS:
        keys = (loader, "dataset", "max_length")
        length, place = merged.get(keys), merged.place_of(keys)
        if not (isinstance(limit, int) and isinstance(length, int) and place.kind is Kind.PACKAGE):
            continue
        if limit < length:
            derived = Place(Kind.DERIVED, f"derived: the context of {path}")
            # Validation follows training, so one line tells of both.
            note = f"max_length: {limit}, the context length of {path} (instead of {length})"
            merged.lay(Layer.at(derived, nested(keys, limit), note=note if note not in merged.notes else None))


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2].lower()
