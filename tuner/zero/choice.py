"""Which DeepSpeed config was chosen: a preset, a user's JSON, a dict in the recipe, or none; opened as a document.

It judges no key of it.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

from tuner.errors import DeepSpeedConfigError, did_you_mean
from tuner.recipes import catalog
from tuner.recipes.origin import Place
from tuner.recipes.recipe import Recipe
from tuner.zero.jsonfile import Document, Keys, read

NONE = "none"
AUTO = "auto"


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
    """Return the JSON that is chosen; in one that stands in the recipe, each value knows its own line.

    Raises:
        DeepSpeedConfigError: as `open_config`.
    """
    choice, where = chosen(recipe, flag)
    if isinstance(choice, dict):
        return Document.of(copy.deepcopy(choice), where, dict(_sources(recipe)))
    return open_config(choice, where)


def _sources(recipe: Recipe) -> dict[Keys, Place]:
    paths = {tuple(key.split(".")): origin.place for key, origin in recipe.origins.items()}
    return {path[1:]: place for path, place in paths.items() if path[0] == "deepspeed"}


def open_config(choice: str | dict[str, Any], where: str) -> Document:
    """Return the JSON that `--deepspeed` or the recipe chose.

    Args:
        choice: A preset's name, 'none', a path to a JSON, or a whole config as a dict.
        where: The flag or key that holds it, for messages.

    Raises:
        DeepSpeedConfigError: no such preset or file, or a file that is not strict JSON with comments.
    """
    if isinstance(choice, dict):
        return Document.of(copy.deepcopy(choice), where)
    if choice == NONE:
        value = {"zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 0}}
        return Document(value, NONE, preset=NONE)
    preset = preset_name(choice)
    if preset:
        document = read(catalog.PRESETS / f"{preset}.json")
        return Document(document.value, f"preset {preset}", preset=preset)
    if choice.endswith((".yaml", ".yml")):
        raise _yaml(choice, where)
    if choice.endswith(".json") or "/" in choice or os.path.exists(choice):  # noqa: PTH110 (no error for a long name)
        return read(Path(choice))
    raise _unknown_preset(choice, where)


def _yaml(choice: str, where: str) -> DeepSpeedConfigError:
    fix = (
        "Of an accelerate config, zero_stage is the preset (zero_stage: 3 is --deepspeed zero3, with offload devices "
        "zero3_offload), deepspeed_config_file names the JSON to give, num_processes is NPROC_PER_NODE, "
        "mixed_precision is --set dtype=..., gradient_accumulation_steps is --set accumulative_counts=..."
    )
    return DeepSpeedConfigError(f"{choice!r} is YAML; a DeepSpeed config is JSON", where=where, fix=fix)


def _unknown_preset(choice: str, where: str) -> DeepSpeedConfigError:
    if choice in catalog.names("recipes") or catalog.suggest(choice) == choice:
        fix = f"{choice!r} is a recipe. Write: tuner train {choice} --deepspeed PRESET."
        return DeepSpeedConfigError(f"no preset {choice!r}", where=where, fix=fix)
    known = (*catalog.presets(), *(name.removeprefix("deepspeed_") for name in catalog.presets()), AUTO, NONE)
    listed = ", ".join((*catalog.presets(), AUTO, NONE))
    fix = f"{did_you_mean(choice, known)} Known: {listed}, or a path to a JSON.".strip()
    return DeepSpeedConfigError(f"no preset {choice!r}", where=where, fix=fix)
