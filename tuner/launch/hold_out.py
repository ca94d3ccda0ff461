"""How many rows of a user's own data are held out for validation where the recipe leaves it open (`val_split='auto'`).

It decides from the number of rows alone; `recipes.validation_rows` has said where it may, `data` chooses the rows.
"""

from __future__ import annotations

import math
from dataclasses import replace

from tuner import paths
from tuner.launch import counting
from tuner.recipes.origin import Kind, Origin, Place
from tuner.recipes.recipe import Recipe
from tuner.recipes.schema import LOADERS, RecipeConfig

SHARE = 0.05
LEAST, MOST = 8, 500
"""Rows: fewer measure hardly anything, and more only take time at every validation."""
_LARGEST_SHARE = 0.2
_DIGITS = 6
_TRAIN, _VAL = LOADERS
_SPLIT = f"{_TRAIN}.dataset.val_split"
_NONE = "--val-split 0 holds out none"


def settle(loaded: Recipe) -> Recipe:
    """Return the recipe with a number, or None, where its `val_split` is 'auto'; a note says which and why."""
    dataset = loaded.config.train_dataloader.dataset
    if dataset.val_split != "auto":
        return loaded
    folder = paths.local(dataset.path) if dataset.path else None
    if folder and folder.is_dir() and counting.has_validation(folder):
        return _on_its_split(loaded)
    rows = counting.num_rows(dataset)
    if rows is None:
        place = Place(Kind.DERIVED, "derived: 5 % of the rows, which are not counted before they are read")
        note = f"validation: 5 % of the training rows are held out ({_NONE})"
        return _with_note(_with_share(loaded, SHARE, place), note)
    wanted = min(max(LEAST, round(SHARE * rows)), MOST)
    if wanted > _LARGEST_SHARE * rows:
        if not _needs_validation(loaded.config):
            return _without(loaded, rows)
        wanted = max(1, int(_LARGEST_SHARE * rows))
    made = _with_share(loaded, _share(wanted, rows), Place(Kind.DERIVED, f"derived: about {wanted} of {rows:,} rows"))
    held = counting.num_held_out(made.config.train_dataloader.dataset) or wanted
    return _with_note(made, f"validation: {held} of the {rows:,} rows are held out ({_NONE})")


def _share(wanted: int, rows: int) -> float:
    """Return a share of few digits that holds `wanted` of the rows out: of each 1 / share rows one."""
    digits: int = 10 ** (_DIGITS + max(0, math.floor(math.log10(rows / wanted))))
    return min(math.ceil(wanted / rows * digits) / digits, 0.5)


def _needs_validation(config: RecipeConfig) -> bool:
    cfg, count = config.train_cfg, config.log.num_samples
    asked = (cfg.val_interval, cfg.early_stopping_patience, config.checkpoint.save_best, config.log.generate)
    return any(asked) or (isinstance(count, int) and count > 0)


def _with_share(loaded: Recipe, share: float, place: Place) -> Recipe:
    return loaded.settled({_SPLIT: share, f"{_VAL}.dataset.val_split": share}, place)


def _without(loaded: Recipe, rows: int) -> Recipe:
    place = Place(Kind.DERIVED, f"derived: {rows} rows are too few to hold some out")
    found = loaded.settled({_SPLIT: None, f"{_TRAIN}.dataset.val_seed": None}, place)
    origins = {key: origin for key, origin in found.origins.items() if not key.startswith(f"{_VAL}.")}
    found = replace(found, config=found.config.with_values({_VAL: None}), origins={**origins, _VAL: Origin(place)})
    some = "row is" if rows == 1 else "rows are"
    return _with_note(found, f"validation: none; {rows} {some} too few to hold some out (--val FILE, --val-split 0.2)")


def _on_its_split(loaded: Recipe) -> Recipe:
    path = loaded.config.train_dataloader.dataset.path
    place = Place(Kind.DERIVED, f"derived: {path} has a validation split")
    own = {"split": "validation", "val_split": None, "val_seed": None, "held_out": False}
    values = {_SPLIT: None, f"{_TRAIN}.dataset.val_seed": None}
    found = loaded.settled({**values, **{f"{_VAL}.dataset.{key}": value for key, value in own.items()}}, place)
    return _with_note(found, f"validation: the validation split of {path}")


def _with_note(loaded: Recipe, note: str) -> Recipe:
    return replace(loaded, notes=(*loaded.notes, f"{note}."))
