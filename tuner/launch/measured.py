"""What is asked of `lab` before a run is planned: how large a model without a formula is, and whether its rows pack.

Both are found once for a model's config.
"""

from __future__ import annotations

from dataclasses import replace

from tuner import hooks
from tuner.errors import RecipeError
from tuner.fit.parameters import has_formula
from tuner.recipes.merging import Kind, Origin, Place
from tuner.recipes.recipe import Recipe
from tuner.recipes.schema.architecture import UNTRIED


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


def with_trial(recipe: Recipe) -> Recipe:
    """Return the recipe with packed rows only if its model keeps the samples of a row apart, where no test knows it.

    Raises:
        RecipeError: it may not, and the user asks for packed rows.
    """
    config = recipe.config
    if config.model.packs_with != UNTRIED:
        return recipe
    found = hooks.trial_of(config.model)
    rows, why = "padded", f"each sample is a row of its own: {found.text}"
    if found.attention:
        rows, why = "packed", f"{config.model.path} keeps the samples of a row apart: {found.text}"
    recipe = replace(recipe, notes=(*recipe.notes, f"{rows}: {why}"))
    place = Place(Kind.DERIVED, f"derived: {why}")
    recipe = recipe.settled({"model.packs_with": found.attention}, place)
    if found.attention:  # that which was tried, on any hardware
        return recipe.settled({"model.attn_implementation": found.attention}, place)
    packed = [f"{key}.dataset.packing" for key, loader in config.loaders.items() if loader.dataset.packing]
    for key in packed:
        origin = recipe.origins[key].place
        if origin.is_users:
            problem = f"{key} = True: samples of a row may see each other: {found.text}"
            raise RecipeError(problem, where=origin, fix=f"Set {key}=False, or remove it.")
    return recipe.settled(dict.fromkeys(packed, False), place)
