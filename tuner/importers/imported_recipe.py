"""A translation -> a recipe: the parts of the catalog that it is built on, and the values that differ from them.

It reads the catalog and looks whether a model's folder is here; it writes nothing.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from tuner import paths
from tuner.importers.document import Keys
from tuner.importers.translation import Entry, Given, Outcome, Translation
from tuner.recipes import catalog, data_sets, model_facts
from tuner.recipes.loading import validate, with_xtuner
from tuner.recipes.merging import Kind, Layer, Merged, Place, leaves, lookup, nested
from tuner.recipes.overrides import layer_of
from tuner.recipes.recipe import read_base
from tuner.recipes.recipe_file import read_part
from tuner.recipes.schema import LOADERS

_TRAIN, _VAL = LOADERS
_EPOCHS = ("train_cfg", "max_epochs")
_CUSTOM = "custom"
_ADAPTED = ("lora", "qlora", "dora", "rslora")


@dataclass(frozen=True)
class Imported:
    """A recipe of ours, and what became of every key of its source.

    Attributes:
        base: The composed name that it builds on; None where the catalog has not the model.
        values: Nested; what the recipe says over its base.
        givens: Where each of these values stands in the source.
        notes: What gave way to the model.
        obstacle: Why the recipe learns something else than its source, if it does: nobody trains that unasked.
    """

    tool: str
    source: str
    base: str | None
    values: dict[str, Any]
    givens: dict[Keys, Given]
    entries: tuple[Entry, ...]
    notes: tuple[str, ...] = ()
    obstacle: str | None = None


def finished(t: Translation) -> Imported:
    """Return the recipe that a translation makes.

    Raises:
        RecipeError: no model is named, or a value does not fit, with its place in the source.
    """
    _settle_method(t)
    _settle_warmup(t)
    _settle_kto(t)
    part, architecture = _settle_model(t)
    dataset = _settle_datasets(t)
    t.check_all_told()
    epochs = t.values.get(_EPOCHS) or 1
    objective = t.objective
    below = Merged()
    parts = catalog.Parts(part, objective, t.method, dataset or _CUSTOM, epochs) if part else None
    base_file = read_base()
    below.lay(Layer(base_file.values, base_file.place))
    named = (("models", part), ("methods", t.method), ("objectives", objective), ("datasets", dataset))
    layers = [layer_of(read_part(kind, name)) for kind, name in named if name is not None]
    is_of_xtuner = parts is not None and catalog.is_of_xtuner(parts.name)
    for layer in with_xtuner(layers) if is_of_xtuner else layers:
        below.lay(layer)
    merged = deepcopy(below)
    # The tool's own numbers hold: no batch and no pack of our choice.
    fixed = {_TRAIN: {"dataset": {"pack_length": None}}, "train_cfg": {"global_batch_size": None}}
    merged.lay(Layer.at(Place(Kind.PACKAGE, t.document.name), fixed))
    for keys, value in t.values.items():
        merged.lay(_layer(t, keys, value))
    if architecture and t.model:
        # In the model's own layer: a path laid later would be another model's, of which nothing is known.
        merged.lay(Layer.at(Place(Kind.PACKAGE, t.model.where), {"architecture": {"_delete_": True, **architecture}}))
    else:
        model_facts.derive_architecture(merged)
    model_facts.settle_constraints(merged, model_facts.kind_of(merged))
    _settle_validation(t, merged)
    _check(merged)
    if parts:
        below.lay(Layer.at(Place(Kind.NAME, parts.name), nested(_EPOCHS, epochs)))
    values = _difference(t, merged, below if parts else _base_alone(), bool(architecture))
    entries = tuple(one for one in t.entries if not one.given.is_default or one.outcome is Outcome.CHANGED)
    notes = tuple(merged.warnings)
    name = parts.name if parts else None
    return Imported(t.tool.name, t.document.name, name, values, t.places, entries, notes, t.obstacle)


def _layer(t: Translation, keys: Keys, value: Any) -> Layer:
    given = t.places[keys]
    name, _, line = given.where.rpartition(":")
    # The package's kind: what a model does not take gives way aloud, as a value of the catalog does.
    place = Place(Kind.PACKAGE, name, int(line)) if name and line.isdigit() else Place(Kind.PACKAGE, given.where)
    return Layer.at(place, nested(keys, value))


def _check(merged: Merged) -> None:
    whole = deepcopy(merged)
    data_sets.settle_mixtures(whole)
    data_sets.settle_validation(whole)
    validate(whole)


def _settle_method(t: Translation) -> None:
    """Take the adapter's values away where there is none."""
    if t.method in _ADAPTED:
        return
    for keys in [keys for keys in t.values if keys[0] in ("adapter", "quantization")]:
        del t.values[keys], t.places[keys]
    for number, entry in enumerate(t.entries):
        if entry.ours and entry.ours.startswith(("adapter.", "quantization.")):
            why = "all weights are trained: there is no adapter"
            t.entries[number] = Entry(entry.given, Outcome.LEFT_OUT, why=why)


def _settle_warmup(t: Translation) -> None:
    """Turn steps of warm-up into the part of all steps that they are, where that is known."""
    given, steps, key = t.warmup_steps, t.values.get(("train_cfg", "max_steps")), "param_scheduler.warmup_ratio"
    if given is None:
        return
    if steps:
        t.set(given, key, min(1.0, given.number() / steps), f"{given.value} of {steps} steps")
    else:
        why = f"the share of all steps is only known after the data is read; tuner uses 0.03 for {given.value} steps"
        t.set(given, key, 0.03, why, changed=True)


def _settle_kto(t: Translation) -> None:
    """Give a micro-batch two answers where KTO's loss sets one against the other, and half as many of them a step."""
    batch, counts = (_TRAIN, "batch_size"), ("optim_wrapper", "accumulative_counts")
    if t.objective != "kto" or t.values.get(batch, 2) >= 2:
        return
    why = "KTO compares an answer with others of its micro-batch: two answers, and half as many micro-batches per step"
    t.set(t.places[batch], ".".join(batch), 2, why, changed=True)
    if t.values.get(counts, 1) > 1:
        t.values[counts] //= 2


def _settle_model(t: Translation) -> tuple[str | None, dict[str, Any] | None]:
    """Return the catalog's part for the model, and its facts where the weights are another copy of them."""
    if t.model is None:
        t.note(Given("the model", None, t.document.name), Outcome.LEFT_OUT, why="not set: --model PATH")
        return None, None
    path = str(t.model.value)
    part, local = catalog.part_named(path), paths.local(path)
    is_here = local is not None and paths.exists(local)
    if part or is_here:
        t.set(t.model, "model.path", path)
        return part, None
    part = _same_name(path)
    if part is None:
        t.set(t.model, "model.path", path)
        return None, None
    source = read_part("models", part).values
    if local is not None:
        t.set(t.model, "model.path", source["model"]["path"], "that folder is missing; the model comes from the hub")
        return part, None
    t.set(t.model, "model.path", path, f"a copy of {source['model']['path']}, with its architecture")
    return part, source.get("architecture")


def _same_name(path: str) -> str | None:
    """Return the part whose model is called as the end of this path: copies of others keep a model's name."""
    last = _own_name(path)
    for name in catalog.names("models"):
        known = read_path(name)
        if known and _own_name(known) == last:
            return name
    return None


def _own_name(path: str) -> str:
    """Return a model's name without its owner; Llama 3.1 was published with Meta's before it, and later without."""
    return path.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")


def read_path(part: str) -> str | None:
    """Return the hub id of a model part, told from its text."""
    text = catalog.text_of("models", part)
    _, found, rest = text.partition('path="')
    return rest.partition('"')[0] if found else None


def _settle_datasets(t: Translation) -> str | None:
    """Write the data sets into the values; return the catalog's part that is the one data set, where one is."""
    where = (_TRAIN, "dataset")
    given = next((t.given[key] for key in ("dataset", "datasets", "dataset_name") if key in t.given), None)
    given = given or Given("dataset", None, t.document.name)
    for one in (*t.datasets, *t.validation) if t.system else ():
        one["system"] = one.get("system") or t.system
    if len(t.datasets) == 1:
        one = {key: value for key, value in t.datasets[0].items() if value is not None and key != "weight"}
        part = _dataset_part(one)
        for key, value in one.items() if part is None else ():
            t.values[(*where, key)], t.places[(*where, key)] = value, given
        if part and "max_rows" in one:
            t.values[(*where, "max_rows")], t.places[(*where, "max_rows")] = one["max_rows"], given
        return part
    if t.datasets:
        rows = [one.get("max_rows") for one in t.datasets]
        shares = [{key: value for key, value in one.items() if value is not None} for one in t.datasets]
        t.values[(*where, "mixture")] = [
            {key: value for key, value in one.items() if key != "max_rows"} for one in shares
        ]
        t.places[(*where, "mixture")] = given
        if all(rows):
            t.values[(*where, "max_rows")], t.places[(*where, "max_rows")] = sum(rows), given
    return None


def _dataset_part(one: dict[str, Any]) -> str | None:
    """Return the part of the catalog that says just this of just this data set."""
    said = {key: value for key, value in one.items() if key != "max_rows" and (key, value) != ("split", "train")}
    for name in catalog.names("datasets"):
        if f'"{said.get("path")}"' in catalog.text_of("datasets", name):
            values = read_part("datasets", name).values
            theirs = lookup(values, (_TRAIN, "dataset"), {})
            if set(values) == {_TRAIN} and theirs.items() >= said.items() and theirs.keys() <= said.keys() | {"format"}:
                return name
    return None


def _settle_validation(t: Translation, merged: Merged) -> None:
    """Read validation rows as training rows are; without any, what is said of validation has no place."""
    if t.validation:
        where = Given("validation", None, t.document.name)
        block = data_sets.validation_block(merged)
        block["dataset"] |= {key: value for key, value in t.validation[0].items() if key != "weight"}
        block["batch_size"] = t.values.get((_VAL, "batch_size"), block["batch_size"])
        merged.lay(Layer.at(Place(Kind.PACKAGE, t.document.name), {_VAL: block}))
        t.places[(_VAL,)] = where
        return
    held_out = lookup(merged.values, (_TRAIN, "dataset", "val_split"))
    gone: list[Keys] = [(_VAL, "batch_size")]
    gone += [] if held_out else [("train_cfg", "val_interval"), ("train_cfg", "early_stopping_patience")]
    gone += [] if held_out else [("checkpoint", "save_best")]
    for keys in gone:
        if keys in t.places:
            merged.lay(
                Layer.at(Place(Kind.PACKAGE, t.document.name), nested(keys[:1] if keys[0] == _VAL else keys, None))
            )
            given = t.places.pop(keys)
            why = "held-out rows use the training's micro-batch" if held_out else "there is nothing to validate on"
            t.entries = [
                replace(one, outcome=Outcome.LEFT_OUT, ours=None, why=why) if one.given is given else one
                for one in t.entries
            ]


def _base_alone() -> Merged:
    merged, base = Merged(), read_base()
    merged.lay(Layer(base.values, base.place))
    return merged


def _difference(t: Translation, merged: Merged, below: Merged, has_facts: bool) -> dict[str, Any]:
    """Return what the recipe must say: all that was written, and of the defaults what the base does not mean."""
    result: dict[str, Any] = {}
    facts = merged.values.pop("architecture", None)
    for dotted, value in leaves(merged.values):
        keys = tuple(dotted.split("."))
        given = t.places.get(keys)
        old = lookup(below.values, keys, ...)
        is_written = given is not None and not given.is_default and given.value is not None
        if old != value or is_written:
            _put(result, keys, value)
    for block in ("adapter", "quantization", _VAL):
        if result.get(block) is not None and below.values.get(block) is None:
            result[block] = merged.values[block]
    if result.get(_VAL):
        rows = {key: value for key, value in result[_VAL]["dataset"].items() if value not in (None, 0)}
        result[_VAL] = {**result[_VAL], "dataset": {"packing": False, **rows}}
    if has_facts:
        result["architecture"] = facts
    return {key: result[key] for key in read_base().values if key in result}


def _put(result: dict[str, Any], keys: Keys, value: Any) -> None:
    *outer, last = keys
    for key in outer:
        result = result.setdefault(key, {})
    result[last] = value
