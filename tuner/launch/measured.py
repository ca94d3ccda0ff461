"""What is asked of `lab` before a run is planned: how large a model without a formula is, and whether its rows pack.

Both are found once for a model's config, which a start fetches from the hub; a plan says what it does not know yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tuner import hooks, paths
from tuner.errors import RecipeError
from tuner.fit.parameters import has_formula
from tuner.hub import config_file
from tuner.recipes import model_facts
from tuner.recipes.merging import Kind, Origin, Place
from tuner.recipes.recipe import Recipe
from tuner.recipes.schema import RecipeConfig
from tuner.recipes.schema.architecture import UNTRIED


def fetch_configs(recipe: Recipe) -> bool:
    """Fetch the config.json of a hub model, and of its teacher, that are not here; return whether one is here now."""
    lacking = [*_lacking(recipe.config)]
    for path, revision in lacking:
        config_file.fetch(path, revision)
    return bool(lacking) and lacking != [*_lacking(recipe.config)]


def _lacking(config: RecipeConfig) -> Iterator[tuple[str, str | None]]:
    """Yield the id and the revision of each model on the hub that has no config.json here."""
    for model in (config.model, config.objective.taught_by):
        path, revision = (model.path, model.revision) if model else (None, None)
        is_on_hub = path is not None and paths.local(path) is None and paths.is_hub_id(path)
        if path and is_on_hub and model_facts.folder_of(path, revision) is None:
            yield path, revision


def is_unknown(config: RecipeConfig) -> bool:
    """Return whether nothing is known of a hub model because its config.json is not here."""
    return config.architecture is None and any(path == config.model.path for path, _ in _lacking(config))


def download(config: RecipeConfig) -> str:
    """Return the command that brings the config.json of a hub model here."""
    at = f" --revision {config.model.revision}" if config.model.revision else ""
    return f"hf download {config.model.path} config.json{at}"


def with_warning_if_unknown(recipe: Recipe) -> Recipe:
    """Return the recipe with a warning about what no plan can know without the config.json of its model."""
    if not is_unknown(recipe.config):
        return recipe
    why = (
        f"the config.json of {recipe.config.model.path} is not here, so its model_type is not known yet: whether its "
        "samples may share a row, which layers an adapter fits, what ranks may share, and its memory. A start fetches "
        f"it first, decides then, and says so; to plan with it: {download(recipe.config)}"
    )
    return replace(recipe, warnings=(*recipe.warnings, why))


def with_measured_model(recipe: Recipe) -> Recipe:
    """Return the recipe with what was measured of its model, where no formula counts it; a note or a warning says so.

    Facts that neither the catalog nor config.json has become part of the recipe.
    """
    config, architecture = recipe.config, recipe.config.architecture
    if config.model.path is None or (architecture is not None and has_formula(architecture)) or is_unknown(config):
        return recipe
    measurement = hooks.measurement_of(config.model, architecture)
    if measurement.architecture is None:
        kind = f" (model_type {architecture.model_type!r})" if architecture else ""
        problem = "cannot be measured on meta tensors, so its memory is not known"
        why = f"{config.model.path}{kind} {problem}: {measurement.text}"
        return replace(recipe, warnings=(*recipe.warnings, why))
    values, origins = {"architecture": measurement.architecture}, recipe.origins
    if architecture is None:
        place = Place(Kind.DERIVED, measurement.text)
        old = origins.get("architecture", Origin(place))
        leaves = (f"architecture.{key}" for key in measurement.architecture.model_dump())
        origins = {key: origin for key, origin in origins.items() if key != "architecture"}
        origins |= dict.fromkeys(leaves, old.over(place, None))
    notes = (*recipe.notes, f"{config.model.path}: {measurement.text}")
    return replace(recipe, config=config.with_values(values), origins=origins, notes=notes)


def with_tried_packing(recipe: Recipe) -> Recipe:
    """Return the recipe with packed rows only if its model keeps the samples of a row apart, where no test knows it.

    Raises:
        RecipeError: it may not, and the user asks for packed rows.
    """
    config = recipe.config
    if config.model.packs_with != UNTRIED:
        return recipe
    trial = hooks.trial_of(config.model)
    rows, why = "padded", f"each sample is a row of its own: {trial.text}"
    if trial.attention:
        rows, why = "packed", f"{config.model.path} keeps the samples of a row apart: {trial.text}"
    recipe = replace(recipe, notes=(*recipe.notes, f"{rows}: {why}"))
    place = Place(Kind.DERIVED, f"derived: {why}")
    recipe = recipe.settled({"model.packs_with": trial.attention}, place)
    if trial.attention:  # that which was tried, on any hardware
        return recipe.settled({"model.attn_implementation": trial.attention}, place)
    packed = [f"{key}.dataset.packing" for key, loader in config.loaders.items() if loader.dataset.packing]
    for key in packed:
        origin = recipe.origins[key].place
        if origin.is_users:
            problem = f"{key} = True: samples of a row may see each other: {trial.text}"
            raise RecipeError(problem, where=origin, fix=f"Set {key}=False, or remove it.")
    return recipe.settled(dict.fromkeys(packed, False), place)
