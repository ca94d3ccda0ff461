"""What the command line or a caller changes of a recipe, or makes of a model without one: layers, in their order.

It merges nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tuner import paths
from tuner.errors import RecipeError, brief_repr
from tuner.recipes import aliases, catalog, mixture, starting_weights, validation_rows
from tuner.recipes.aliases import key_hint
from tuner.recipes.merging import Layer, Merged, lookup, nested
from tuner.recipes.origin import Keys, Kind, Place
from tuner.recipes.overrides import find_key, parse_override, read_pair
from tuner.recipes.part import read_part
from tuner.recipes.recipe import Overrides
from tuner.recipes.recipe_file import RecipeFile
from tuner.recipes.schema import LOADERS, RecipeConfig, one_data_set, schema_keys

_TRAIN, _VAL = LOADERS
_BATCH_SIZE = "--batch-size"
KEY_FLAGS = {
    "--lr": "optim_wrapper.optimizer.lr",
    _BATCH_SIZE: "train_cfg.global_batch_size",
    "--max-steps": "train_cfg.max_steps",
    "--max-length": "train_dataloader.dataset.max_length",
    "--lora-rank": "adapter.r",
    "--save-every": "checkpoint.interval",
    "--eval-every": "train_cfg.val_interval",
    "--report-to": "log.trackers",
    "--push": "checkpoint.repository",
}
"""The options that set one key of a recipe each."""
_FREE_SPLIT = {"train_dataloader": {"batch_size": "auto"}, "optim_wrapper": {"accumulative_counts": "auto"}}
PYTHON = "override"
"""What stands before a key in a message where a flag would: the call was Python's."""


def layer_of(source: RecipeFile) -> Layer:
    """Return a file's values as a layer; its helpers are left out.

    Raises:
        RecipeError: a key that no recipe has.
    """
    known = set(RecipeConfig.model_fields)
    values: dict[str, Any] = {}
    for key, value in source.values.items():
        if key in known:
            values[key] = value
        elif key not in source.helpers and key != "_base_":
            raise RecipeError(f"no key {key!r}", where=source.where((key,)), fix=key_hint(key, sorted(known)))
    return Layer(values, source.place)


def layers(overrides: Overrides, merged: Merged, name: str | None) -> Iterator[Layer]:
    """Yield the layers of all overrides; each is laid over `merged` before the next is asked for.

    Raises:
        RecipeError: one of them means nothing.
    """
    if overrides.model is not None or overrides.adapter is not None:
        yield from _start_layers(overrides, merged, name)
    for flag, given, layer in _flags(overrides):
        if given is not None:
            values = given if isinstance(given, tuple) else (given,)
            yield layer(Place(Kind.FLAG, " ".join(f"{flag} {value}" for value in values)), given, merged)
    for key, value in overrides.values.items():
        yield from _value_layers(key, value, merged, name)
    for flag, text in overrides.pairs:
        yield from _pair_layers(flag, text, merged, name)


def _value_layers(key: str, value: Any, merged: Merged, name: str | None) -> Iterator[Layer]:
    """Yield the layers of one key and its value, as a caller in Python writes them; `lora_rank` means --lora-rank."""
    flag = f"--{key.replace('_', '-')}"
    if flag in KEY_FLAGS:
        place = Place(Kind.FLAG, f"{PYTHON} {key}={brief_repr(value)}")
        if flag == _BATCH_SIZE:
            yield Layer.at(place, _FREE_SPLIT)
        if isinstance(value, str):  # several trackers may be one text
            keys, value = read_pair(KEY_FLAGS[flag], value, place.name, merged.values)
        else:
            keys = find_key(KEY_FLAGS[flag], place.name, merged.values)
        yield from _key_layers(keys, value, place, merged)
        return
    if not isinstance(value, dict) and aliases.find(key, str(value)):
        yield from _pair_layers(PYTHON, f"{key}={value}", merged, name)  # the table of other tools' words holds texts
        return
    where = f"{PYTHON} {key}={brief_repr(value)}"
    yield from _key_layers(find_key(key, where, merged.values), value, Place(Kind.FLAG, where), merged)


def _pair_layers(flag: str, text: str, merged: Merged, name: str | None) -> Iterator[Layer]:
    """Yield the layers of one KEY=VALUE, whose key may be another tool's word, or of an option for one key."""
    if flag in KEY_FLAGS:
        where, place = f"{flag} {text}", Place(Kind.FLAG, f"{flag} {text}")
        if flag == _BATCH_SIZE:  # how a rank computes its share of it is open then
            yield Layer.at(place, _FREE_SPLIT)
        yield from _key_layers(*read_pair(KEY_FLAGS[flag], text, where, merged.values), place, merged)
        return
    key, _, given = text.partition("=")
    place, alias = Place(Kind.FLAG, f"{flag} {text}"), aliases.find(key.strip(), given)
    if alias and alias.flag:
        meant = Overrides(model=given) if alias.flag == "--model" else Overrides(data=given)
        for layer in layers(meant, merged, name):
            # Facts of a catalog's part stand where they are written, the user's own word where it was typed.
            is_typed = layer.place(()).kind is Kind.FLAG
            yield Layer.at(place, layer.values) if is_typed else layer
        return
    keys, value = parse_override(text, flag, merged.values)
    yield from _key_layers(keys, value, place, merged)


def _key_layers(keys: Keys, value: Any, place: Place, merged: Merged) -> Iterator[Layer]:
    """Yield the layer of one value at its keys, below one of the validation data where there is none yet."""
    if keys[0] == _VAL and len(keys) > 1 and merged.values[_VAL] is None:
        yield validation_rows.followed(place, merged)
    # A mapping may be None until it gets its first key: dataset.columns.
    _refuse_below_none(keys if keys in schema_keys() else keys[:-1], merged.values, place.name)
    yield Layer.at(place, nested(keys, value))


def _flags(overrides: Overrides) -> tuple[tuple[str, Any, Callable[[Place, Any, Merged], Layer]], ...]:
    """Return each flag of one value, its value or None, and the layer that it means."""
    return (
        ("--data", overrides.data_sets or None, _of_data),
        ("--val", overrides.val, validation_rows.of_file),
        ("--val-split", overrides.val_split, _at(lambda part: {_TRAIN: {"dataset": {"val_split": part or None}}})),
        ("--epochs", overrides.epochs, _at(_of_epochs)),
        ("--seed", overrides.seed, _at(lambda seed: {"randomness": {"seed": seed}})),
    )


def _of_data(place: Place, given: Sequence[str], _: Merged) -> Layer:
    """Return the layer of one data set, or of a mixture of several."""
    shares = [share for text in given for share in mixture.of_text(text)]
    is_one = len(shares) == 1 and "weight" not in shares[0]
    dataset = one_data_set(shares[0]["path"] if is_one else None)
    if not is_one:
        dataset["mixture"] = shares
    return Layer.at(place, {_TRAIN: {"dataset": dataset}, _VAL: None})


def _of_epochs(count: float) -> dict[str, Any]:
    return {"train_cfg": {"max_epochs": int(count) if count == int(count) else count, "max_steps": None}}


def _at(values: Callable[[Any], dict[str, Any]]) -> Callable[[Place, Any, Merged], Layer]:
    return lambda place, given, _: Layer.at(place, values(given))


def _start_layers(overrides: Overrides, merged: Merged, name: str | None) -> Iterator[Layer]:
    """Yield the model that --model or --adapter means, with its catalog part's facts, and the adapter on it."""
    flag, text = ("--adapter", overrides.adapter) if overrides.model is None else ("--model", overrides.model)
    assert text is not None
    start = starting_weights.find(text, flag)
    if overrides.model is not None and overrides.adapter is not None and start.adapter:
        raise RecipeError(f"{text!r} is an adapter itself", where="--adapter", fix="Give its base with --model.")
    place = Place(Kind.FLAG, f"{flag} {text}")
    if flag == "--model" or not _is_same_model(merged, start.path, name):
        of_part: dict[str, Any] = {}
        if part := catalog.part_named(start.path):
            source = read_part("models", part)
            of_part = dict(source.values.get("model", {}))
            if source.kind is not Kind.PACKAGE:
                # Only where the recipe's name names the part itself does its code run: not for any part of this path.
                of_part.pop("trust_remote_code", None)
            rest = {key: value for key, value in source.values.items() if key != "model"}
            yield layer_of(source._replace(values=rest))
        values = {"revision": None, "remote_code": False} | of_part | {"path": start.path}
        values |= {"revision": start.revision} if start.revision else {}
        values.pop("chat_template", None)  # `template` judges it
        yield Layer.at(place, {"model": values})
    adapter = overrides.adapter if overrides.adapter is not None else start.adapter
    if adapter is not None:
        yield _adapter_layer(adapter, place if overrides.adapter is None else None, merged)


def _is_same_model(merged: Merged, base: str, name: str | None) -> bool:
    """Return whether a recipe's model can stand for an adapter's base by name; `starting_weights` judges hub ids."""
    path = merged.get(("model", "path"))
    both_on_hub = isinstance(path, str) and not (paths.local(path) or paths.local(base))
    return name is not None and both_on_hub


def _adapter_layer(adapter: str, place: Place | None, merged: Merged) -> Layer:
    place = place or Place(Kind.FLAG, f"--adapter {adapter}")
    folder = starting_weights.result_of(adapter) or adapter
    if merged.values.get("adapter") is None:
        what = f"{adapter!r} is an adapter, and this recipe trains every weight"
        fix = f"Merge it first: tuner export {adapter} DEST --merge, then --model DEST."
        raise RecipeError(what, where=place, fix=fix)
    return Layer.at(place, {"adapter": {"path": folder}})


def _refuse_below_none(keys: Keys, values: Any, where: str) -> None:
    for end in range(1, len(keys)):
        if lookup(values, keys[:end]) is None:
            block = ".".join(keys[:end])
            what = f"{block} is None in this recipe, so {'.'.join(keys)} has no effect"
            raise RecipeError(what, where=where, fix=f"Use a method that has one, or set {block} as a whole.")
