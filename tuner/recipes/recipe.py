"""A recipe: layers of values laid over each other, every value with where it came from and what it beat.

Order, later wins: base, model, method, objective, dataset, epochs, recipe files, overrides. It starts nothing.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from itertools import count
from pathlib import Path
from typing import Any

from tuner.errors import RecipeError
from tuner.recipes import catalog, foreign, habits, mixture, paths, suit
from tuner.recipes.code import run_file
from tuner.recipes.config_json import read_facts
from tuner.recipes.explain import key_hint, short, validate
from tuner.recipes.flatten import flatten
from tuner.recipes.layers import Layer, Merged, leaves
from tuner.recipes.origin import DEFAULT, Kind, Place
from tuner.recipes.origin import Origin as Origin
from tuner.recipes.overrides import parse_override
from tuner.recipes.part import read_part
from tuner.recipes.schema import RecipeConfig
from tuner.recipes.source import Keys, Source, is_writable, read_file

_MAX_BASES, _MAX_FILES = 8, 64
"""Files that build on each other, and bases read in all: two files that name each other's base eight times are many."""


@dataclass(frozen=True)
class Recipe:
    """One recipe, merged and checked. `origins` is keyed by dotted path, one entry a leaf."""

    name: str
    config: RecipeConfig
    origins: dict[str, Origin]
    warnings: tuple[str, ...] = ()

    @property
    def values(self) -> dict[str, Any]:
        """The recipe as plain nested values."""
        return self.config.model_dump()

    def standalone(self, note: str = "") -> str:
        """Return the text of one commented file that holds this recipe without any base."""
        base = catalog.BASE.read_text(encoding="utf-8")
        delta = _difference(_base().values, self.values)
        return flatten(base, delta, f"{self.name}: one standalone recipe.{note}")


@dataclass(frozen=True)
class Overrides:
    """What the command line changes: `--model`, `--data`, `--seed`, and (flag, KEY=VALUE) pairs in their order."""

    model: str | None = None
    data: str | None = None
    seed: int | None = None
    pairs: Sequence[tuple[str, str]] = ()

    def __post_init__(self) -> None:
        given = (("--model", self.model), ("--data", self.data), *self.pairs)
        for flag, text in given:
            if text is not None and not is_writable(text):
                raise RecipeError(f"{text!r} is not UTF-8", where=flag, fix="Rename the file or folder.")


def load(name: str, overrides: Overrides | None = None, *, allow_code: bool = False) -> Recipe:
    """Load a recipe by a composed name, by a catalog recipe's name, or from a file.

    Raises:
        RecipeError: an unknown name, a file that is no data, or a value that does not fit the schema.
    """
    merged = Merged()
    for layer in _layers(name, allow_code):
        merged.lay(layer)
    for layer in _override_layers(overrides or Overrides(), merged):
        merged.lay(layer)
        _derive_architecture(merged)  # before the next override: it may change one of the new model's facts
    _derive_architecture(merged)
    mixture.settle(merged)
    suit.settle(merged)
    config = validate(merged)
    if not is_writable(name):
        raise RecipeError(f"the name {name!r} is not UTF-8", fix="Rename the file or folder.")
    merged.origins = {key: merged.origins.get(key, DEFAULT) for key, _ in leaves(config.model_dump())}
    name = paths.recipe_name(Path(name)) if _is_path(name) else name
    return Recipe(name, config, merged.origins, tuple(merged.warnings))


def refuse_functions(recipe: Recipe, *, allow_code: bool) -> None:
    """Refuse row functions of Python and of installed packages that the recipe names: `subprocess:Popen` is one.

    A module on PYTHONPATH is the user's own, and so is a name that is typed after --set.

    Raises:
        RecipeError: there is one, and code is not allowed.
    """
    for key in () if allow_code else mixture.LOADERS:
        loader = getattr(recipe.config, key)
        for name, rows in (("format", [loader.dataset]), ("mixture", loader.dataset.mixture or ())) if loader else ():
            place = recipe.origins[f"{key}.dataset.{name}"].place
            for one in rows:
                module = (one.format or "").partition(":")[0] if ":" in (one.format or "") else None
                if module and _is_installed(module) and place.kind is not Kind.FLAG:
                    what = f"format = {one.format!r} names code of an installed package, which was not written for rows"
                    fix = "Look at that code, then add --allow-code."
                    raise RecipeError(what, where=place, fix=fix)


def _is_installed(module: str) -> bool:
    """Return whether a module comes with Python or an installed package; nothing is imported to see it."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top == __package__.partition(".")[0]:
        return True
    try:
        spec = PathFinder.find_spec(top)
    except (ValueError, ImportError):
        spec = None
    places = [*(spec.submodule_search_locations or ()), spec.origin] if spec else []
    homes = {Path(path).resolve() for name, path in sysconfig.get_paths().items() if "lib" in name}
    return any(home in Path(place).resolve().parents for place in places if place for home in homes)


def anchored(recipe: Recipe, deepspeed: str | dict[str, Any]) -> Recipe:
    """Return the recipe with its local paths made absolute and its DeepSpeed choice pinned: it runs from anywhere."""
    config = recipe.config.model_dump()
    config["deepspeed"] = deepspeed
    _anchor(config["model"], "path")
    if str(config["model"]["chat_template"]).endswith(".jinja"):
        _anchor(config["model"], "chat_template")
    for key in mixture.LOADERS:
        if config[key]:
            for rows in (config[key]["dataset"], *(config[key]["dataset"]["mixture"] or ())):
                _anchor(rows, "path")
    return Recipe(recipe.name, RecipeConfig.model_validate(config), recipe.origins)


def _anchor(block: dict[str, Any], key: str) -> None:
    path = block[key]
    if path and paths.matching(paths.expanded(path)):
        block[key] = str(paths.expanded(path).absolute())


def _is_path(name: str) -> bool:
    return name.endswith(".py") or "/" in name


def _base() -> Source:
    return read_file(catalog.BASE, "configs/base.py", Kind.PACKAGE)


def _layers(name: str, allow_code: bool) -> Iterator[Layer]:
    base = _base()
    yield Layer(base.values, base.place)
    if name.endswith(foreign.YAML):
        raise foreign.yaml_error(name)
    if _is_path(name):
        yield from _file_layers(Path(name), name, allow_code, count())
    else:
        yield from _named_layers(name)


def _named_layers(name: str, hidden: str | None = None) -> Iterator[Layer]:
    reading = catalog.read(name, hidden)
    if isinstance(reading.base, str):
        yield from _catalog_recipe(reading.base)
    else:
        for kind, part in reading.base.kinds():
            yield _layer(read_part(kind, part))
    if reading.epochs:
        yield Layer.at(Place(Kind.NAME, f"name {name}"), {"train_cfg": {"max_epochs": reading.epochs}})
    for word in reversed(reading.words):
        yield Layer.at(Place(Kind.NAME, f"{word.text} in name {name}"), word.values, word.loses)


def _catalog_recipe(name: str) -> Iterator[Layer]:
    source = read_part("recipes", name)
    yield from _named_layers(str(source.values.get("_base_", "")), hidden=name)
    yield _layer(source)


def _file_layers(path: Path, shown: str, allow_code: bool, read: Iterator[int], depth: int = 0) -> Iterator[Layer]:
    if depth > _MAX_BASES:
        raise RecipeError(f"more than {_MAX_BASES} files build on each other", where=shown, fix="Is there a circle?")
    source = _read(path, shown, allow_code)
    for base in _bases(source):
        if next(read) == _MAX_FILES:
            raise RecipeError(f"more than {_MAX_FILES} bases in all", where=shown, fix="Build on fewer.")
        if _is_path(base):
            inner = path.parent / base
            yield from _file_layers(inner, str(inner), allow_code, read, depth + 1)
        else:
            yield from _named_layers(base)
    yield _layer(source)


def _bases(source: Source) -> Sequence[str]:
    bases = source.values.get("_base_", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list | tuple) or not all(isinstance(base, str) for base in bases):
        fix = "Write a recipe's name, a file's path, or a list of them."
        raise RecipeError(f"_base_ = {short(bases)} is not a name", where=source.where(("_base_",)), fix=fix)
    return bases


def _read(path: Path, shown: str, allow_code: bool) -> Source:
    """Read a file as data, and only where that fails and code is allowed, by running it."""
    try:
        return read_file(path, shown)
    except RecipeError as error:
        if not path.is_file():
            raise
        told = foreign.xtuner_error(path, error.where)
        if not allow_code:
            raise told or error from None
    try:
        return run_file(path, shown)
    except RecipeError as error:
        raise told or error from None


def _layer(source: Source) -> Layer:
    known = set(RecipeConfig.model_fields)
    values: dict[str, Any] = {}
    for key, value in source.values.items():
        if key in known:
            values[key] = value
        elif key not in source.helpers and key != "_base_":
            raise RecipeError(f"no key {key!r}", where=source.where((key,)), fix=key_hint(key, sorted(known)))
    return Layer(values, source.place)


def _override_layers(overrides: Overrides, merged: Merged) -> Iterator[Layer]:
    if overrides.model is not None:
        yield Layer.at(Place(Kind.FLAG, f"--model {overrides.model}"), _whole("--model", overrides.model))
    if overrides.data is not None:
        yield Layer.at(Place(Kind.FLAG, f"--data {overrides.data}"), _whole("--data", overrides.data))
    if overrides.seed is not None:
        yield Layer.at(Place(Kind.FLAG, f"--seed {overrides.seed}"), {"randomness": {"seed": overrides.seed}})
    for flag, text in overrides.pairs:
        key, _, value = text.partition("=")
        where, habit = f"{flag} {text}", habits.habit(key.strip(), value)
        told = habits.note(key.strip(), value, where)
        if habit and habit.key in habits.FLAGS:
            yield Layer.at(Place(Kind.FLAG, where), _whole(habit.key, value), told)
            continue
        keys, parsed = parse_override(text, flag, merged.values)
        _refuse_below_none(keys, merged.values, where)
        yield Layer.at(Place(Kind.FLAG, where), _nested(keys, parsed), told)


def _whole(flag: str, path: str) -> dict[str, Any]:
    """Return what --model or --data changes: the path, and what belongs to the one that was there before."""
    if flag == "--model":
        return {"model": {"path": path, "revision": None, "remote_code": False}}
    return {"train_dataloader": {"dataset": mixture.only(path)}, "val_dataloader": None}


def _refuse_below_none(keys: Keys, values: Any, where: str) -> None:
    for index, key in enumerate(keys[:-1]):
        values = values.get(key) if isinstance(values, dict) else None
        if values is None:
            block = ".".join(keys[: index + 1])
            fix = f"Take a method that has one, or set {block} as a whole."
            raise RecipeError(
                f"{block} is None in this recipe, so {'.'.join(keys)} means nothing", where=where, fix=fix
            )


def _nested(keys: Keys, value: Any) -> dict[str, Any]:
    for key in reversed(keys):
        value = {key: value}
    return value  # type: ignore[no-any-return]


def _derive_architecture(merged: Merged) -> None:
    """A model path that is newer than the facts beside it makes those facts another model's."""
    facts_order = max((order for key, order in merged.order.items() if key.split(".")[0] == "architecture"), default=0)
    model = merged.values["model"]
    path = model.get("path") if isinstance(model, dict) else None
    if not isinstance(path, str) or (merged.order["model.path"] <= facts_order and merged.values["architecture"]):
        return
    facts, place = read_facts(paths.expanded(catalog.asset(path))), Place(Kind.DERIVED, f"{path}/config.json")
    if facts is None:
        facts, place = _known_facts(path)
    merged.lay(Layer.at(place, {"architecture": {"_delete_": True, **facts} if facts else None}))


def _known_facts(path: str) -> tuple[dict[str, Any] | None, Place]:
    needle = re.compile(rf"""path=["']{re.escape(path)}["']""")
    for name in catalog.names("models"):
        if needle.search(catalog.part_path("models", name).read_text(encoding="utf-8")):
            found = read_part("models", name)
            return found.values.get("architecture"), found.place(())
    return None, Place(Kind.DERIVED, "unknown model")


def _difference(base: Any, values: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        old = base.get(key, ...)
        if isinstance(value, dict) and isinstance(old, dict):
            inner = _difference(old, value)
            if inner:
                found[key] = inner
        elif value != old:
            found[key] = value
    return found
