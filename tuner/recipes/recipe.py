"""A recipe: layers of values laid over each other, every value with where it came from and what it beat.

Order, later wins: base, model, objective, method, dataset, epochs, recipe files, overrides. It starts nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tuner.errors import RecipeError, did_you_mean
from tuner.recipes import catalog
from tuner.recipes.architecture import read_facts
from tuner.recipes.flatten import flatten
from tuner.recipes.overrides import parse_override
from tuner.recipes.schema import RecipeConfig
from tuner.recipes.source import Keys, Source, read_file, read_text

_MAX_BASES = 8


@dataclass(frozen=True)
class Origin:
    """Where a value came from, and the values it beat, latest first."""

    source: str
    beat: tuple[tuple[Any, str], ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "from": self.source,
            "beat": [{"value": value, "from": source} for value, source in self.beat],
        }


@dataclass(frozen=True)
class Layer:
    """Values to lay over those before, and how to name where each stands."""

    values: dict[str, Any]
    where: Callable[[Keys], str]


@dataclass(frozen=True)
class Recipe:
    """One recipe, merged and checked. `origins` is keyed by dotted path, one entry a leaf."""

    name: str
    config: RecipeConfig
    origins: dict[str, Origin]

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


def load(name: str, overrides: Overrides | None = None, *, allow_code: bool = False) -> Recipe:
    """Load a recipe by a composed name, by a catalog recipe's name, or from a file.

    Raises:
        RecipeError: an unknown name, a file that is no data, or a value that does not fit the schema.
    """
    merged = _Merged()
    for layer in _layers(name, allow_code):
        merged.lay(layer)
    for layer in _override_layers(overrides or Overrides(), merged):
        merged.lay(layer)
    _derive_architecture(merged)
    config = _validate(merged)
    merged.origins = {key: merged.origins.get(key, Origin("default")) for key in _leaves(config.model_dump())}
    return Recipe(Path(name).stem if _is_path(name) else name, config, merged.origins)


def anchored(recipe: Recipe, deepspeed: str | dict[str, Any]) -> Recipe:
    """Return the recipe with its local paths made absolute and its DeepSpeed choice pinned: it runs from anywhere."""
    config = recipe.config.model_dump()
    config["deepspeed"] = deepspeed
    _anchor(config["model"], "path")
    if str(config["model"]["chat_template"]).endswith(".jinja"):
        _anchor(config["model"], "chat_template")
    for key in ("train_dataloader", "val_dataloader"):
        if config[key]:
            _anchor(config[key]["dataset"], "path")
    return Recipe(recipe.name, RecipeConfig.model_validate(config), recipe.origins)


def _anchor(block: dict[str, Any], key: str) -> None:
    path = block[key]
    if path and Path(path).expanduser().exists():
        block[key] = str(Path(path).expanduser().absolute())


def _is_path(name: str) -> bool:
    return name.endswith(".py") or "/" in name


def _base() -> Source:
    return read_file(catalog.BASE, "configs/base.py")


def _layers(name: str, allow_code: bool) -> Iterator[Layer]:
    base = _base()
    yield Layer(base.values, base.where)
    if _is_path(name):
        yield from _file_layers(Path(name), name, allow_code)
    else:
        yield from _named_layers(name)


def _named_layers(name: str, skip: str | None = None) -> Iterator[Layer]:
    stem, epochs = catalog.with_epochs(name)
    for candidate in (name, stem):
        if candidate in catalog.names("recipes") and candidate != skip:
            yield from _catalog_recipe(candidate)
            if candidate != name:
                yield _epochs(name, epochs)
            return
    parts = catalog.parse(name)
    for path in parts.files():
        yield _layer(read_file(path, str(path.relative_to(catalog.PACKAGE))))
    yield _epochs(name, parts.epochs)


def _catalog_recipe(name: str) -> Iterator[Layer]:
    path = catalog.part_path("recipes", name)
    source = read_file(path, str(path.relative_to(catalog.PACKAGE)))
    yield from _named_layers(str(source.values.get("_base_", "")), skip=name)
    yield _layer(source)


def _epochs(name: str, epochs: int | None) -> Layer:
    return Layer({"train_cfg": {"max_epochs": epochs}}, lambda _: f"name {name}")


def _file_layers(path: Path, shown: str, allow_code: bool, depth: int = 0) -> Iterator[Layer]:
    if depth > _MAX_BASES:
        raise RecipeError(f"more than {_MAX_BASES} files build on each other", where=shown, fix="Is there a circle?")
    source = _read_code(path, shown) if allow_code else read_file(path, shown)
    bases = source.values.get("_base_", [])
    for base in [bases] if isinstance(bases, str) else bases:
        if not isinstance(base, str):
            raise RecipeError(f"_base_ = {base!r} is not a name", where=source.where(("_base_",)))
        if _is_path(base):
            inner = path.parent / base
            yield from _file_layers(inner, str(inner), allow_code, depth + 1)
        else:
            yield from _named_layers(base)
    yield _layer(source, allow_code)


def _read_code(path: Path, shown: str) -> Source:
    from mmengine.config import (
        Config,  # --allow-code only: everything else reads recipes without running them
    )

    if not path.is_file():
        raise RecipeError("cannot read the recipe: no such file", where=shown)
    return Source(shown, dict(Config.fromfile(path).to_dict()))


def _layer(source: Source, allow_code: bool = False) -> Layer:
    known = set(RecipeConfig.model_fields)
    values: dict[str, Any] = {}
    for key, value in source.values.items():
        if key in known:
            values[key] = value
        elif key not in source.helpers and key != "_base_" and not (allow_code and not did_you_mean(key, known)):
            raise RecipeError(f"no key {key!r}", where=source.where((key,)), fix=_key_hint(key, sorted(known)))
    return Layer(values, source.where)


def _key_hint(key: str, known: Sequence[str]) -> str:
    return did_you_mean(key, known) or f"Known here: {', '.join(known)}."


def _override_layers(overrides: Overrides, merged: _Merged) -> Iterator[Layer]:
    if overrides.model is not None:
        values: dict[str, Any] = {"model": {"path": overrides.model, "revision": None}}
        yield Layer(values, lambda _: f"--model {overrides.model}")
    if overrides.data is not None:
        dataset = {"path": overrides.data, "name": None, "split": "train", "format": None}
        values = {"train_dataloader": {"dataset": dataset}, "val_dataloader": None}
        yield Layer(values, lambda _: f"--data {overrides.data}")
    if overrides.seed is not None:
        yield Layer({"randomness": {"seed": overrides.seed}}, lambda _: f"--seed {overrides.seed}")
    for flag, text in overrides.pairs:
        keys, value = parse_override(text, flag, merged.values)
        _refuse_below_none(keys, merged.values, f"{flag} {text}")
        yield Layer(_nested(keys, value), lambda _, flag=flag, text=text: f"{flag} {text}")  # type: ignore[misc]


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


@dataclass
class _Merged:
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    order: dict[str, int] = field(default_factory=dict)
    layers: int = 0

    def lay(self, layer: Layer) -> None:
        self.layers += 1
        self._lay(self.values, layer.values, (), layer)

    def _lay(self, below: dict[str, Any], above: dict[str, Any], prefix: Keys, layer: Layer) -> None:
        for key, value in above.items():
            keys = (*prefix, key)
            old = below.get(key)
            if isinstance(value, dict) and isinstance(old, dict) and not value.get("_delete_"):
                self._lay(old, value, keys, layer)
                continue
            if isinstance(value, dict):
                value = {name: item for name, item in value.items() if name != "_delete_"}
            self._forget(".".join(keys), key in below, old, value)
            below[key] = {} if isinstance(value, dict) and value else value
            self._record(keys, value, layer)
            if isinstance(value, dict) and value:
                self._lay(below[key], value, keys, layer)

    def _forget(self, dotted: str, existed: bool, old: Any, new: Any) -> None:
        inner = [key for key in self.origins if key.startswith(f"{dotted}.")]
        before = self.origins.get(dotted) or (self.origins[inner[0]] if inner else None)
        for key in inner:
            del self.origins[key], self.order[key]
        if existed and before and old != new:
            self.origins[dotted] = Origin(before.source, ((old, before.source), *before.beat))

    def _record(self, keys: Keys, value: Any, layer: Layer) -> None:
        dotted = ".".join(keys)
        before = self.origins.pop(dotted, None)
        self.order[dotted] = self.layers
        if not (isinstance(value, dict) and value):
            self.origins[dotted] = Origin(layer.where(keys), before.beat if before else ())


def _derive_architecture(merged: _Merged) -> None:
    """A model path that is newer than the facts beside it makes those facts another model's."""
    facts_order = max((order for key, order in merged.order.items() if key.split(".")[0] == "architecture"), default=0)
    path = merged.values["model"].get("path")
    if not isinstance(path, str) or (merged.order["model.path"] <= facts_order and merged.values["architecture"]):
        return
    facts, source = read_facts(Path(catalog.asset(path))), f"{path}/config.json"
    if facts is None:
        facts, source = _known_facts(path)
    merged.lay(Layer({"architecture": {"_delete_": True, **facts} if facts else None}, lambda _: source))


def _known_facts(path: str) -> tuple[dict[str, Any] | None, str]:
    needle = re.compile(rf"""path=["']{re.escape(path)}["']""")
    for name in catalog.names("models"):
        file = catalog.part_path("models", name)
        text = file.read_text(encoding="utf-8")
        if needle.search(text):
            return read_text(text, name).values.get("architecture"), str(file.relative_to(catalog.PACKAGE))
    return None, "unknown model"


def _validate(merged: _Merged) -> RecipeConfig:
    try:
        return RecipeConfig.model_validate(merged.values)
    except ValidationError as error:
        lines = [_explain(dict(detail), merged) for detail in error.errors(include_url=False)]
        first = lines[0]
        more = "".join(f"\n{line}" for line in lines[1:])
        raise RecipeError(first.what + more, where=first.where if not more else None, fix=first.fix) from None


def _explain(detail: dict[str, Any], merged: _Merged) -> RecipeError:
    keys = tuple(str(key) for key in detail["loc"])
    value = detail.get("input")
    # A union's branch names end the location ('target_modules', 'str'): keep what is a key of the recipe.
    while keys and not _holds(merged.values, keys) and detail["type"] not in ("missing", "extra_forbidden"):
        keys = keys[:-1]
    dotted = ".".join(keys)
    origin = merged.origins.get(dotted) or next(
        (origin for key, origin in merged.origins.items() if key.startswith(f"{dotted}.")), None
    )
    where = origin.source if origin else None
    if detail["type"] == "extra_forbidden":
        known = _siblings(keys)
        return RecipeError(f"no key {dotted!r}", where=where, fix=_key_hint(keys[-1], known))
    if detail["type"] == "missing":
        return RecipeError(f"{dotted} is missing", where=_block_source(keys[:-1], merged), fix=f"Set {dotted}.")
    message = detail["msg"].removeprefix("Value error, ")
    if not keys:
        return RecipeError(message, where=where)
    return RecipeError(f"{dotted} = {_short(value)}: {message[:1].lower()}{message[1:]}", where=where)


def _block_source(keys: Keys, merged: _Merged) -> str | None:
    prefix = ".".join(keys)
    return next((origin.source for key, origin in merged.origins.items() if key.startswith(prefix)), None)


def _siblings(keys: Keys) -> list[str]:
    from tuner.recipes.overrides import schema_keys  # only on the way to an error

    return [known[-1] for known in schema_keys() if known[:-1] == keys[:-1]]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _holds(values: Any, keys: Keys) -> bool:
    for key in keys:
        if not isinstance(values, dict) or key not in values:
            return False
        values = values[key]
    return True


def _leaves(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _difference(base: Any, values: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        old = base.get(key, ...)
        if isinstance(value, dict) and isinstance(old, dict):
            inner = _difference(old, value)
            if inner:
                found[key] = inner
        elif value != old or type(value) is not type(old):
            found[key] = value
    return found
