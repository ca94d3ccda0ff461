"""A recipe: its checked values, each with its origin, and the overrides that changed it. `standalone` writes its text.

`loading` makes recipes; this module reads the base recipe alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from operator import attrgetter
from typing import NamedTuple

from tuner.assets import TEMPLATES
from tuner.errors import Option, RecipeError, Text, UsageError
from tuner.files import JsonObject, is_writable
from tuner.hooks import other_tools
from tuner.notebook import lines_of, table
from tuner.recipes import catalog, standalone
from tuner.recipes.merging import DEFAULT, Kind, Layer, Origin, Place, leaves
from tuner.recipes.names import Name
from tuner.recipes.recipe_file import MAX_TEXT, RecipeFile, read_file
from tuner.recipes.schema import RecipeConfig

_MAX_WARNINGS = 3
"""The warnings that the repr of a recipe shows."""


@dataclass(frozen=True)
class Overrides:
    """The changes of a command line: a value for each flag, and pairs in order: (--set, KEY=VALUE), (--lr, 1e-4).

    `data` is one value of --data, or several: paths, hub ids, or mixtures such as "a.jsonl,b.jsonl:0.5".
    `method` is for a model without a recipe; `val_split` is a fraction; `ds` are KEY=VALUE for DeepSpeed's config;
    `nvme` is the folder on each node's disk that a run may swap to; `rewards` are types of rewards, which replace the
    recipe's.
    `values` are what Python's callers change, by key; `python_values` makes them. The pairs are laid over them.
    """

    model: str | None = None
    data: str | Sequence[str] | None = None
    seed: int | None = None
    pairs: Sequence[tuple[str, str]] = ()
    adapter: str | None = None
    val: str | None = None
    val_split: float | None = None
    epochs: float | None = None
    method: str | None = None
    ds: Sequence[str] = ()
    nvme: str | None = None
    rewards: Sequence[str] = ()
    values: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.val is not None and self.val_split is not None:
            message = f"both {Option('val')} and {Option('val_split')} set the validation rows"
            raise UsageError(message, where=Option("val"), fix="Use one of them.")
        texts = {name: [getattr(self, name)] for name in ("model", "adapter", "val", "nvme")}
        texts |= {"data": [*self.data_sets], "ds": [*self.ds], "rewards": [*self.rewards]}
        typed = ((Option(name), text) for name, several in texts.items() for text in several)
        for flag, text in (*typed, *self.pairs):
            if text is not None and not is_writable(text):
                raise RecipeError(f"{text!r} is not UTF-8", where=flag, fix="Rename the file or folder.")

    @property
    def data_sets(self) -> tuple[str, ...]:
        """The values of --data."""
        return (self.data,) if isinstance(self.data, str) else tuple(self.data or ())


class LoadArguments(NamedTuple):
    """The arguments that a recipe was loaded with; without a `name`, the overrides name a model."""

    name: Name | None
    overrides: Overrides
    allow_code: bool = False


_FACTS = ("architecture", "teacher_architecture")
"""The blocks of what is known of models: a hub's config.json may be on one node and not on another."""


@dataclass(frozen=True, repr=False)
class Recipe:
    """One recipe, merged and checked. `origins` has one entry for each leaf, by dotted key.

    `ds` changes the chosen DeepSpeed config: KEY=VALUE; `nvme` is the folder that it may swap to. `zero.choice` reads
    both. `arguments` are those of `loading.load`.
    """

    name: str
    config: RecipeConfig
    origins: dict[str, Origin]
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    ds: tuple[str, ...] = ()
    arguments: LoadArguments | None = None
    nvme: str | None = None

    def __post_init__(self) -> None:
        for name in ("warnings", "notes"):
            object.__setattr__(self, name, tuple(map(Text, getattr(self, name))))

    @property
    def values(self) -> JsonObject:
        """The recipe as plain nested values."""
        return self.config.model_dump()

    @property
    def asked(self) -> JsonObject:
        """What was asked for, by dotted key: not what was derived of it here, nor what is known of its models here."""
        values: JsonObject = {}
        for key, value in leaves(self.values):
            origin = self.origins.get(key, DEFAULT)
            places = [(origin.place, value), *((old.place, old.value) for old in origin.overridden)]
            if key.partition(".")[0] not in _FACTS:
                values |= next(
                    ({key: asked_value} for place, asked_value in places if place.kind is not Kind.DERIVED), {}
                )
        return values

    def __repr__(self) -> str:
        return "\n".join((f"Recipe {self.name!r}", *lines_of(self._facts())))

    def _repr_html_(self) -> str:
        return table(self._facts(), title=f"Recipe {self.name}")

    def _facts(self) -> list[tuple[str, str]]:
        """Return the most important values, for people."""
        config, steps = self.config, self.config.train_cfg
        data, optimizer = config.train_dataloader.dataset, config.optim_wrapper.optimizer
        bits = f", {config.quantization.bits} bits" if config.quantization else ""
        method = f"LoRA r={config.adapter.r}" if config.adapter else "all weights"
        rows = ", ".join(str(data_set.path) for data_set in data.data_sets)
        packing = ", packed" if data.packing else ""
        epochs = "1 epoch" if steps.max_epochs == 1 else f"{steps.max_epochs} epochs"
        val = config.val_dataloader.dataset if config.val_dataloader else None
        held_out = f"{100 * data.val_split:.3g} % of the rows" if data.val_split else None
        batch = steps.global_batch_size or f"{config.train_dataloader.batch_size} a process"
        deepspeed = config.deepspeed if isinstance(config.deepspeed, str) else "a config of its own"
        return [
            ("model", f"{config.model.path}{bits}"),
            ("method", f"{config.objective.type}, {method}"),
            ("data", f"{rows}, up to {data.max_length:,} tokens{packing}"),
            ("validation", held_out or (str(val.path) if val else "none")),
            ("length", f"{steps.max_steps:,} steps" if steps.max_steps else epochs),
            ("batch size", str(batch)),
            ("optimizer", f"{optimizer.type}, lr {optimizer.lr:g}, {config.param_scheduler.type}"),
            ("deepspeed", deepspeed),
            *([("overrides", overrides)] if (overrides := self._overrides()) else []),
            *(("warning", text) for text in self.warnings[:_MAX_WARNINGS]),
        ]

    def _overrides(self) -> str:
        """Return the caller's changes as keyword arguments."""
        if self.arguments is None:
            return ""
        changes = {key: value for key, value in vars(self.arguments.overrides).items() if key != "values" and value}
        return ", ".join(f"{key}={value!r}" for key, value in {**changes, **self.arguments.overrides.values}.items())

    def settled(self, values: Mapping[str, object], place: Place) -> Recipe:
        """Return the recipe with other values by `block.key`, which are not checked again, and with their place."""
        settled = {key: self.origins[key].over(place, attrgetter(key)(self.config)) for key in values}
        return replace(self, config=self.config.with_values(values), origins={**self.origins, **settled})

    def with_template_text(self) -> Recipe:
        """Return the recipe with the text of a chat template from the user's catalog, which a rank does not search."""
        text = lasting_template(self.config.model.chat_template)
        return replace(self, config=self.config.with_values({"model.chat_template": text}))

    def standalone(self, note: str = "") -> str:
        """Return the text of one commented file with this recipe, without any base."""
        return standalone.python_text(self.name, self._lasting, read_base().values, note)

    def standalone_yaml(self, note: str = "") -> str:
        """Return the same as YAML, without comments."""
        return standalone.yaml_text(self.name, self._lasting, note)

    @property
    def _lasting(self) -> JsonObject:
        values = self.values
        values["model"]["chat_template"] = lasting_template(values["model"]["chat_template"])
        return values


def lasting_template(name: str | None) -> str | None:
    """Return the value of `model.chat_template` for a named template that works without the user's catalog: its text.

    A template that is too long for a recipe is named by its path; one of the package by its name.
    """
    if name is None or name not in catalog.names(TEMPLATES):
        return name
    file = catalog.part_file(TEMPLATES, name)
    if file.is_ours:
        return name
    text = catalog.chat_template(name)
    return text if len(text) <= MAX_TEXT else str(file.path)


def layer_of(file: RecipeFile) -> Layer:
    """Return a file's values as a layer, without its helpers.

    Raises:
        RecipeError: a key that no recipe has.
    """
    known = RecipeConfig.model_fields.keys()
    if unknown := next((key for key in file.values if key not in known | file.helpers | {"_base_"}), None):
        hint = other_tools().key_hint(unknown, sorted(known))
        raise RecipeError(f"no key {unknown!r}", where=file.where((unknown,)), fix=hint)
    return Layer({key: value for key, value in file.values.items() if key in known}, file.place)


@cache  # every recipe begins with it, and a check asks for the default of each key that a file sets
def read_base() -> RecipeFile:
    """Return the base recipe's file: every default. All callers share its values: do not change them."""
    return read_file(catalog.BASE, "configs/base.py", Kind.PACKAGE)


def base_layer() -> Layer:
    """Return the base recipe, which every recipe is laid over."""
    return Layer(read_base().values, read_base().place)
