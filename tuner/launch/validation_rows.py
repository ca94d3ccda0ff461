"""How many of the training rows are held out for validation, where `val_split` is 'auto'.

`recipes.data_sets` decides where rows may be held out, and `data.holdout` which ones.
"""

from __future__ import annotations

import math
from dataclasses import replace

from tuner import paths
from tuner.errors import Option
from tuner.launch import row_counts
from tuner.recipes.merging import Kind, Origin, Place
from tuner.recipes.recipe import Recipe
from tuner.recipes.schema import LOADERS, RecipeConfig

HELD_OUT = 0.05
LEAST, MOST = 8, 500
"""Rows: fewer measure almost nothing, and more only cost time at every validation."""
_LARGEST_SHARE = 0.2
_DIGITS = 6
_TRAIN, _VAL = LOADERS
_SPLIT = f"{_TRAIN}.dataset.val_split"
_NO_SPLIT = {_SPLIT: None, f"{_TRAIN}.dataset.val_seed": None, f"{_TRAIN}.dataset.val_copies": None}
_BEST = "checkpoint.save_best"
_NONE = f"{Option('val_split', 0)} holds out none"


def hold_out(recipe: Recipe) -> Recipe:
    """Return the recipe with a number, or None, where its `val_split` is 'auto'; a note says which and why."""
    dataset = recipe.config.train_dataloader.dataset
    if dataset.val_split != "auto":
        return recipe
    folder = paths.local(dataset.path) if dataset.path else None
    if folder and folder.is_dir() and row_counts.has_validation(folder):
        recipe = _on_its_split(recipe)
    elif (num_rows := row_counts.num_rows(dataset)) is None:
        place = Place(Kind.DERIVED, "derived: 5 % of the rows, which are not counted before they are read")
        note = f"validation: 5 % of the training rows are held out ({_NONE})"
        recipe = _with_note(_with_fraction(recipe, HELD_OUT, place), note)
    else:
        recipe = _of_counted(recipe, num_rows)
    return _with_best_weights(recipe)


def _on_its_split(recipe: Recipe) -> Recipe:
    """Return the recipe that validates on the validation split of its folder."""
    path = recipe.config.train_dataloader.dataset.path
    place = Place(Kind.DERIVED, f"derived: {path} has a validation split")
    settings = {"split": "validation", "val_split": None, "val_seed": None, "val_copies": None, "held_out": False}
    settled = recipe.settled(
        {**_NO_SPLIT, **{f"{_VAL}.dataset.{key}": value for key, value in settings.items()}}, place
    )
    return _with_note(settled, f"validation: the validation split of {path}")


def _of_counted(recipe: Recipe, num_rows: int) -> Recipe:
    """Return the recipe with the part of its counted rows that is held out; with none if they are too few."""
    dataset, objective = recipe.config.train_dataloader.dataset, recipe.config.objective.type
    rows = row_counts.read_rows(dataset, objective) if dataset.val_copies == "together" else None
    num_different = len({row.key for row in rows}) if rows else num_rows
    wanted_rows = min(max(LEAST, round(HELD_OUT * num_different)), MOST)
    if wanted_rows > _LARGEST_SHARE * num_different:
        if not _needs_validation(recipe.config):
            return _without(recipe, num_rows, num_different)
        wanted_rows = max(1, int(_LARGEST_SHARE * num_different))
    of_rows = f"{num_rows:,} rows" if num_different == num_rows else f"{num_different:,} different rows"
    place = Place(Kind.DERIVED, f"derived: about {wanted_rows} of {of_rows}")
    settled = _with_fraction(recipe, _fraction(wanted_rows, num_different), place)
    num_held_out = row_counts.num_held_out(settled.config.train_dataloader.dataset, objective) or wanted_rows
    return _with_note(settled, f"validation: {num_held_out} of the {num_rows:,} rows are held out ({_NONE})")


def _needs_validation(config: RecipeConfig) -> bool:
    cfg, count = config.train_cfg, config.log.num_samples
    uses = (cfg.val_interval, cfg.early_stopping_patience, config.checkpoint.save_best, config.log.generate)
    return any(uses) or (isinstance(count, int) and count > 0)


def _without(recipe: Recipe, num_rows: int, num_different: int) -> Recipe:
    """Return the recipe without a validation."""
    place = Place(Kind.DERIVED, f"derived: {num_different} rows are too few to hold some out")
    settled = recipe.settled(_NO_SPLIT, place)
    origins = {key: origin for key, origin in settled.origins.items() if not key.startswith(f"{_VAL}.")}
    config, origins = settled.config.with_values({_VAL: None}), {**origins, _VAL: Origin(place)}
    count_text = f"{num_different} different" if num_different != num_rows else f"{num_rows}"
    verb = "row is" if num_different == 1 else "rows are"
    instead = f"{Option('val', 'FILE')}, {Option('val_split', 0.2)}"
    note = f"validation: none; {count_text} {verb} too few to hold some out ({instead})"
    return _with_note(replace(settled, config=config, origins=origins), note)


def _fraction(wanted_rows: int, num_rows: int) -> float:
    """Return a fraction with few digits that holds out `wanted_rows` rows: one of each 1 / fraction rows."""
    digits: int = 10 ** (_DIGITS + max(0, math.floor(math.log10(num_rows / wanted_rows))))
    return min(math.ceil(wanted_rows / num_rows * digits) / digits, 0.5)


def _with_fraction(recipe: Recipe, fraction: float, place: Place) -> Recipe:
    return recipe.settled({_SPLIT: fraction, f"{_VAL}.dataset.val_split": fraction}, place)


def _with_note(recipe: Recipe, note: str) -> Recipe:
    return replace(recipe, notes=(*recipe.notes, f"{note}."))


def _with_best_weights(recipe: Recipe) -> Recipe:
    """Return the recipe of an adapter that ends with its best weights if it has a validation and the user says nothing.

    Measured by bench.epochs (docs/learning.md) on rows that chose nothing: better than the last weights, or as good.
    """
    config, is_set = recipe.config, recipe.origins[_BEST].place.kind is not Kind.PACKAGE
    if is_set or config.val_dataloader is None or config.adapter is None or config.objective.facts.generates:
        return recipe
    return recipe.settled({_BEST: "eval_loss"}, Place(Kind.DERIVED, "derived: an adapter with held-out rows"))
