"""Recipes whose split is settled as a plan's first look takes it: as little memory as can be, on one rank."""

from __future__ import annotations

from pathlib import Path

from tuner.fit.splits import possible_splits
from tuner.recipes import loading
from tuner.recipes.recipe import Overrides
from tuner.recipes.schema import RecipeConfig
from tuner.recipes.schema.architecture import Architecture


def lightest(name: str, *sets: str, data: Path | None = None) -> RecipeConfig:
    """Load a recipe with KEY=VALUE texts laid over it."""
    overrides = Overrides(data=str(data) if data else None, pairs=[("--set", text) for text in sets])
    config = loading.load(name, overrides).config
    return config.with_split(possible_splits(config, 1)[0])


def architecture_of(recipe: RecipeConfig) -> Architecture:
    """Return the facts of a recipe whose model is known."""
    assert recipe.architecture is not None
    return recipe.architecture
