"""Make a recipe of a name, a file or a model: lay the layers of values over each other, and check the result.

Order, later wins: base, model, method, objective, dataset, epochs, recipe files, overrides. Where another tool has a
recipe of the name, that tool's defaults come after base.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from tuner import paths
from tuner.assets import TEMPLATES
from tuner.errors import Option, RecipeError, brief_repr, options
from tuner.files import JsonObject, is_writable
from tuner.hooks import other_tools
from tuner.recipes import catalog, data_sets, document_file, mistaken, model_facts, names, starting_weights, trust
from tuner.recipes.catalog import Reading
from tuner.recipes.code_file import run_file
from tuner.recipes.merging import DEFAULT, Kind, Layer, Merged, Place, leaves, lookup, nested
from tuner.recipes.names import Name, NameKind
from tuner.recipes.overrides import layers_of_overrides
from tuner.recipes.recipe import LoadArguments, Overrides, Recipe, base_layer, lasting_template, layer_of
from tuner.recipes.recipe_file import DOCUMENTS, RecipeFile, read_file, read_part
from tuner.recipes.schema import LOADERS, RecipeConfig
from tuner.runs.directory import RunDirectory

_RATE = ("optim_wrapper", "optimizer", "lr")
_WARMUP_RATIO, _WARMUP_STEPS = ("param_scheduler", "warmup_ratio"), ("param_scheduler", "warmup_steps")
_ADAPTER_RATE = 10
_MAX_BASES, _MAX_FILES = 8, 64
"""How deep files may build on each other, and how many bases are read in all: files may name each other in a cycle."""


def load(name: str | Name | None, overrides: Overrides | None = None, *, allow_code: bool = False) -> Recipe:
    """Load a recipe by a composed name, by a catalog recipe's name, or from a file; or make one for a model.

    Args:
        name: A recipe's name or file, or a model's folder or hub id; or what `names` has found it to be. None: the
            overrides name the model.
        overrides: The changes of the command line.
        allow_code: Run a file that holds code, and grant what the recipe asks for (`trust.withhold`).

    Raises:
        RecipeError: an unknown name, a file that holds code, or a value that does not fit the schema.
    """
    arguments = LoadArguments(None if name is None else names.identify(name), overrides or Overrides(), allow_code)
    recipe_name, overrides = _name_and_overrides(arguments)
    merged = Merged()
    for layer in _layers_of_recipe(recipe_name, allow_code) if recipe_name else _layers_of_method(overrides):
        merged.lay(layer)
    for layer in layers_of_overrides(overrides, merged, has_recipe=recipe_name is not None):
        merged.lay(layer)  # before the next one is asked for, which reads `merged`
        model_facts.derive_architecture(merged)  # from config.json, now: the next layer may change a fact of it
    model_facts.derive_architecture(merged)  # of the recipe's own model, if no override was laid
    _lay_derived(merged)
    trust.withhold(merged, allow_code=allow_code)
    config = validate(merged)
    shadowing = catalog.shadowing(TEMPLATES, config.model.chat_template or "")
    merged.warnings += [shadowing] if shadowing else []
    values = config.model_dump()
    merged.origins = {key: merged.origins.get(key, DEFAULT) for key, _ in leaves(values)}
    return Recipe(
        name=_shown_name(recipe_name, overrides),
        config=config,
        origins=merged.origins,
        warnings=tuple(merged.warnings),
        notes=(*merged.notes, *_notes_of(config)),
        ds=tuple(overrides.ds),
        arguments=arguments,
        nvme=overrides.nvme,
    )


def _name_and_overrides(arguments: LoadArguments) -> tuple[Name | None, Overrides]:
    """Return the recipe's name and the overrides; a model in place of a recipe becomes an override."""
    name, overrides, _ = arguments
    if name is not None and name.kind in names.MODELS:
        if overrides.model is not None:
            message = f"both {name.text!r} and {Option('model', overrides.model)} set the model"
            raise RecipeError(message, where=Option("model"), fix="Use one of them.")
        overrides, name = replace(overrides, model=name.text), None
    if name is not None and name.kind not in (NameKind.RECIPE, NameKind.RECIPE_FILE, NameKind.UNCLEAR):
        raise mistaken.refusal(name, overrides.data_sets)
    if name is None and overrides.model is None and overrides.adapter is None:
        fix = f"Name a recipe (tuner list shows them), or give {Option('model', 'PATH')} and {Option('data', 'FILE')}."
        raise RecipeError("neither a recipe nor a model is given", fix=fix)
    if name is not None and overrides.method is not None:
        fix = (
            f"Remove {Option('method')} and use another recipe, or remove the recipe: "
            f"{options(Option('model', 'PATH'), Option('method', 'NAME'))}."
        )
        raise RecipeError(f"the recipe {name.text!r} already has a method", where=Option("method"), fix=fix)
    return name, overrides


def _layers_of_method(overrides: Overrides) -> Iterator[Layer]:
    """Yield the base recipe with a method, for a run without a recipe; the model follows as an override."""
    yield base_layer()
    objective, method = catalog.training(overrides.method or catalog.DEFAULT_METHOD)
    yield from with_adapter_rate([_part_layer("methods", method), _part_layer("objectives", objective)])
    yield data_sets.OF_OWN_DATA


def _layers_of_recipe(name: Name, allow_code: bool) -> Iterator[Layer]:
    yield base_layer()
    files = _Files(allow_code)
    if name.reading:
        yield from files.layers_of_name(name.reading)
    else:
        assert name.path is not None, "the other kinds are refused before"
        yield from files.layers_of_file(_FileToRead(name.path, name.text))


class _FileToRead(NamedTuple):
    """A recipe's file, and `shown`, its name in messages; `name` is the recipe's, if a catalog has it."""

    path: Path
    shown: str
    kind: Kind = Kind.FILE
    name: str | None = None


class _Files:
    """The files of a recipe: the one that is loaded, and those that it builds on."""

    def __init__(self, allow_code: bool) -> None:
        self._allow_code, self._num_bases = allow_code, 0

    def layers_of_name(self, reading: Reading, depth: int = 0, *, in_package: bool = False) -> Iterator[Layer]:
        """Yield the layers of a name's recipe in the catalog, or of its parts; then epochs and other tools' words.

        Args:
            in_package: A recipe of the package builds on it.
        """
        name = reading.name
        if isinstance(reading.base, str):
            file = catalog.part_file("recipes", reading.base)
            to_read = _FileToRead(file.path, file.shown, file.folder.kind, reading.base)
            # A recipe of the package builds on composed names only, so it cannot be part of a cycle.
            yield from self.layers_of_file(to_read, 0 if file.is_ours else depth)
        else:
            parts = [_part_layer(kind, part) for kind, part in reading.base.kinds()]
            # A name that another tool has a recipe of keeps that tool's defaults; so do the package's files.
            is_of_other_tool = in_package or other_tools().has_recipe(name)
            yield from with_other_tools_defaults(parts) if is_of_other_tool else with_adapter_rate(parts)
        if reading.epochs:
            yield Layer.at(Place(Kind.NAME, f"name {name}"), {"train_cfg": {"max_epochs": reading.epochs}})
        for word in reversed(reading.words):
            place = f"name {name}" if word.text == name else f"{word.text} in name {name}"
            yield Layer.at(Place(Kind.NAME, place), word.values, warning=word.loses)

    def layers_of_file(self, to_read: _FileToRead, depth: int = 0) -> Iterator[Layer]:
        """Yield the layers of the bases that a file names, and then its own."""
        if depth > _MAX_BASES:
            raise RecipeError(f"more than {_MAX_BASES} nested bases", where=to_read.shown, fix="Check for a cycle.")
        file = self._read(to_read)
        for base in _bases(file):
            self._num_bases += 1
            if self._num_bases > _MAX_FILES:
                raise RecipeError(f"more than {_MAX_FILES} bases in all", where=to_read.shown, fix="Use fewer.")
            if names.is_path(base):
                inner = to_read.path.parent / base
                yield from self.layers_of_file(_FileToRead(inner, str(inner)), depth + 1)
            elif reading := catalog.find(base, to_read.name):
                yield from self.layers_of_name(reading, depth + 1, in_package=to_read.kind is Kind.PACKAGE)
            else:
                raise catalog.unknown(base)
        warning = catalog.shadowing("recipes", to_read.name) if to_read.name else None
        yield layer_of(file)._replace(warning=warning)

    def _read(self, to_read: _FileToRead) -> RecipeFile:
        """Read a file as data; if that fails and code is allowed, run it."""
        if to_read.path.suffix in DOCUMENTS:
            return document_file.read_document(to_read.path, to_read.shown, to_read.kind)
        try:
            try:
                return read_file(to_read.path, to_read.shown, to_read.kind)
            except RecipeError:
                if not (self._allow_code and paths.is_file(to_read.path)):
                    raise
                return run_file(to_read.path, to_read.shown)
        except RecipeError as error:
            base = names.identify(str(to_read.path))
            raise (mistaken.refusal(base) if base.kind is NameKind.OTHER_TOOL else error) from None


def _bases(file: RecipeFile) -> Sequence[str]:
    bases = file.values.get("_base_", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list | tuple) or not all(isinstance(base, str) for base in bases):
        fix = "Use a recipe's name, a file's path, or a list of them."
        raise RecipeError(f"_base_ = {brief_repr(bases)} is not a name", where=file.where(("_base_",)), fix=fix)
    return bases


def _part_layer(kind: str, name: str) -> Layer:
    return layer_of(read_part(kind, name))._replace(warning=catalog.shadowing(kind, name))


def with_adapter_rate(parts: Sequence[Layer]) -> Iterator[Layer]:
    """Yield the layers of a name's parts; an adapter gets ten times the objective's learning rate.

    An adapter learns best at ten times the rate of full training ("LoRA Without Regret", Thinking Machines, 2025), and
    TRL's DPO and ORPO examples use ten times the rate with LoRA. At 5e-7 DPO taught an adapter nothing
    (docs/learning.md).
    """
    has_adapter = False
    for part in parts:
        yield part
        rate = lookup(part.values, _RATE)
        if has_adapter and rate is not None:
            place = Place(Kind.DERIVED, f"derived: {_ADAPTER_RATE} times the objective's rate, for an adapter")
            yield Layer.at(place, nested(_RATE, float(f"{rate * _ADAPTER_RATE:.6g}")))
        has_adapter |= bool(part.values.get("adapter"))


def with_other_tools_defaults(parts: Sequence[Layer]) -> Iterator[Layer]:
    """Yield another tool's defaults, then the layers of a name's parts; its adapter's defaults follow the adapter."""
    file = other_tools().defaults()
    defaults = layer_of(read_file(file, f"configs/{file.name}", Kind.PACKAGE))
    of_adapter = defaults.values.pop("adapter")
    yield defaults
    for part in parts:
        yield part
        if part.values.get("adapter"):
            yield defaults._replace(values={"adapter": of_adapter})


def _lay_derived(merged: Merged) -> None:
    """Derive the values that depend on others; the schema refuses values of a wrong type later."""
    if isinstance(merged.values.get("model"), dict):
        starting_weights.lay_adapter_and_template(merged)
    model_facts.lay_other_models(merged)
    data_sets.lay_mixtures(merged)
    data_sets.lay_validation(merged)
    lay_warmup(merged)
    model_facts.lay_constraints(merged, model_facts.kind_of(merged))


def lay_warmup(merged: Merged) -> None:
    """Keep the later one of the two warm-ups: a share of all steps, or a number of steps."""
    steps, ratio = merged.get(_WARMUP_STEPS), merged.get(_WARMUP_RATIO)
    if steps is None:
        return
    if merged.order_of(_WARMUP_RATIO) > merged.order_of(_WARMUP_STEPS):
        merged.lay(Layer.at(merged.place_of(_WARMUP_RATIO), nested(_WARMUP_STEPS, None)))
    elif ratio and merged.order_of(_WARMUP_RATIO) < merged.order_of(_WARMUP_STEPS):
        merged.lay(Layer.at(merged.place_of(_WARMUP_STEPS), nested(_WARMUP_RATIO, 0.0)))


def validate(merged: Merged) -> RecipeConfig:
    """Return the merged values as a checked recipe.

    Raises:
        RecipeError: values that do not fit the schema, each with its key and place.
    """
    try:
        return RecipeConfig.model_validate(merged.values)
    except ValidationError as error:
        raise mistaken.explained(error, merged) from None


def _notes_of(config: RecipeConfig) -> Iterator[str]:
    """Yield a line about the rows that are held out, and one about what is pushed to the hub."""
    dataset, block = config.train_dataloader.dataset, config.checkpoint
    if isinstance(dataset.val_split, float):
        share = f"{100 * dataset.val_split:.3g} %"
        yield f"validation: {share} of the training rows are held out, by seed {dataset.val_seed}"
    if block.repository is not None:
        yield f"push: {'each checkpoint and the result go' if block.push else 'the result goes'} to {block.repository}."


def _shown_name(recipe_name: Name | None, overrides: Overrides) -> str:
    """Return what a recipe is called: as it was typed, its file's name, or by its model and method.

    RUN/recipe.py has the name of the run's recipe, or of the folder.
    """
    if recipe_name is None:
        model = overrides.model or overrides.adapter
        assert model is not None, "refused before"
        shown = f"{starting_weights.name_of(model)}_{overrides.method or catalog.DEFAULT_METHOD}"
    else:
        shown = recipe_name.text
    if not is_writable(shown):
        raise RecipeError(f"the name {shown!r} is not UTF-8", fix="Rename the file or folder.")
    if recipe_name is None or recipe_name.path is None or recipe_name.reading:
        return shown
    file = recipe_name.path
    record = RunDirectory(file.parent).run_or_none if file.stem == "recipe" else None
    name = record.name if record else file.absolute().parent.name if file.stem == "recipe" else file.stem
    return name if name and is_writable(name) and Path(name).name == name else file.stem


def check_part(kind: str, name: str) -> None:
    """Check one part by itself, as it would be in any recipe.

    Raises:
        RecipeError: it holds code, or a value that the schema refuses; with the file and the line.
    """
    if kind == TEMPLATES:
        catalog.chat_template(str(catalog.part_file(kind, name).path))
        return
    if kind == "recipes":
        load(name)
        return
    check_file(read_part(kind, name))


def check_file(part: RecipeFile) -> None:
    """Check the values of one part; raises as `check_part` does."""
    merged = Merged()
    for layer in (base_layer(), layer_of(part)):
        merged.lay(layer)
    data_sets.lay_mixtures(merged)
    lay_warmup(merged)
    validate(merged)


def anchored(recipe: Recipe, deepspeed: str | JsonObject) -> Recipe:
    """Return the recipe with absolute paths and a fixed DeepSpeed config, so that it runs from any folder."""
    config = recipe.config.model_dump()
    config["deepspeed"] = deepspeed
    config["model"]["revision"] = trust.bound_revision(recipe.config)
    model, objective = config["model"], config["objective"]
    model["chat_template"] = lasting_template(model["chat_template"])
    rewards = objective.get("rewards", ())
    data_sets_of = [config[key]["dataset"] for key in LOADERS if config[key]]
    entries = [entry for dataset in data_sets_of for entry in dataset["mixture"] or ()]
    for block in (model, model["vision"], config["adapter"], *data_sets_of, *entries, *rewards):
        _anchor(block, "path")
    _anchor(model["vision"], "projector")
    _anchor(objective, "teacher")
    if str(model["chat_template"]).endswith(".jinja"):
        _anchor(model, "chat_template")
    for reward in rewards:
        reward["type"] = _anchored_code(reward["type"])
    if "tools" in objective:
        objective["tools"] = [*map(_anchored_code, objective["tools"])]
        objective["environment"] = objective["environment"] and _anchored_code(objective["environment"])
    return Recipe(recipe.name, RecipeConfig.model_validate(config), recipe.origins)


def _anchored_code(name: str) -> str:
    """Return the name of a function or a class, with the absolute path of its file if it has one."""
    file, _, function = name.rpartition(":")
    return f"{paths.expanded(file).absolute()}:{function}" if file.endswith(".py") else name


def _anchor(block: JsonObject | None, key: str) -> None:
    path = block and block.get(key)
    if block and path and paths.matching(paths.expanded(path)):
        block[key] = str(paths.expanded(path).absolute())
