"""Which DeepSpeed config was chosen: a preset, a user's file, a dict in the recipe, or none; opened as a document.

It judges no key of it.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.errors import DeepSpeedConfigError, did_you_mean
from tuner.machine.topology import LaunchFlags
from tuner.paths import is_file
from tuner.recipes import catalog
from tuner.recipes.catalog import PRESETS
from tuner.recipes.document_file import YAML
from tuner.recipes.merging import Kind, Layer, Origin, Place, leaves, lookup
from tuner.recipes.recipe import Recipe
from tuner.zero import overlay
from tuner.zero.config_schema import schema
from tuner.zero.jsonfile import BASE, Document, Keys, read
from tuner.zero.rules import AUTO, NONE

if TYPE_CHECKING:
    from tuner.zero.accelerate import Said


def preset_name(text: str) -> str | None:
    """Return the preset that `text` names in full ('deepspeed_zero2') or short ('zero2'), or None."""
    for name in (text, f"deepspeed_{text}"):
        if name in catalog.presets():
            return name
    return None


def chosen(recipe: Recipe, flag: str | None) -> tuple[str | dict[str, Any], str]:
    """Return what is chosen, by `--deepspeed` or else by the recipe, and where: the flag or the key."""
    if flag is not None:
        return flag, "--deepspeed"
    return recipe.config.deepspeed, f"deepspeed ({next(iter(_sources(recipe).values()))})"


def open_chosen(recipe: Recipe, flag: str | None) -> Document:
    """Return the config that is chosen, with what `--ds` changes; in one of the recipe, each value knows its own line.

    Raises:
        DeepSpeedConfigError: as `open_config`, or a `--ds` that means nothing.
    """
    choice, where = chosen(recipe, flag)
    document = open_config(choice, where, _sources(recipe))
    return overlay.laid(document, map(overlay.of_flag, recipe.ds)) if recipe.ds else document


def without_catalog(recipe: Recipe) -> Recipe:
    """Return the recipe with the values of the preset of the user's own catalog that it names, in the name's place.

    Raises:
        DeepSpeedConfigError: as `open_config`.
    """
    value = recipe.config.deepspeed
    named = value.get(BASE) if isinstance(value, dict) else value
    preset = preset_name(named) if isinstance(named, str) else None
    if preset is None or catalog.part_file(PRESETS, preset).is_ours:
        return recipe
    pinned = open_config(value, "deepspeed", _sources(recipe)).pinned
    return replace(recipe, config=recipe.config.model_copy(update={"deepspeed": pinned}))


def is_auto(recipe: Recipe, flag: str | None) -> bool:
    """Return whether the plan is to choose the level."""
    return chosen(recipe, flag)[0] == AUTO


def launch_of(recipe: Recipe, flag: str | None) -> LaunchFlags | None:
    """Return where the chosen file says that a run starts; None: it is none that says so.

    Raises:
        DeepSpeedConfigError: as `open_config`.
    """
    choice, where = chosen(recipe, flag)
    file = choice.get(BASE) if isinstance(choice, dict) else choice
    return open_config(file, where).launch if isinstance(file, str) and file.endswith(YAML) else None


def _sources(recipe: Recipe) -> dict[Keys, Place]:
    paths = {tuple(key.split(".")): origin.place for key, origin in recipe.origins.items()}
    return {path[1:]: place for path, place in paths.items() if path[0] == "deepspeed"}


def open_config(choice: str | dict[str, Any], where: str, sources: Mapping[Keys, Place] | None = None) -> Document:
    """Return the config that `--deepspeed` or the recipe chose.

    Args:
        choice: A preset's name, 'none', a path to a JSON or YAML, a whole config as a dict, or a dict of what changes
            in the one that its `base` names.
        where: The flag or key that holds it, for messages.
        sources: Where each leaf of a dict is written.

    Raises:
        DeepSpeedConfigError: no such preset or file, or a file that is not strict JSON with comments, or YAML that
            means no DeepSpeed config.
    """
    if isinstance(choice, dict):
        return _of_dict(copy.deepcopy(choice), where, sources or {})
    if choice == NONE:
        value = {"zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 0}}
        return Document(value, NONE, preset=NONE)
    preset = preset_name(choice)
    if preset:
        return _of_preset(preset)
    if choice.endswith(YAML):
        return _yaml(Path(choice))
    if choice.endswith(".json") or "/" in choice or os.path.exists(choice):  # noqa: PTH110 (no error for a long name)
        return read(Path(choice))
    raise _unknown_preset(choice, where)


def _of_preset(name: str) -> Document:
    """Return a preset; one of the user's own catalog is a file of the user's, and a run keeps its values."""
    file, shadowing = catalog.part_file(PRESETS, name), catalog.shadowing(PRESETS, name)
    if file.is_ours:
        return Document(read(file.path).value, f"preset {name}", preset=name)
    notes = (DeepSpeedConfigError(shadowing.rstrip(".")),) if shadowing else ()
    return replace(read(Path(file.shown)), notes=notes)


def _of_dict(value: dict[str, Any], where: str, sources: Mapping[Keys, Place]) -> Document:
    below = Document.of({}, where, {keys: Origin(place) for keys, place in sources.items()})
    if BASE not in value:
        return replace(below, value=value)
    base, at = value.pop(BASE), str(sources.get((BASE,), where))
    if not isinstance(base, str) or base == AUTO:
        fix = "Use a preset, 'none', or a file; --ds changes values of 'auto'."
        raise DeepSpeedConfigError(f"base = {base!r} is not a config that can be changed", where=at, fix=fix)
    changed = overlay.laid(open_config(base, at), [Layer(value, below.place)])
    return replace(changed, name=where, preset=None)


def _yaml(path: Path) -> Document:
    from tuner.recipes import yaml_text  # 10 ms, for other tools' files alone
    from tuner.zero import accelerate, roll

    name = str(path)
    fix = "Use a preset, a DeepSpeed JSON, an accelerate config, or a ROLL preset."
    found = yaml_text.read(path, error=DeepSpeedConfigError, fix=fix)
    if found.values.keys() & set(accelerate.MARKS):
        return _of_accelerate(accelerate.read(found, name), path)
    if 2 * len(found.values.keys() & {*schema()["keys"]}) > len(found.values):  # DeepSpeed's own keys, in YAML
        sources: dict[Keys, Origin] = {keys: Origin(Place(Kind.FILE, name, line)) for keys, line in found.lines.items()}
        return Document(found.values, name, sources=sources)
    return roll.read(found, path, name)


def _of_accelerate(said: Said, path: Path) -> Document:
    from tuner.zero.accelerate import DTYPE

    # accelerate looks for the file from where it is called; a config is often written to be called beside it.
    beside = path.parent / said.base
    base = said.base if preset_name(said.base) or said.base == NONE or is_file(Path(said.base)) else str(beside)
    document = open_config(base, str(path))
    if document.preset is None:
        _refuse_contradictions(said, document)
    laid = overlay.laid(document, said.layers)
    sources = {**laid.sources, (DTYPE,): Origin(said.dtype_place)}
    return replace(
        laid, name=str(path), preset=None, sources=sources, launch=said.launch, dtype=said.dtype, notes=said.notes
    )


def _refuse_contradictions(said: Said, document: Document) -> None:
    """Refuse keys that say other than the file of `deepspeed_config_file`, as accelerate does."""
    for layer in said.layers:
        for key, value in leaves(layer.values):
            keys = tuple(key.split("."))
            if (there := lookup(document.value, keys, AUTO)) not in (AUTO, value):
                what = f"{key} = {value!r} here, and {there!r} in {document.where(keys)}"
                raise DeepSpeedConfigError(what, where=layer.place(keys), fix="Keep one of the two.")


def _unknown_preset(choice: str, where: str) -> DeepSpeedConfigError:
    if choice in catalog.names("recipes") or catalog.suggest(choice) == choice:
        fix = f"{choice!r} is a recipe. Use: tuner train {choice} --deepspeed PRESET."
        return DeepSpeedConfigError(f"no preset {choice!r}", where=where, fix=fix)
    known = (*catalog.presets(), *(name.removeprefix("deepspeed_") for name in catalog.presets()), AUTO, NONE)
    listed = ", ".join((*catalog.presets(), AUTO, NONE))
    fix = f"{did_you_mean(choice, known)} Known: {listed}, or a path to a JSON or YAML file.".strip()
    return DeepSpeedConfigError(f"no preset {choice!r}", where=where, fix=fix)
