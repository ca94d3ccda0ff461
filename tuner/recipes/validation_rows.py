"""Where validation rows come from: a file of their own, or a part of the training rows that training leaves out.

It changes merged values only; `data` chooses the rows that are held out.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from tuner.errors import RecipeError
from tuner.recipes.merging import Layer, Merged, nested
from tuner.recipes.origin import Keys, Kind, Place
from tuner.recipes.schema import LOADERS, Dataloader, Dataset

_TRAIN, _VAL = LOADERS
_SPLIT = (_TRAIN, "dataset", "val_split")
_KEY = ".".join(_SPLIT)
_SAMPLES = ("log", "num_samples")
_FIELDS: tuple[Keys, ...] = (
    *((key,) for key in Dataloader.model_fields if key != "dataset"),
    *(("dataset", key) for key in Dataset.model_fields),
)
_OF_OTHER_ROWS = {
    **{"path": None, "split": "train", "mixture": None, "max_rows": None, "streaming": False},
    **{"val_split": None, "val_seed": None, "held_out": False},
}
"""What other rows do not take over from the training rows."""
OF_OWN_DATA = Layer.at(Place(Kind.DEFAULT, "default without a recipe"), nested(_SPLIT, "auto"))
"""The layer that has rows held out of the user's own data: how many, `launch.data_rows` decides."""
_FOLLOWS = Place(Kind.DERIVED, "derived: as train_dataloader")
"""Where a value of the validation stands that nobody wrote: it becomes the training's, with the training's place."""


def block(merged: Merged) -> dict[str, Any]:
    """Return a block like the training data's for other rows: one data set, without a path yet."""
    loader = deepcopy(merged.values[_TRAIN])
    return {**loader, "dataset": {**loader["dataset"], **_OF_OTHER_ROWS}}


def followed(place: Place, merged: Merged) -> Layer:
    """Return the layer of a new validation block, which stands at `place`; `settle` gives it the training's values."""
    return _layer(place, block(merged))


def of_file(place: Place, path: str, merged: Merged) -> Layer:
    """Return the layer that makes the rows at `path` the validation's, read as the recipe reads its training rows."""
    loader = block(merged)
    loader["dataset"] |= {"_delete_": True, "path": path}
    if merged.values.get(_VAL) is not None:  # its batch_size and num_workers stay
        loader = {"dataset": loader["dataset"]}
    layer = _layer(place, loader)
    return layer._replace(values={_TRAIN: {"dataset": {"val_split": None}}, **layer.values})


def _layer(place: Place, loader: dict[str, Any]) -> Layer:
    own = {_SPLIT, *((_VAL, "dataset", key) for key in _OF_OTHER_ROWS)}
    return Layer({_VAL: loader}, lambda keys: place if keys in own else _FOLLOWS)


def settle(merged: Merged) -> None:
    """Make of `val_split` a validation on the rows that it holds out; of it and a `val_dataloader` the later counts.

    What nobody set for validation rows is as the training rows have it in the end.

    Raises:
        RecipeError: val_split stands in val_dataloader, or a flag asks for answers to validation rows without any.
    """
    _settle_split(merged)
    _refuse_no_prompts(merged)
    for keys in _FIELDS:
        if merged.places_in((_VAL, *keys)) == {_FOLLOWS}:
            value = deepcopy(merged.get((_TRAIN, *keys)))
            value = value | {"_delete_": True} if isinstance(value, dict) else value
            merged.lay(Layer(nested((_VAL, *keys), value), lambda leaf: merged.place_of((_TRAIN, *leaf[1:]))))


def _refuse_no_prompts(merged: Merged) -> None:
    """Check that there are validation rows where a flag asks for answers to some of them."""
    count, place = merged.get(_SAMPLES), merged.place_of(_SAMPLES)
    if merged.get((_VAL,)) is None and place.kind is Kind.FLAG and isinstance(count, int) and count > 0:
        what = f"log.num_samples = {count} asks for answers to validation rows, and there are none"
        raise RecipeError(what, where=place, fix="Add --val-split 0.05, or --val FILE.")


def _settle_split(merged: Merged) -> None:
    train, val = merged.get((_TRAIN,)), merged.get((_VAL,))
    holds = bool(merged.get((_VAL, "dataset", "held_out")))
    if merged.get((_VAL, "dataset", "val_split")) and not holds:
        what = f"{_VAL}.dataset.val_split has no effect"
        raise RecipeError(what, where=merged.place_of((_VAL, "dataset", "val_split")), fix=f"Set {_KEY} instead.")
    if merged.get(_SPLIT) == "auto" and not _has_rows_to_hold_out(train["dataset"]):
        merged.lay(Layer.at(merged.place_of(_SPLIT), nested(_SPLIT, None)))
    if merged.get(_SPLIT) is None and holds:
        merged.lay(Layer.at(merged.place_of(_SPLIT), {_VAL: None}))
    if not isinstance(merged.get(_SPLIT), float) and merged.get(_SPLIT) != "auto":
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


def _has_rows_to_hold_out(dataset: dict[str, Any]) -> bool:
    return not dataset.get("streaming") and bool(dataset.get("path") or dataset.get("mixture"))


def told(values: dict[str, Any]) -> str | None:
    """Return in a line what is held out, or None."""
    dataset = values[_TRAIN]["dataset"]
    if dataset["val_split"] in (None, "auto"):
        return None
    return f"validation: {dataset['val_split']:g} of the training rows are held out, by seed {dataset['val_seed']}"
