"""The data sets of a recipe: mixtures, and the rows that a run validates on.

It changes merged values only and opens no data; `data` chooses the rows that are held out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from copy import deepcopy
from typing import Any

from tuner import paths
from tuner.errors import Option, RecipeError, brief_repr, did_you_mean
from tuner.files import JsonObject
from tuner.hooks import other_tools
from tuner.recipes import catalog
from tuner.recipes.merging import Keys, Kind, Layer, Merged, Place, lookup, nested
from tuner.recipes.recipe_file import read_part
from tuner.recipes.schema import LOADERS, OF_ONE_DATA_SET, Dataloader, Dataset, MixtureEntry

_TRAIN, _VAL = LOADERS


def data_sets_of(text: str) -> list[JsonObject]:
    """Return the data sets in a value of --data: "a.jsonl", or several as in "a.jsonl,b.jsonl:0.5".

    A file or folder of that whole name is taken first, so names with commas and colons keep their meaning.
    """
    if _exists(text):
        return [{"path": text}]
    parts = [part.strip() for part in text.split(",") if part.strip()]
    return [_share(part) for part in parts] if len(parts) > 1 else [_share(text)]


def _exists(text: str) -> bool:
    local_path = paths.local(text)
    return local_path is not None and bool(paths.matching(local_path))


def _share(text: str) -> JsonObject:
    path, _, weight = text.rpartition(":")
    is_weight = path and re.fullmatch(r"\d+(\.\d*)?|\.\d+", weight) and not _exists(text)
    return {"path": path, "weight": float(weight)} if is_weight else {"path": text}


def lay_mixtures(merged: Merged) -> None:
    """Keep either the path or the mixture of each loader, and replace the names of parts in the mixture.

    Raises:
        RecipeError: a path and a mixture in one layer, an unknown part, or a part without a path.
    """
    for loader in LOADERS:
        keys = (loader, "dataset", "mixture")
        # The schema refuses anything that is not a list of dicts.
        if isinstance(merged.get(keys), list | tuple):
            dataset = merged.get(keys[:-1])
            _keep_later(merged, loader, dataset)
            if shares := dataset["mixture"]:
                where = str(merged.place_of(keys))
                dataset["mixture"] = [share for entry in shares for share in _shares(entry, where, ())]
                # Each once: a file may name one part thousands of times.
                parts = dict.fromkeys(entry["part"] for entry in shares if isinstance(entry, dict) and "part" in entry)
                merged.warnings += filter(None, (catalog.shadowing("datasets", name) for name in parts))
                _place_functions(merged, keys, parts)


def _place_functions(merged: Merged, keys: Keys, parts: Iterable[str]) -> None:
    """If a mixture names a part with a row function, set the mixture's place to that part's file.

    A user may name any function after --set; a file may not (`trust.refuse`).
    """
    dotted = ".".join(keys)
    if place := next(filter(None, map(_function_place, parts)), None):
        merged.origins[dotted] = merged.origins[dotted].over(place, [{"part": name} for name in parts])


def _function_place(name: str) -> Place | None:
    """Return the place where a data-set part, or a part of its mixture, names a row function, or None."""
    part = read_part("datasets", name)
    rows = lookup(part.values, (_TRAIN, "dataset"), {})
    shares = rows.get("mixture") or ()
    for row in (rows, *shares):
        if ":" in str(row.get("format")):
            return part.place((_TRAIN, "dataset"))
    inner = (_function_place(share["part"]) for share in shares if "part" in share)
    return next(filter(None, inner), None)


def _keep_later(merged: Merged, loader: str, dataset: JsonObject) -> None:
    block = (loader, "dataset")
    mixture = merged.order_of((*block, "mixture"))
    orders = {key: merged.order_of((*block, key)) for key in ("path", *OF_ONE_DATA_SET) if dataset.get(key)}
    if orders.get("path", 0) > mixture:
        merged.lay(Layer.at(merged.place_of((*block, "path")), nested((*block, "mixture"), None)))
        return
    for key, order in orders.items():
        if order >= mixture:
            message = f"{loader}.dataset has both a mixture and {key} = {brief_repr(dataset[key])}"
            fix = "Use one of them." if key == "path" else f"Set {key} in each entry of the mixture."
            raise RecipeError(message, where=merged.place_of((*block, key)), fix=fix)
    if orders:
        merged.lay(Layer.at(merged.place_of((*block, "mixture")), nested(block, dict.fromkeys(orders))))


def _shares(entry: object, where: str, inside: tuple[str, ...]) -> Iterator[Any]:
    """Yield an entry as it is, or the data sets of the part that it names; `inside` are the parts around it."""
    if not isinstance(entry, dict):
        yield entry
        return
    _check_keys(entry, where)
    if "part" not in entry:
        yield entry
        return
    name, settings = entry["part"], {key: value for key, value in entry.items() if key != "part"}
    rows = _rows_of(name, where, inside)
    if "mixture" not in rows:
        if not (rows | settings).get("path"):
            fix = f"Use dict(part={name!r}, path='my.jsonl')."
            raise RecipeError(f"part {name!r} has no data of its own", where=where, fix=fix)
        yield rows | settings
        return
    if other := settings.keys() - {"weight"}:
        message = f"part {name!r} is a mixture itself, so {min(other)!r} cannot be set for it"
        raise RecipeError(message, where=where, fix="Set only its weight, or list its data sets instead.")
    for part in rows["mixture"]:
        for share in _shares(part, where, (*inside, name)):
            try:
                yield {**share, "weight": share.get("weight", 1.0) * settings.get("weight", 1.0)}
            except TypeError:
                yield {**share, **settings}  # the schema refuses it


def _check_keys(entry: JsonObject, where: str) -> None:
    known = ("part", *MixtureEntry.model_fields)
    if unknown := entry.keys() - set(known):
        key = min(map(str, unknown))
        raise RecipeError(f"no key {key!r} in a mixture's entry", where=where, fix=other_tools().key_hint(key, known))
    if not entry.get("part") and not entry.get("path"):
        message = f"an entry of the mixture has no data set: {brief_repr(entry)}"
        raise RecipeError(message, where=where, fix="Use dict(part='alpaca') or dict(path='my.jsonl').")


def _rows_of(name: object, where: str, inside: tuple[str, ...]) -> JsonObject:
    known = catalog.names("datasets")
    if name not in known:
        fix = did_you_mean(str(name), known, see="tuner list --datasets")
        raise RecipeError(f"no data set {name!r} for a mixture", where=where, fix=fix)
    if name in inside:
        circle = " -> ".join((*inside, name))
        raise RecipeError(f"mixtures form a cycle: {circle}", where=where, fix="Remove one of them.")
    block = lookup(read_part("datasets", name).values, (_TRAIN, "dataset"), {})
    rows = {key: value for key, value in block.items() if key in (*MixtureEntry.model_fields, "mixture")}
    if rows.get("mixture") and rows.get("max_rows"):
        message = f"part {name!r} takes {rows['max_rows']} rows of a mixture, which one entry of a mixture cannot"
        raise RecipeError(message, where=where, fix="List its data sets instead, each with its own max_rows.")
    return rows


_SPLIT = (_TRAIN, "dataset", "val_split")
_KEY = ".".join(_SPLIT)
_SAMPLES = ("log", "num_samples")
_FIELDS: tuple[Keys, ...] = (
    *((key,) for key in Dataloader.model_fields if key != "dataset"),
    *(("dataset", key) for key in Dataset.model_fields),
)
_OF_OTHER_ROWS = {
    **{"path": None, "split": "train", "mixture": None, "max_rows": None, "streaming": False},
    **{"val_split": None, "val_seed": None, "val_copies": None, "held_out": False},
}
"""Keys that other rows do not copy from the training rows."""
OF_OWN_DATA = Layer.at(Place(Kind.DEFAULT, "default without a recipe"), nested(_SPLIT, "auto"))
"""The layer that holds out rows of the user's own data; `launch.validation_rows` decides how many."""
_FOLLOWS = Place(Kind.DERIVED, "derived: as train_dataloader")
"""The place of a validation value that is copied from the training block later, with its place."""


def validation_block(merged: Merged) -> JsonObject:
    """Return a copy of the training block for other rows: one data set, without a path yet."""
    loader = deepcopy(merged.values[_TRAIN])
    return {**loader, "dataset": {**loader["dataset"], **_OF_OTHER_ROWS}}


def validation_layer(place: Place, merged: Merged) -> Layer:
    """Return the layer of a new validation block at `place`; `lay_validation` copies the training's values to it."""
    own_keys = {_SPLIT, *((_VAL, "dataset", key) for key in _OF_OTHER_ROWS)}
    return Layer({_VAL: validation_block(merged)}, lambda keys: place if keys in own_keys else _FOLLOWS)


def validation_of_file(place: Place, path: str, merged: Merged) -> Layer:
    """Return the layer that validates on the rows at `path`, which are read like the training rows."""
    layer = validation_layer(place, merged)
    loader = layer.values[_VAL]
    loader["dataset"] |= {"_delete_": True, "path": path}
    if merged.values.get(_VAL) is not None:  # its batch_size and num_workers stay
        loader = {"dataset": loader["dataset"]}
    return layer._replace(values={_TRAIN: {"dataset": {"val_split": None}}, _VAL: loader})


def lay_validation(merged: Merged) -> None:
    """Turn `val_split` into a validation block on the held-out rows; of it and a `val_dataloader` the later one counts.

    Every other value of the validation block is copied from the final training block.

    Raises:
        RecipeError: val_split is in val_dataloader, or a flag asks for answers but there are no validation rows.
    """
    _lay_split(merged)
    _refuse_no_prompts(merged)
    for keys in _FIELDS:
        if merged.places_in((_VAL, *keys)) == {_FOLLOWS}:
            value = deepcopy(merged.get((_TRAIN, *keys)))
            value = value | {"_delete_": True} if isinstance(value, dict) else value
            merged.lay(Layer(nested((_VAL, *keys), value), lambda leaf: merged.place_of((_TRAIN, *leaf[1:]))))


def _refuse_no_prompts(merged: Merged) -> None:
    """Check that there are validation rows if a flag asks for answers to some of them."""
    count, place = merged.get(_SAMPLES), merged.place_of(_SAMPLES)
    if merged.get((_VAL,)) is None and place.kind is Kind.FLAG and isinstance(count, int) and count > 0:
        message = f"log.num_samples = {count} asks for answers to validation rows, and there are none"
        raise RecipeError(message, where=place, fix=f"Add {Option('val_split', 0.05)}, or {Option('val', 'FILE')}.")


def _lay_split(merged: Merged) -> None:
    train, val = merged.get((_TRAIN,)), merged.get((_VAL,))
    holds = bool(merged.get((_VAL, "dataset", "held_out")))
    if merged.get((_VAL, "dataset", "val_split")) and not holds:
        message = f"{_VAL}.dataset.val_split has no effect"
        raise RecipeError(message, where=merged.place_of((_VAL, "dataset", "val_split")), fix=f"Set {_KEY} instead.")
    if merged.get(_SPLIT) == "auto" and not _has_rows_to_hold_out(train["dataset"]):
        merged.lay(Layer.at(merged.place_of(_SPLIT), nested(_SPLIT, None)))
    if merged.get(_SPLIT) is None and holds:
        merged.lay(Layer.at(merged.place_of(_SPLIT), {_VAL: None}))
    if not isinstance(merged.get(_SPLIT), float) and merged.get(_SPLIT) != "auto":
        return  # no split, or a value that the schema refuses
    if val is not None and not holds and merged.order_of((_VAL,)) > merged.order_of(_SPLIT):
        merged.lay(Layer.at(merged.place_of((_VAL,)), nested(_SPLIT, None)))
        return
    seed = train["dataset"].get("val_seed")
    seed = merged.values["randomness"]["seed"] if seed is None else seed
    copies = train["dataset"].get("val_copies") or "together"
    dataset = {**deepcopy(train["dataset"]), "val_seed": seed, "val_copies": copies, "held_out": True}
    loader = {**deepcopy(train), "dataset": dataset}
    if holds:  # a run's own recipe, perhaps with another part or other data
        own_values = {key: val["dataset"][key] for key in ("max_length", "packing") if key in val["dataset"]}
        loader = {**val, "dataset": dataset | own_values}
    values = {_TRAIN: {"dataset": {"val_seed": seed, "val_copies": copies}}, _VAL: {"_delete_": True, **loader}}
    merged.lay(Layer.at(Place(Kind.DERIVED, f"derived: {_KEY}"), values))


def _has_rows_to_hold_out(dataset: JsonObject) -> bool:
    return not dataset.get("streaming") and bool(dataset.get("path") or dataset.get("mixture"))
