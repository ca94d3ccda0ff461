"""What other tools' words mean here: all that a reader of recipes asks this room, as `hooks.OtherTools` lists it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from tuner.assets import CONFIGS
from tuner.files import read_text
from tuner.hooks import Meaning
from tuner.importers import aliases
from tuner.importers.aliases import bare as bare
from tuner.importers.aliases import instead_of_objective as instead_of_objective
from tuner.importers.aliases import key_hint as key_hint
from tuner.importers.marks import num_marks as num_marks
from tuner.importers.marks import owner_of_python as owner_of_python
from tuner.importers.marks import owners as owners
from tuner.importers.xtuner_names import readings as readings
from tuner.importers.xtuner_names import refusal_of_name as refusal_of_name


def meaning(key: str, value: str) -> Meaning | None:
    """Return what a key and its value are here; None for a recipe's own key and for an unknown word."""
    alias = aliases.find(key, value)
    return alias and Meaning(alias.key, alias.value(value), alias.flag, alias.instead)


def known_words() -> Collection[str]:
    """Return the words that `meaning` knows."""
    return aliases.table().keys()


def has_recipe(name: str) -> bool:
    """Return whether XTuner has a recipe of exactly this name, which keeps XTuner's defaults."""
    return name in read_text(CONFIGS / "xtuner_recipes.txt").split()


def defaults() -> Path:
    """Return the file of XTuner's defaults; they are laid over the base."""
    return CONFIGS / "xtuner.py"
