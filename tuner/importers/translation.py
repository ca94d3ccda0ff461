"""Translates another tool's keys to keys of a recipe, by a table, and records the outcome for every key.

This module knows no tool: `Tool` holds a tool's table, and the modules named after tools fill it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from types import UnionType
from typing import Literal, NamedTuple, Union, get_args, get_origin

from tuner.errors import RecipeError, Text, brief_repr, did_you_mean
from tuner.files import JsonObject
from tuner.importers import key_tables
from tuner.importers.aliases import Alias
from tuner.importers.document import ForeignConfig, Keys, Value, walk
from tuner.importers.key_tables import Changes, Reason
from tuner.recipes.schema import schema_keys
from tuner.recipes.schema.objectives import objectives_with

_NUMBERS = ("betas", "loss_weights")
"""Keys of a recipe that hold several numbers."""
_MAX_COMPARED = 50
"""Unknown keys that are compared with the tool's; each takes a few milliseconds."""


class Outcome(StrEnum):
    """How a value was translated."""

    TAKEN = "taken"
    TRANSLATED = "translated"
    CHANGED = "changed in meaning"
    LEFT_OUT = "no counterpart"
    UNKNOWN = "not a key of the tool"


@dataclass(frozen=True)
class Setting:
    """One key and its value in the source, with file and line.

    Args:
        is_default: It is the tool's default, not written.
        written: The key as the file has it, where `key` is that of another version of the tool.
    """

    key: str
    value: Value
    where: str
    keys: Keys = ()
    is_default: bool = False
    written: str | None = None

    @property
    def name(self) -> str:
        """What the user knows the key by."""
        return self.written or self.key

    def beside(self, key: str) -> str:
        """Return the whole name of another key in the block of this one."""
        return ".".join((*self.keys[:-1], key))

    def wrong(self, why: str, fix: str | None = None) -> RecipeError:
        """Return an error about the value."""
        return RecipeError(f"{self.name} = {brief_repr(self.value)}: {why}", where=self.where, fix=fix)

    def number(self) -> float:
        """Return a finite number; a text of digits is one too.

        Raises:
            RecipeError: the value is not a finite number.
        """
        try:
            number = self.value if isinstance(self.value, int | float) else float(self.value)
            if not isinstance(self.value, bool) and math.isfinite(number):
                return number
        except (TypeError, ValueError, OverflowError):
            pass
        raise self.wrong("not a finite number")

    def whole(self) -> int:
        """Return a whole number; raises as `number` does."""
        number = self.number()
        if number != int(number):
            raise self.wrong("not a whole number")
        return int(number)

    def truth(self) -> bool:
        """Return true or false; texts such as "yes" and "0" count too.

        Raises:
            RecipeError: the value is neither.
        """
        word = str(self.value).lower()
        if word not in ("true", "false", "yes", "no", "1", "0"):
            raise self.wrong("neither true nor false")
        return word in ("true", "yes", "1")

    def words(self, separator: str | None = ",") -> list[str]:
        """Return the texts of a list, or the parts of one text, without blanks around them.

        Args:
            separator: Between the parts of a text; None: blanks.

        Raises:
            RecipeError: the value is neither.
        """
        parts = str(self.value).split(separator) if isinstance(self.value, str | int | float) else self.value
        if not isinstance(parts, list | tuple) or not all(isinstance(part, str | int | float) for part in parts):
            raise self.wrong("not a text or a list of texts")
        return [word for part in parts if (word := str(part).strip())]


@dataclass(frozen=True)
class Entry:
    """The outcome for one setting: `ours` is the recipe's key and value for it, `why` explains a difference.

    `is_learned`: because of the difference the recipe learns something else: from other rows, tokens or prompts, with
    another loss, or in other weights.
    """

    setting: Setting
    outcome: Outcome
    ours: str | None = None
    why: str | None = None
    is_learned: bool = False

    def to_json(self) -> dict[str, str | bool | None]:
        of_source = {"key": self.setting.name, "value": str(self.setting.value), "where": self.setting.where}
        shown = {"outcome": str(self.outcome), "ours": self.ours, "why": self.why}
        return {**of_source, **shown, "changes_what_is_learned": self.is_learned}


Function = Callable[["Translation", Setting], None]
Rule = Alias | Reason | Function
"""How to translate a key: a key of a recipe | why there is no counterpart | a function that translates it."""


@dataclass(frozen=True)
class Tool:
    """A tool's keys and defaults.

    Attributes:
        name: The tool's name, as in messages.
        table: Key -> rule. A key with a `*` matches the keys in `others` that fit it.
        defaults: Returns the tool's defaults that differ from those of a recipe.
        finish: Is called after all keys, to decide what depends on several of them.
        prepare: Is called before the keys: finds the objective and the method.
        begin: Is called first, to complete the document, for example to resolve `${...}`.
        others: Keys that only a `*` of the table matches. None: a `*` matches any key.
    """

    name: str
    table: Mapping[str, Rule]
    defaults: Callable[[ForeignConfig], Mapping[str, Value]] = lambda _: {}
    finish: Callable[[Translation], None] = lambda _: None
    prepare: Callable[[Translation], None] = lambda _: None
    begin: Callable[[ForeignConfig], ForeignConfig] = lambda document: document
    others: frozenset[str] | None = None


class Chosen(NamedTuple):
    """A value of the recipe, and the setting of the source that it comes from."""

    value: Value
    setting: Setting


@dataclass
class Translation:
    """A document that is being translated to a recipe."""

    document: ForeignConfig
    tool: Tool
    settings: dict[str, Setting] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    chosen: dict[Keys, Chosen] = field(default_factory=dict)
    """The recipe's keys that have a value."""
    model: Setting | None = None
    method: str = "full"
    objective: str = "sft"
    datasets: list[JsonObject] = field(default_factory=list)
    """Training data: blocks with the keys of a mixture's entry, and max_rows if it is set."""
    validation: list[JsonObject] = field(default_factory=list)
    system: str | None = None
    """System prompt for conversations without one."""
    added_losses: dict[str, Setting] = field(default_factory=dict)
    """Losses beside those of DPO -> the setting with the weight."""
    divided_by: Setting | None = None
    """The number of ranks that divide the experts of each layer."""
    has_images: bool = False
    """Whether the rows have images."""
    of_images: dict[str, Setting] = field(default_factory=dict)
    """Settings that count if the model reads images (`image_keys`): part of a model or key of a recipe -> setting."""
    obstacle: str | None = None
    """Why the recipe would train something else than its source, if it does."""
    num_unknown: int = 0
    """Keys so far that the tool does not have."""

    def value(self, key: str, default: Value = None) -> Value:
        """Return the source's value for a key, else the tool's default, else `default`."""
        setting = self.settings.get(key)
        return default if setting is None or setting.value is None else setting.value

    def ours(self, keys: Keys, default: Value = None) -> Value:
        """Return the recipe's value for a key, or `default` if it has none yet."""
        return self.chosen[keys].value if keys in self.chosen else default

    def number(self, key: str, default: float) -> float:
        """Return the number at a key, or `default` if there is no value. Raises as `Setting.number` does."""
        return default if self.value(key) is None else self.settings[key].number()

    def whole(self, key: str, default: int) -> int:
        """Return the whole number at a key, or `default` if there is no value. Raises as `Setting.whole` does."""
        return default if self.value(key) is None else self.settings[key].whole()

    def words(self, key: str) -> list[str]:
        """Return the words at a key, none if there is no value. Raises as `Setting.words` does."""
        return [] if self.value(key) is None else self.settings[key].words(None)

    def is_on(self, key: str) -> bool:
        """Return whether the switch at a key is on; without a value it is off. Raises as `Setting.truth` does."""
        return self.value(key) is not None and self.settings[key].truth()

    def is_of(self, objectives: Collection[str], setting: Setting) -> bool:
        """Return whether the objective is one of these; if not, record that the setting belongs to them."""
        if self.objective not in objectives:
            self.leave(setting, f"belongs to {' and '.join(objectives)}, and this is {self.objective}")
        return self.objective in objectives

    def set(
        self,
        setting: Setting,
        our_key: str,
        value: Value,
        why: str | None = None,
        *,
        changed: bool = False,
        is_learned: bool = False,
    ) -> None:
        """Set the recipe's key `our_key` for a setting. A default never replaces a value that was written.

        Args:
            setting: The key and the value of the source.
            our_key: The recipe's key.
            value: The recipe's value.
            why: What differs.
            changed: The value does not mean the same.
            is_learned: See `Entry`.

        Raises:
            RecipeError: the value does not have the type of the recipe's key.
        """
        keys = tuple(our_key.split("."))
        value = coerced(value, keys, setting)
        if setting.is_default and keys in self.chosen and not self.chosen[keys].setting.is_default:
            return
        self.chosen[keys] = Chosen(value, setting)
        is_same = setting.value == value and type(setting.value) is type(value) and why is None
        outcome = Outcome.CHANGED if changed else Outcome.TAKEN if is_same else Outcome.TRANSLATED
        self.note(setting, outcome, f"{our_key} = {value!r}", why, is_learned=is_learned)

    def note(
        self,
        setting: Setting,
        outcome: Outcome,
        our_setting: str | None = None,
        why: str | None = None,
        *,
        is_learned: bool = False,
    ) -> None:
        """Record the outcome for a setting; `is_learned` as for `Entry`."""
        self.entries.append(Entry(setting, outcome, our_setting, None if why is None else Text(why), is_learned))

    def change(self, setting: Setting, why: str, our_setting: str | None = None) -> None:
        """Record that the recipe learns something else because of a setting."""
        self.note(setting, Outcome.CHANGED, our_setting, why, is_learned=True)

    def note_way(self, name: str, why: str) -> None:
        """Record a difference that no key of the config sets; `name` stands in place of a key."""
        setting = Setting(name, None, f"{self.tool.name}'s way", is_default=True)
        self.note(setting, Outcome.CHANGED, why=why)

    def leave(self, setting: Setting, why: str) -> None:
        """Record that a setting has no counterpart."""
        self.note(setting, Outcome.LEFT_OUT, why=why)

    def inner(self, keys: Keys, value: Value) -> Setting:
        """Return the setting for a value inside a block or a list of the source."""
        return Setting(".".join(keys), value, self.document.where(keys), keys)

    def check_block(
        self, title: str, value: Mapping[str, Value], keys: Keys, read: Collection[str], reasons: Mapping[str, Reason]
    ) -> None:
        """Record every key of a block that has no counterpart.

        Args:
            title: What a message calls the block.
            value: The block.
            keys: The keys that lead to the block.
            read: Keys of the block that are translated.
            reasons: Its other keys, each with the reason.
        """
        for name, inner in value.items():
            setting = self.inner((*keys, str(name)), inner)
            if name not in read and name not in reasons:
                self.note_unknown(setting, f"in {title}", (*read, *reasons))
            elif name not in read and inner is not None:
                self.apply(reasons[name], setting)

    def note_unknown(self, setting: Setting, where: str, known: Collection[str]) -> None:
        """Record a key that the tool does not have, with the key that it looks like."""
        self.num_unknown += 1
        near = ""
        if self.num_unknown <= _MAX_COMPARED:
            near = did_you_mean(setting.keys[-1] if where else setting.key, sorted(known))
        elif self.num_unknown == _MAX_COMPARED + 1:
            near = "From here on, unknown keys were not compared with known ones."
        place = f" {where}" if where else ""
        self.note(setting, Outcome.UNKNOWN, why=f"{self.tool.name} has no such key{place}. {near}".rstrip())

    def run(self) -> None:
        """Translate every key of the document.

        Raises:
            RecipeError: a value has the wrong type.
        """
        self._collect()
        self.tool.prepare(self)
        listed = (*self.tool.table, *(self.tool.others or ()))
        names = [key for key in listed if "*" not in key and not key.startswith("_")]
        for setting in list(self.settings.values()):
            rule = self._rule(setting)
            if rule is None:
                self.note_unknown(setting, "", names)
            elif setting.value is not None and not (setting.is_default and setting.key not in self.tool.table):
                self.apply(rule, setting)
        self.tool.finish(self)
        for line in self.document.more_calls:
            call = Setting("a further call", None, f"{self.document.name}:{line}")
            self.leave(call, "one recipe is one training: import this call on its own, as a command line")

    def check_all_recorded(self) -> None:
        """Assert that an outcome is recorded for every key."""
        missing = {
            key for key, setting in self.settings.items() if setting.value is not None and not setting.is_default
        }
        missing -= {entry.setting.key for entry in self.entries}
        assert not missing, f"{sorted(missing)} are unaccounted for"

    def _collect(self) -> None:
        for keys, value in walk(self.document.values, self.tool.table):
            key = ".".join(keys)
            if key not in self.tool.table and key.removeprefix("no_") in self.tool.table and value is True:
                key, value = key.removeprefix("no_"), False  # as Hugging Face's argument parser does
            written = self.document.written.get(key)
            self.settings[key] = Setting(key, value, self.document.where(keys), keys, written=written)
        for key, value in self.tool.defaults(self.document).items():
            if self.value(key) is None:
                self.settings[key] = Setting(key, value, f"{self.tool.name}'s default", tuple(key.split(".")), True)

    def _rule(self, setting: Setting) -> Rule | None:
        """Return the rule for a setting; None if the tool has no such key."""
        table = self.tool.table
        if setting.key in table:
            return table[setting.key]
        other_keys = self.tool.others
        if other_keys is None or key_tables.has(other_keys, setting.key):
            # An empty block has the name of the keys that it could hold.
            names = setting.key, f"{setting.key}."
            for pattern, rule in table.items():
                if "*" in pattern and any(fnmatchcase(name, pattern) for name in names):
                    return rule
        if setting.is_default:
            return ""  # of a block that the config does not have
        return recorded_with("the values that use it") if setting.keys[0] in self.document.used else None

    def apply(self, rule: Rule, setting: Setting) -> None:
        """Translate a setting by a rule."""
        if isinstance(rule, str):
            self.leave(setting, rule)
        elif isinstance(rule, Changes) and rule.is_harmless(setting.value):
            self.note(setting, Outcome.TAKEN, why="as tuner does it")
        elif isinstance(rule, Changes):
            self.change(setting, rule.why)
        elif isinstance(rule, Alias):
            self._alias(rule, setting)
        else:
            rule(self, setting)

    def _alias(self, alias: Alias, setting: Setting) -> None:
        if alias.key is None:
            self.leave(setting, alias.instead or "")
            return
        value = setting.value
        if alias.values and not isinstance(value, list | dict):
            value = alias.value(str(value))
            if value is None:
                self.leave(setting, alias.instead or "")
                return
            value = None if value == "None" else value
        block, _, inner_key = alias.key.partition(".")
        name = inner_key.partition(".")[0]
        if block == "objective" and not self.is_of(objectives_with(name), setting):
            return
        if name == "loss_type" and self.objective == "dpo" and isinstance(value, str):
            value = [value]
        self.set(setting, alias.key, value, self.replaced(setting, alias.key, value))

    def replaced(self, setting: Setting, our_key: str, value: Value) -> str | None:
        """Return what to say if `value` replaces one that another written key chose for `our_key`; else None."""
        old = self.chosen.get(tuple(our_key.split(".")))
        if old is None or setting.is_default or old.setting.is_default or old.setting.keys == setting.keys:
            return None
        is_same = old.value == coerced(value, tuple(our_key.split(".")), setting)
        return None if is_same else f"it replaces {old.setting.name} = {old.setting.value!r}"


def noted(outcome: Outcome, why: str) -> Function:
    """Return the rule for a key that sets nothing."""
    return lambda t, setting: t.note(setting, outcome, why=why)


def recorded_with(other: str) -> Function:
    """Return the rule for a key that is translated together with another one."""
    return noted(Outcome.TAKEN, f"with {other}")


def when_on(our_key: str, value: Value, off: str, why: str | None = None) -> Function:
    """Return the rule for a switch that sets the recipe's `our_key` to a value; `off` says what it means if it is off.

    Args:
        why: What differs from the tool if it is on.
    """

    def rule(t: Translation, setting: Setting) -> None:
        if setting.truth():
            t.set(setting, our_key, value, why)
        else:
            t.leave(setting, off)

    return rule


def of_objective(objectives: str, rule: Rule, other: str | None = None) -> Function:
    """Return the rule for a key of some objectives; `other` says why it has no counterpart with another one."""

    def guarded(t: Translation, setting: Setting) -> None:
        if other is not None and t.objective not in objectives.split():
            t.leave(setting, other)
        elif t.is_of(objectives.split(), setting):
            t.apply(rule, setting)

    return guarded


def unlike_default(our_key: str, why: str) -> Function:
    """Return the rule for a key whose default means something else than the recipe's; `why` says what it means."""

    def rule(t: Translation, setting: Setting) -> None:
        t.set(setting, our_key, setting.value, why if setting.is_default else None, changed=setting.is_default)

    return rule


def coerced(value: Value, keys: Keys, setting: Setting) -> Value:
    """Return a value converted to the type of the recipe's key: YAML and command lines may hold numbers as texts.

    Raises:
        RecipeError: the value does not have that type.
    """
    annotation = schema_keys().get(keys)
    options = _options(annotation)
    if value is None or annotation is None or str in options:
        return _listed(value, options) if isinstance(value, str) else value
    if Literal in options and isinstance(value, str) and value.isdecimal():
        return int(value)
    if isinstance(value, list | tuple) and keys[-1] in _NUMBERS:
        return [replace(setting, value=number).number() for number in value]
    typed = replace(setting, value=value)
    if bool in options:
        return typed.truth()
    if int in options and float not in options:
        return typed.whole()
    if float in options:
        return typed.number()
    return _listed(value, options) if isinstance(value, str) else value


def _options(annotation: object) -> set[object]:
    """Return the plain types in an annotation, without unions and `Annotated`."""
    if get_origin(annotation) in (Union, UnionType) or hasattr(annotation, "__metadata__"):
        inner = get_args(annotation)[:1] if hasattr(annotation, "__metadata__") else get_args(annotation)
        return set().union(*map(_options, inner))
    return {get_origin(annotation) or annotation}


def _listed(value: str, options: set[object]) -> Value:
    """Return a text such as `[a, b]` as a list if the recipe's key takes one; also `a,b` if the key takes no text."""
    is_list = value[:1] + value[-1:] == "[]"
    if not options & {list, tuple} or (not is_list and options & {str, Literal}):
        return value
    words = (word.strip(" '\"") for word in (value[1:-1] if is_list else value).split(","))
    return [word for word in words if word]
