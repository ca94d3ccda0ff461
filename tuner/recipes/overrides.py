"""The changes that the command line or a caller in Python makes to a recipe, as layers in their order.

A key is named by its full path or any unique tail; a value gets the type of the schema's field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from tuner import paths, remote_code
from tuner.errors import Option, RecipeError, brief_repr, did_you_mean, options
from tuner.files import JsonObject
from tuner.hooks import other_tools
from tuner.recipes import catalog, data_sets, starting_weights
from tuner.recipes.merging import Keys, Kind, Layer, Merged, Place, lookup, nested
from tuner.recipes.recipe import Overrides, layer_of
from tuner.recipes.recipe_file import read_part, read_value
from tuner.recipes.schema import LOADERS, RecipeConfig, one_data_set, schema_keys

_NOTHING = {"none", "null"}
_TRUTHS = {"true": True, "false": False}
_SPECIALS = {"nan", "inf", "+inf", "-inf", "infinity", "-infinity"}


def parse_override(text: str, flag: str, present: Mapping[str, object]) -> tuple[Keys, object]:
    """Return the keys and the value of one `KEY=VALUE`; `hooks` translates another tool's word.

    Args:
        text: What the user typed.
        flag: The flag before it, for messages.
        present: The recipe so far; a tail is unique when one key of this recipe ends in it.

    Raises:
        RecipeError: no `=`, an unknown or ambiguous key, another tool's key that tuner lacks, or a wrong value.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise RecipeError(f"{text!r} has no '='", where=flag, fix=f"Use {flag} KEY=VALUE.")
    return read_pair(key, value, f"{flag} {text}", present)


def read_pair(key: str, value: str, where: str, present: Mapping[str, object]) -> tuple[Keys, object]:
    """Return the keys and the value of a key and a value as texts.

    Args:
        where: The place of both, for messages.
        present: As for `parse_override`.

    Raises:
        RecipeError: as `parse_override`.
    """
    key, value = _translated(key.strip(), value, where)
    keys, annotation = _find(key, where, present)
    return keys, _convert(value, annotation, where)


def find_key(key: str, where: str, present: Mapping[str, object]) -> Keys:
    """Return the full path of a recipe's key, given by its full path or any unique tail.

    Raises:
        RecipeError: an unknown or ambiguous key.
    """
    return _find(_own_key(key), where, present)[0]


def _own_key(key: str) -> str:
    """Return a recipe's key as it is, and any other one without the block in which another tool keeps it."""
    return key if tuple(key.split(".")) in schema_keys() else other_tools().bare(key)


def _translated(key: str, value: str, where: str) -> tuple[str, str]:
    meaning = other_tools().meaning(key, value)
    if meaning is None or meaning.flag:
        return _own_key(key), value
    if meaning.key is None:
        raise RecipeError(f"tuner has no {key!r}", where=where, fix=meaning.instead)
    if meaning.value is None:
        raise RecipeError(f"{key} = {value.strip()!r} has no counterpart", where=where, fix=meaning.instead)
    return meaning.key, meaning.value


def _find(key: str, where: str, present: Mapping[str, object]) -> tuple[Keys, object]:
    known = schema_keys()
    wanted = tuple(key.split("."))
    if wanted in known:
        return wanted, known[wanted]
    matches = [keys for keys in known if keys[-len(wanted) :] == wanted]
    candidates = [keys for keys in matches if lookup(present, keys, ...) is not ...]
    if not candidates:  # no block of them is there: the outermost is the one that people mean
        candidates = [keys for keys in matches if len(keys) == min(map(len, matches))]
    if len(candidates) == 1:
        return candidates[0], known[candidates[0]]
    if candidates:
        dotted = [".".join(keys) for keys in candidates]
        raise RecipeError(f"{key!r} could be {' or '.join(dotted)}", where=where, fix="Use a longer part of the key.")
    if inside := _inside(wanted, where, present):
        return inside
    # A wrong setting is not compared with the architecture's keys: `lora_rank` would match only `q_lora_rank`.
    settings = [keys for keys in known if keys[0] != "architecture" or key.startswith("architecture")]
    tails = [".".join(keys[start:]) for keys in settings for start in range(len(keys))]
    hint = did_you_mean(key, [*tails, *other_tools().known_words()])
    hint = hint or f"Known top-level keys: {', '.join(RecipeConfig.model_fields)}."
    raise RecipeError(f"no key {key!r}", where=where, fix=f"{hint} See: tuner show NAME")


def _inside(wanted: Keys, where: str, present: Mapping[str, object]) -> tuple[Keys, object] | None:
    """Return a new key of a mapping with free keys (`dataset.columns`), and the type of its values."""
    *outer, name = wanted
    mappings = [keys for keys, annotation in schema_keys().items() if _values_of(annotation)]
    if not outer or not any(keys[-len(outer) :] == tuple(outer) for keys in mappings):
        return None
    keys, annotation = _find(".".join(outer), where, present)
    return (*keys, name), _values_of(annotation)


def _values_of(annotation: object) -> object:
    """Return the type of a dict's values if an annotation allows a dict; otherwise None."""
    dicts = (option for option in (annotation, *get_args(annotation)) if get_origin(option) is dict)
    return next((get_args(option)[1] for option in dicts), None)


def _convert(text: str, annotation: object, where: str) -> object:
    """Return the first reading of a text that has the type of a key; if none has, one that the schema refuses."""
    plain = text.strip()
    word, data = plain.lower(), _data(plain, where)
    words = [name for part in plain.strip("[]").split(",") if (name := part.strip(" '\""))]
    is_list = plain[:1] + plain[-1:] == "[]"  # the shell removes the quotes of ['q_proj', 'v_proj']
    readings = [
        *([None] if word in _NOTHING else []),
        *([_TRUTHS[word]] if word in _TRUTHS else []),
        *([] if isinstance(data, str) else [data]),
        *([words] if is_list else []),
        *(text, plain, plain.strip("'\""), words),
    ]
    for reading in readings:
        if _fits(reading, annotation):
            return reading
    if word in _SPECIALS:
        raise RecipeError(f"{plain!r} is not a finite number", where=where, fix="Use a number such as 2e-4.")
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    kinds = {get_origin(option) for option in options if option is not type(None)}
    if Literal in kinds and kinds <= {Literal, list, tuple}:
        return data if isinstance(data, list | tuple) else plain
    return words if words and kinds & {list, tuple} and isinstance(data, str) else data


def _fits(value: object, annotation: Any) -> bool:
    """Return whether a value has a type, where a list may stand for a tuple."""
    for shape in (value, tuple(value)) if isinstance(value, list) else (value,):
        with suppress(ValidationError):
            TypeAdapter(annotation).validate_python(shape, strict=True)
            return True
    return False


def _data(text: str, where: str) -> object:
    try:
        return read_value(text, where)
    except RecipeError:
        return text


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
"""Options that set one key of a recipe."""
_FREE_SPLIT = {"train_dataloader": {"batch_size": "auto"}, "optim_wrapper": {"accumulative_counts": "auto"}}
_FlagLayer = Callable[[Place, Any, Merged], Layer]
"""The function that makes the layer of a flag's value; each takes the type of its flag's value."""
PYTHON = "override"
"""The word before a key in messages about a call in Python, in place of a flag."""


def layers_of_overrides(overrides: Overrides, merged: Merged, *, has_recipe: bool) -> Iterator[Layer]:
    """Yield the layers of all overrides; the caller lays each over `merged` before it asks for the next.

    Raises:
        RecipeError: one of them has no meaning.
    """
    if overrides.model is not None or overrides.adapter is not None:
        yield from _start_layers(overrides, merged, has_recipe=has_recipe)
    for argument, value, layer in _options(overrides):
        if value is not None:
            values = value if isinstance(value, tuple) else (value,)
            yield layer(Place(Kind.FLAG, options(*(Option(argument, text) for text in values))), value, merged)
    for key, text in overrides.values.items():
        yield from _value_layers(key, text, merged, has_recipe=has_recipe)
    for flag, text in overrides.pairs:
        yield from _pair_layers(flag, text, merged, has_recipe=has_recipe)


def _value_layers(key: str, value: object, merged: Merged, *, has_recipe: bool) -> Iterator[Layer]:
    """Yield the layers of one key and value of a call in Python; `lora_rank` means --lora-rank."""
    flag, where = f"--{key.replace('_', '-')}", f"{PYTHON} {key}={brief_repr(value)}"
    if flag in KEY_FLAGS:
        yield from _flag_layers(flag, value, where, merged)
        return
    if not isinstance(value, dict) and other_tools().meaning(key, str(value)):
        # The table of other tools' words is for texts.
        yield from _pair_layers(PYTHON, f"{key}={value}", merged, has_recipe=has_recipe)
        return
    yield from _key_layers(find_key(key, where, merged.values), value, Place(Kind.FLAG, where), merged)


def _pair_layers(flag: str, text: str, merged: Merged, *, has_recipe: bool) -> Iterator[Layer]:
    """Yield the layers of one KEY=VALUE, perhaps with another tool's key, or of an option for one key."""
    if flag == remote_code.FLAG:
        yield Layer.at(Place(Kind.FLAG, flag), nested(tuple(remote_code.KEY.split(".")), True))
        return
    if flag in KEY_FLAGS:
        yield from _flag_layers(flag, text, f"{flag} {text}", merged)
        return
    key, _, value = text.partition("=")
    place, meaning = Place(Kind.FLAG, f"{flag} {text}"), other_tools().meaning(key.strip(), value)
    if meaning and meaning.flag:
        meant = Overrides(model=value) if meaning.flag == "--model" else Overrides(data=value)
        for layer in layers_of_overrides(meant, merged, has_recipe=has_recipe):
            # Facts of a catalog's part keep their place; the user's own value has the place of its flag.
            is_typed = layer.place(()).kind is Kind.FLAG
            yield Layer.at(place, layer.values) if is_typed else layer
        return
    yield from _key_layers(*parse_override(text, flag, merged.values), place, merged)


def _flag_layers(flag: str, value: object, where: str, merged: Merged) -> Iterator[Layer]:
    """Yield the layers of an option for one key."""
    place, key = Place(Kind.FLAG, where), KEY_FLAGS[flag]
    if flag == _BATCH_SIZE:  # then the split of a step is chosen again
        yield Layer.at(place, _FREE_SPLIT)
    if isinstance(value, str):  # several trackers may be one text
        yield from _key_layers(*read_pair(key, value, where, merged.values), place, merged)
    else:
        yield from _key_layers(find_key(key, where, merged.values), value, place, merged)


def _key_layers(keys: Keys, value: object, place: Place, merged: Merged) -> Iterator[Layer]:
    """Yield the layer of one value at its keys, after a validation block if the key needs one."""
    if keys[0] == _VAL and len(keys) > 1 and merged.values[_VAL] is None:
        yield data_sets.validation_layer(place, merged)
    # A mapping may be None until it gets its first key: dataset.columns.
    _refuse_below_none(keys if keys in schema_keys() else keys[:-1], merged.values, place.name)
    yield Layer.at(place, nested(keys, value))


def _options(overrides: Overrides) -> tuple[tuple[str, object, _FlagLayer], ...]:
    """Return each option with a value of its own: its name, the value or None, and the function of its layer."""
    return (
        ("data", overrides.data_sets or None, _of_data),
        ("val", overrides.val, data_sets.validation_of_file),
        ("val_split", overrides.val_split, _at(lambda part: {_TRAIN: {"dataset": {"val_split": part or None}}})),
        ("epochs", overrides.epochs, _at(_of_epochs)),
        ("rewards", tuple(overrides.rewards) or None, _at(lambda names: {"objective": {"rewards": [*names]}})),
        ("seed", overrides.seed, _at(lambda seed: {"randomness": {"seed": seed}})),
    )


def _of_data(place: Place, texts: Sequence[str], _: Merged) -> Layer:
    """Return the layer of one data set, or of a mixture of several."""
    shares = [share for text in texts for share in data_sets.data_sets_of(text)]
    is_one = len(shares) == 1 and "weight" not in shares[0]
    dataset = one_data_set(shares[0]["path"] if is_one else None)
    if not is_one:
        dataset["mixture"] = shares
    return Layer.at(place, {_TRAIN: {"dataset": dataset}, _VAL: None})


def _of_epochs(count: float) -> JsonObject:
    return {"train_cfg": {"max_epochs": int(count) if count == int(count) else count, "max_steps": None}}


def _at(values: Callable[[Any], JsonObject]) -> _FlagLayer:
    return lambda place, value, _: Layer.at(place, values(value))


def _start_layers(overrides: Overrides, merged: Merged, *, has_recipe: bool) -> Iterator[Layer]:
    """Yield the model of --model or --adapter, with its catalog part's facts, and the adapter on it."""
    argument, text = ("adapter", overrides.adapter) if overrides.model is None else ("model", overrides.model)
    assert text is not None
    start = starting_weights.find(text, Option(argument))
    if overrides.model is not None and overrides.adapter is not None and start.adapter:
        fix = f"Give its base with {Option('model')}."
        raise RecipeError(f"{text!r} is an adapter itself", where=Option("adapter"), fix=fix)
    place = Place(Kind.FLAG, Option(argument, text))
    # A recipe keeps its model for an adapter if both name hub ids, which `starting_weights` compares.
    path = merged.get(("model", "path"))
    is_kept = has_recipe and isinstance(path, str) and not (paths.local(path) or paths.local(start.path))
    if overrides.model is not None or not is_kept:
        of_part: JsonObject = {}
        if part := catalog.part_named(start.path):
            model_part = read_part("models", part)
            of_part = dict(model_part.values.get("model", {}))
            other_values = {key: value for key, value in model_part.values.items() if key != "model"}
            warning = catalog.shadowing("models", part) or catalog.shadowing_path(start.path)
            yield layer_of(model_part._replace(values=other_values))._replace(warning=warning)
        values = {"revision": None, "remote_code": False} | of_part | {"path": start.path}
        values["trust_remote_code"] = False  # only what is typed grants it, and these values count as typed
        values |= {"revision": start.revision} if start.revision else {}
        values.pop("chat_template", None)  # `template` judges it
        yield Layer.at(place, {"model": values})
    adapter = overrides.adapter if overrides.adapter is not None else start.adapter
    if adapter is None:
        return
    if overrides.adapter is not None:
        place = Place(Kind.FLAG, Option("adapter", adapter))
    if merged.values.get("adapter") is None:
        message = f"{adapter!r} is an adapter, and this recipe trains every weight"
        fix = f"Merge it first: tuner export {adapter} DEST --merge, then {Option('model', 'DEST')}."
        raise RecipeError(message, where=place, fix=fix)
    yield Layer.at(place, {"adapter": {"path": starting_weights.result_of(adapter) or adapter}})


def _refuse_below_none(keys: Keys, values: object, where: str) -> None:
    for end in range(1, len(keys)):
        if lookup(values, keys[:end], ...) is None:  # a block of defaults need not be there
            block = ".".join(keys[:end])
            message = f"{block} is None in this recipe, so {'.'.join(keys)} has no effect"
            raise RecipeError(message, where=where, fix=f"Use a method that has one, or set {block} as a whole.")
