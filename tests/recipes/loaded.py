"""A recipe as a command reads it."""

from __future__ import annotations

from typing import Any

from tuner.recipes import loading
from tuner.recipes.recipe import Overrides, Recipe


def loaded(name: str | None, *sets: str, **flags: Any) -> Recipe:
    """Load a recipe under flags and texts of `--set`."""
    return loading.load(name, Overrides(pairs=[("--set", text) for text in sets], **flags))
