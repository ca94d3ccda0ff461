"""Where validation rows come from: a file of their own, or a part of the training rows that training leaves out.

It changes merged values only; which rows are held out is `data`'s to say.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from tuner.errors import RecipeError
from tuner.recipes.merging import Layer, Merged, nested
from tuner.recipes.origin import Kind, Place
from tuner.recipes.schema import LOADERS

_TRAIN, _VAL = LOADERS
_SPLIT = (_TRAIN, "dataset", "val_split")
_KEY = ".".join(_SPLIT)


def block(merged: Merged) -> dict[str, Any]:
    """Return a block like the training data's for other rows: one data set, whose path is still to be said."""
    loader = deepcopy(merged.values[_TRAIN])
    no_split = {"val_split": None, "val_seed": None, "held_out": False}
    given = {"path": None, "split": "train", "mixture": None, "max_rows": None, "streaming": False, **no_split}
    return {**loader, "dataset": {**loader["dataset"], **given}}


def of_file(path: str, merged: Merged) -> dict[str, Any]:
    """Return the values that make the rows at `path` the validation's, read as the recipe reads its training rows."""
    dataset = block(merged)["dataset"] | {"path": path}
    loader = merged.values.get(_VAL) or block(merged)
    return {_TRAIN: {"dataset": {"val_split": None}}, _VAL: {"_delete_": True, **loader, "dataset": dataset}}


def settle(merged: Merged) -> None:
    """Make of `val_split` a validation on the rows that it holds out; of it and a `val_dataloader` the later counts.

    Raises:
        RecipeError: it stands in val_dataloader.
    """
    train, val = merged.get((_TRAIN,)), merged.get((_VAL,))
    holds = bool(merged.get((_VAL, "dataset", "held_out")))
    if merged.get((_VAL, "dataset", "val_split")) and not holds:
        what = f"{_VAL}.dataset.val_split has no effect"
        raise RecipeError(what, where=merged.place_of((_VAL, "dataset", "val_split")), fix=f"Set {_KEY} instead.")
    if not isinstance(merged.get(_SPLIT), float):
        return  # none, or for the schema to refuse
    if val is not None and not holds and merged.order_of((_VAL,)) > merged.order_of(_SPLIT):
        merged.lay(Layer.at(merged.place_of((_VAL,)), nested(_SPLIT, None)))
        return
    seed = train["dataset"].get("val_seed")
    seed = merged.values["randomness"]["seed"] if seed is None else seed
    dataset = {**deepcopy(train["dataset"]), "val_seed": seed, "held_out": True}
    loader = {**deepcopy(train), "dataset": dataset}
    if holds:  # a run's own recipe, perhaps with another part or other data
        own = {key: val["dataset"][key] for key in ("max_length", "packing") if key in val["dataset"]}
        loader = {**val, "dataset": dataset | own}
    values = {_TRAIN: {"dataset": {"val_seed": seed}}, _VAL: {"_delete_": True, **loader}}
    merged.lay(Layer.at(Place(Kind.DERIVED, f"derived: {_KEY}"), values))


def told(values: dict[str, Any]) -> str | None:
    """Return in a line what is held out, or None."""
    dataset = values[_TRAIN]["dataset"]
    if not dataset["val_split"]:
        return None
    return f"validation: {dataset['val_split']:g} of the training rows are held out, by seed {dataset['val_seed']}"
