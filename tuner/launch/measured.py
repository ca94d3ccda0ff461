"""A model that no formula describes is measured before its memory is planned: by `lab`, once for its config."""

from __future__ import annotations

from dataclasses import replace

from tuner import hooks
from tuner.fit.parameters import has_formula
from tuner.recipes.merging import Kind, Origin, Place
from tuner.recipes.recipe import Recipe


def with_measurement(recipe: Recipe) -> Recipe:
    """Return the recipe with what was measured of its model, where no formula counts it; a note or a warning says so.

    Facts that neither the catalog nor config.json has become part of the recipe.
    """
    config, known = recipe.config, recipe.config.architecture
    if config.model.path is None or (known is not None and has_formula(known)):
        return recipe
    found = hooks.measurement_of(config.model, known)
    if found.architecture is None:
        kind = f" (model_type {known.model_type!r})" if known else ""
        why = f"{config.model.path}{kind} cannot be measured on meta tensors, so its memory is not known: {found.text}"
        return replace(recipe, warnings=(*recipe.warnings, why))
    values, origins = {"architecture": found.architecture}, recipe.origins
    if known is None:
        place = Place(Kind.DERIVED, found.text)
        old = origins.get("architecture", Origin(place))
        leaves = (f"architecture.{key}" for key in found.architecture.model_dump())
        origins = {key: origin for key, origin in origins.items() if key != "architecture"}
        origins |= dict.fromkeys(leaves, old.over(place, None))
    notes = (*recipe.notes, f"{config.model.path}: {found.text}")
    return replace(recipe, config=config.with_values(values), origins=origins, notes=notes)
