"""Builds a recipe from a translation: the catalog parts that it is based on, and the values that differ from them.

It reads the catalog and checks whether a model's folder exists; it writes no files.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

from tuner import paths
from tuner.errors import Option, Text, TunerError
from tuner.files import JsonObject
from tuner.importers import image_keys, shared_rules, words
from tuner.importers.document import Keys
from tuner.importers.translation import Chosen, Entry, Outcome, Setting, Translation
from tuner.recipes import catalog, data_sets, model_facts
from tuner.recipes.loading import lay_warmup, validate, with_other_tools_defaults
from tuner.recipes.merging import Kind, Layer, Merged, Place, leaves, lookup, nested
from tuner.recipes.recipe import base_layer, layer_of, read_base
from tuner.recipes.recipe_file import read_part
from tuner.recipes.schema import LOADERS
from tuner.recipes.schema.tensor_parallel import SPLIT_BY
from tuner.zero import presets
from tuner.zero.choice import open_config
from tuner.zero.config import AUTO, AUTOEP, AUTOTP, BASE, expert_ranks

_TRAIN, _VAL = LOADERS
_EPOCHS = ("train_cfg", "max_epochs")
_SPLIT = tuple(SPLIT_BY.split("."))
_CUSTOM = "custom"
_ADAPTED = ("lora", "qlora", "dora", "rslora")


@dataclass(frozen=True)
class Imported:
    """An imported recipe, and the outcome for every key of its source.

    Attributes:
        base: The composed name that it builds on; None if the catalog does not have the model.
        values: Nested values that differ from the base.
        settings: The setting in the source for each value that the translation chose.
        notes: Warnings about values that the model does not support.
        obstacle: Why the recipe would train something else than its source, if it does. `tuner train` then refuses it.
    """

    tool: str
    source: str
    base: str | None
    values: JsonObject
    settings: dict[Keys, Setting]
    entries: tuple[Entry, ...]
    notes: tuple[str, ...] = ()
    obstacle: str | None = None

    @property
    def differences(self) -> tuple[Entry, ...]:
        """The written keys that change what is learned, or may do so because the tool has no such key."""
        return tuple(
            entry
            for entry in self.entries
            if not entry.setting.is_default and (entry.is_learned or entry.outcome is Outcome.UNKNOWN)
        )


def recipe_from(t: Translation) -> Imported:
    """Return the recipe for a translation.

    Raises:
        RecipeError: no model is named, or a value is not valid; the error names its place in the source.
    """
    _leave_out_by_method(t)
    _add_losses(t)
    _pair_answers_of_kto(t)
    _name_other_sizes(t)
    _divide_experts(t)
    part, architecture = _set_model(t)
    image_keys.set_images(t, part)
    dataset = _set_datasets(t)
    t.check_all_recorded()
    epochs = t.ours(_EPOCHS) or 1
    objective = t.objective
    parts = catalog.Parts(part, objective, t.method, dataset or _CUSTOM, epochs) if part else None
    below = _base_alone()
    named_parts = (("models", part), ("methods", t.method), ("objectives", objective), ("datasets", dataset))
    layers = [layer_of(read_part(kind, name)) for kind, name in named_parts if name is not None]
    is_of_xtuner = parts is not None and words.has_recipe(parts.name)
    for layer in with_other_tools_defaults(layers) if is_of_xtuner else layers:
        below.lay(layer)
    merged = deepcopy(below)
    # The tool's numbers count: tuner chooses no batch size and no pack length.
    fixed = {_TRAIN: {"dataset": {"pack_length": None}}, "train_cfg": {"global_batch_size": None}}
    merged.lay(Layer.at(Place(Kind.PACKAGE, t.document.name), fixed))
    for keys, chosen in t.chosen.items():
        merged.lay(_layer(keys, chosen))
    if architecture and t.model:
        # In the same layer as the model: with a later path, tuner would take it for an unknown model.
        merged.lay(Layer.at(Place(Kind.PACKAGE, t.model.where), {"architecture": {"_delete_": True, **architecture}}))
    else:
        model_facts.derive_architecture(merged)
    model_facts.lay_constraints(merged, model_facts.kind_of(merged))
    _lay_validation(t, merged)
    _check(merged)
    if parts:
        below.lay(Layer.at(Place(Kind.NAME, parts.name), nested(_EPOCHS, epochs)))
    return Imported(
        tool=t.tool.name,
        source=t.document.name,
        base=parts.name if parts else None,
        values=_difference(t, merged, below if parts else _base_alone(), bool(architecture)),
        settings={keys: chosen.setting for keys, chosen in t.chosen.items()},
        entries=tuple(entry for entry in t.entries if not entry.setting.is_default or entry.outcome is Outcome.CHANGED),
        notes=tuple(merged.warnings),
        obstacle=Text(t.obstacle) if t.obstacle else None,
    )


def _layer(keys: Keys, chosen: Chosen) -> Layer:
    where = chosen.setting.where
    name, _, line = where.rpartition(":")
    # As a catalog value: if the model does not support it, it is overridden with a warning.
    place = Place(Kind.PACKAGE, name, int(line)) if name and line.isdigit() else Place(Kind.PACKAGE, where)
    return Layer.at(place, nested(keys, chosen.value))


def _check(merged: Merged) -> None:
    complete = deepcopy(merged)
    data_sets.lay_mixtures(complete)
    data_sets.lay_validation(complete)
    lay_warmup(complete)
    validate(complete)


def _leave_out_by_method(t: Translation) -> None:
    """Remove the adapter's values if all weights are trained, and those of 4 bits if the base has none or 8.

    A block of quantization, even without `bits`, would quantize the base.
    """
    bits = t.ours(("quantization", "bits"))
    if t.method not in _ADAPTED:
        _leave_out(t, ("adapter.", "quantization."), "all weights are trained: there is no adapter")
    elif bits is None and t.method != "qlora":
        _leave_out(t, ("quantization.",), "belongs to 4 bits, and no weights are quantized")
    elif bits == 8:
        _leave_out(t, ("quantization.quant_type", "quantization.double_quant"), "belongs to 4 bits, and these are 8")


def _leave_out(t: Translation, our_prefixes: tuple[str, ...], why: str) -> None:
    """Remove the values of the keys that begin so."""
    t.chosen = {keys: chosen for keys, chosen in t.chosen.items() if not ".".join(keys).startswith(our_prefixes)}
    for number, entry in enumerate(t.entries):
        if entry.ours and entry.ours.startswith(our_prefixes):
            t.entries[number] = Entry(entry.setting, Outcome.LEFT_OUT, why=why)


def _add_losses(t: Translation) -> None:
    """Add the losses beside those of DPO, with their weights."""
    for loss, setting in t.added_losses.items():
        kinds = t.ours(("objective", "loss_type")) or ["sigmoid"]
        weights = t.ours(("objective", "loss_weights")) or [1.0] * len(kinds)
        t.set(setting, "objective.loss_type", [*kinds, loss])
        t.set(setting, "objective.loss_weights", [*weights, setting.number()])


def _pair_answers_of_kto(t: Translation) -> None:
    """For KTO, raise the micro-batch to the two answers that its loss compares, and halve the accumulation."""
    batch, counts = (_TRAIN, "batch_size"), ("optim_wrapper", "accumulative_counts")
    if t.objective != "kto" or t.ours(batch, 2) >= 2:
        return
    why = "KTO compares an answer with others of its micro-batch: two answers, and half as many micro-batches per step"
    t.set(t.chosen[batch].setting, ".".join(batch), 2, why, changed=True)
    if t.ours(counts, 1) > 1:
        t.chosen[counts] = t.chosen[counts]._replace(value=t.ours(counts) // 2)


def _name_other_sizes(t: Translation) -> None:
    """Name the ranks of the DeepSpeed config that split layers, or divide experts, where another key says otherwise."""
    config, split, divided = t.chosen.get(("deepspeed",)), t.chosen.get(_SPLIT), t.divided_by
    if config is None or config.value == AUTO:
        return
    try:
        value = open_config(config.value, config.setting.where).value
    except TunerError:  # it is told when a run reads it
        return
    sizes = [(split.setting, split.value, AUTOTP, lookup(value, AUTOTP))] if split else []
    sizes += [(divided, divided.whole(), AUTOEP, expert_ranks(value))] if divided else []
    for setting, counts, keys, size in sizes:
        if isinstance(size, int) and size > 1 and size != counts:
            other = f"{setting.name} = {counts}, which {'counts' if counts > 1 else 'has no effect'}"
            t.note(config.setting, Outcome.CHANGED, why=f"it has {'.'.join(keys)} = {size} beside {other}")


def _divide_experts(t: Translation) -> None:
    """Change the DeepSpeed config to divide experts over ranks: the one that is named, or ZeRO-2's."""
    if t.divided_by is None:
        return
    chosen = t.ours(("deepspeed",))
    if not isinstance(chosen, dict):
        chosen = {BASE: chosen or presets.of_stage(2, offloads=False).name}
    block, divides = chosen.get("expert_parallel"), {"enabled": True, "autoep_size": t.divided_by.whole()}
    block = block | divides if isinstance(block, dict) else divides
    t.set(t.divided_by, "deepspeed", {**chosen, "expert_parallel": block})


def _set_model(t: Translation) -> tuple[str | None, JsonObject | None]:
    """Return the catalog part for the model, and its architecture if the source names a copy of that model."""
    if t.model is None:
        t.note(Setting("the model", None, t.document.name), Outcome.LEFT_OUT, why=f"not set: {Option('model', 'PATH')}")
        return None, None
    path = str(t.model.value)
    part, local = catalog.part_named(path), paths.local(path)
    is_here = local is not None and paths.exists(local)
    if part or is_here:
        t.set(t.model, "model.path", path)
        return part, None
    # Copies by other owners keep the model's name.
    same = (name for name in catalog.names("models") if _own_name(catalog.path_of(name)) == _own_name(path))
    if (part := next(same, None)) is None:
        t.set(t.model, "model.path", path)
        return None, None
    values = read_part("models", part).values
    if local is not None:
        t.set(t.model, "model.path", values["model"]["path"], "that folder is missing; the model comes from the hub")
        return part, None
    t.set(t.model, "model.path", path, f"a copy of {values['model']['path']}, with its architecture")
    return part, values.get("architecture")


def _own_name(path: str) -> str:
    """Return a model's name without its owner, and without `Meta-`, which only the first Llama 3.1 names have."""
    return path.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")


def _set_datasets(t: Translation) -> str | None:
    """Write the data sets into the values; return the catalog part if one part is exactly the one data set."""
    where = (_TRAIN, "dataset")
    setting = next((t.settings[key] for key in ("dataset", "datasets", "dataset_name") if key in t.settings), None)
    setting = setting or Setting("dataset", None, t.document.name)
    for dataset in (*t.datasets, *t.validation) if t.system else ():
        dataset["system"] = dataset.get("system") or t.system
    shares = [{key: value for key, value in dataset.items() if value is not None} for dataset in t.datasets]
    if len(shares) > 1:
        t.chosen[(*where, "mixture")] = Chosen(shares, setting)
    if len(shares) != 1:
        return None
    (dataset,) = shares
    dataset.pop("weight", None)
    part = _dataset_part(dataset)
    for key in dataset if part is None else dataset.keys() & {"max_rows"}:
        t.chosen[(*where, key)] = Chosen(dataset[key], setting)
    return part


def _dataset_part(dataset: JsonObject) -> str | None:
    """Return the catalog part with exactly these values for this data set."""
    described = {
        key: value for key, value in dataset.items() if key != "max_rows" and (key, value) != ("split", "train")
    }
    for name, values in shared_rules.parts_that_name(f'"{described.get("path")}"'):
        part_dataset = lookup(values, (_TRAIN, "dataset"), {})
        is_alike = part_dataset.items() >= described.items() and part_dataset.keys() <= described.keys() | {"format"}
        if set(values) == {_TRAIN} and is_alike:
            return name
    return None


def _lay_validation(t: Translation, merged: Merged) -> None:
    """Read validation rows as training rows are read; without validation rows, remove the keys for validation."""
    if t.validation:
        packs = merged.get((_VAL, "dataset", "packing"))
        block = data_sets.validation_block(merged)
        block["dataset"] |= {key: value for key, value in t.validation[0].items() if key != "weight"}
        block["dataset"] |= {} if packs is None else {"packing": packs}
        block["batch_size"] = t.ours((_VAL, "batch_size"), block["batch_size"])
        merged.lay(Layer.at(Place(Kind.PACKAGE, t.document.name), {_VAL: block}))
        return
    held_out = lookup(merged.values, (_TRAIN, "dataset", "val_split"))
    why = "held-out rows use the training's micro-batch and packing" if held_out else "there is nothing to validate on"
    of_losses = (("train_cfg", "val_interval"), ("train_cfg", "early_stopping_patience"), ("checkpoint", "save_best"))
    for keys in ((_VAL, "batch_size"), (_VAL, "dataset", "packing"), *(() if held_out else of_losses)):
        if keys in t.chosen:
            gone = nested((_VAL,) if keys[0] == _VAL else keys, None)
            merged.lay(Layer.at(Place(Kind.PACKAGE, t.document.name), gone))
            _leave_out(t, (".".join(keys),), why)


def _base_alone() -> Merged:
    merged = Merged()
    merged.lay(base_layer())
    return merged


def _difference(t: Translation, merged: Merged, below: Merged, has_facts: bool) -> JsonObject:
    """Return the values of the recipe: every value that was written, and the defaults that differ from the base."""
    result: JsonObject = {}
    architecture = merged.values.pop("architecture", None)
    for dotted, value in leaves(merged.values):
        keys = tuple(dotted.split("."))
        setting = t.chosen[keys].setting if keys in t.chosen else None
        is_written = setting is not None and not setting.is_default and setting.value is not None
        if is_written or lookup(below.values, keys, ...) != value:
            inner = result
            for key in keys[:-1]:
                inner = inner.setdefault(key, {})
            inner[keys[-1]] = value
    for block in ("adapter", "quantization", _VAL):
        if result.get(block) is not None and below.values.get(block) is None:
            result[block] = merged.values[block]
    if result.get(_VAL):
        rows = {key: value for key, value in result[_VAL]["dataset"].items() if value not in (None, 0)}
        result[_VAL] = {**result[_VAL], "dataset": {"packing": False, **rows}}
    if has_facts:
        result["architecture"] = architecture
    return {key: result[key] for key in read_base().values if key in result}
