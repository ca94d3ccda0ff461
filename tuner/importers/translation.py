"""From another tool's keys to ours, by a table: what became of each key is recorded, and none is left without a word.

It knows no tool: `Tool` holds a tool's table, and the modules named after tools fill it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from tuner.errors import RecipeError, brief_repr, did_you_mean
from tuner.importers import key_tables
from tuner.importers.document import Document, Keys, walk
from tuner.recipes.aliases import Alias
from tuner.recipes.schema import schema_keys
from tuner.recipes.schema.objectives import objectives_with

_NUMBERS = ("betas", "loss_weights")
"""Our keys that hold several numbers."""


class Outcome(StrEnum):
    """What became of a value."""

    TAKEN = "taken"
    TRANSLATED = "translated"
    CHANGED = "changed in meaning"
    LEFT_OUT = "no counterpart"


@dataclass(frozen=True)
class Given:
    """One value of a source. `where` is its file and line; `is_default`: nobody wrote it, its tool means it."""

    key: str
    value: Any
    where: str
    keys: Keys = ()
    is_default: bool = False

    def wrong(self, why: str, fix: str | None = None) -> RecipeError:
        """Return an error about the value."""
        return RecipeError(f"{self.key} = {brief_repr(self.value)}: {why}", where=self.where, fix=fix)

    def number(self) -> float:
        """Return a finite number; a text of digits is one too.

        Raises:
            RecipeError: the value is none.
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
        """Return true or false; a text may say it.

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
        if not isinstance(parts, list | tuple) or not all(isinstance(one, str | int | float) for one in parts):
            raise self.wrong("not a text or a list of texts")
        return [word for one in parts if (word := str(one).strip())]


@dataclass(frozen=True)
class Entry:
    """What became of one value: `ours` is what stands in the recipe for it, `why` what to know of that."""

    given: Given
    outcome: Outcome
    ours: str | None = None
    why: str | None = None

    def to_json(self) -> dict[str, Any]:
        of_source = {"key": self.given.key, "value": str(self.given.value), "where": self.given.where}
        return {**of_source, "outcome": str(self.outcome), "ours": self.ours, "why": self.why}


Rule = Alias | str | Callable[["Translation", Given], None]
"""One of our keys | why there is none | a function that says so itself."""


@dataclass(frozen=True)
class Tool:
    """What is known of a tool.

    Attributes:
        name: As its users write it.
        table: Key -> rule; a key with a `*` stands for all that fit and that `others` holds.
        defaults: What it means by a key that is not written, where that is not what a recipe without the key means.
        settle: Looks at everything at once, after the keys.
        prepare: Looks at it before them: what is learned, and by which method.
        begin: Puts a document together first: what `${...}` in it names.
        others: Its keys that only a `*` names; None: whatever fits one is a key.
    """

    name: str
    table: Mapping[str, Rule]
    defaults: Callable[[Document], Mapping[str, Any]] = lambda _: {}
    settle: Callable[[Translation], None] = lambda _: None
    prepare: Callable[[Translation], None] = lambda _: None
    begin: Callable[[Document], Document] = lambda document: document
    others: frozenset[str] | None = None


@dataclass
class Translation:
    """One document on its way into a recipe."""

    document: Document
    tool: Tool
    given: dict[str, Given] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    values: dict[Keys, Any] = field(default_factory=dict)
    places: dict[Keys, Given] = field(default_factory=dict)
    model: Given | None = None
    method: str = "full"
    objective: str = "sft"
    datasets: list[dict[str, Any]] = field(default_factory=list)
    """Of the training: `dataset` blocks, the keys of a mixture's entry and perhaps max_rows."""
    validation: list[dict[str, Any]] = field(default_factory=list)
    system: str | None = None
    """The system turn of conversations that have none."""
    warmup_steps: Given | None = None
    obstacle: str | None = None
    """Why the recipe learns something else than its source, if it does."""

    def value(self, key: str, default: Any = None) -> Any:
        """Return what the source says at a key, or its tool means; `default` where that is nothing."""
        given = self.given.get(key)
        return default if given is None or given.value is None else given.value

    def number(self, key: str, default: float) -> float:
        """Return the number at a key, or `default` where the source says nothing; raises as `Given.number` does."""
        return default if self.value(key) is None else self.given[key].number()

    def whole(self, key: str, default: int) -> int:
        """Return the whole number at a key; else as `number`."""
        return default if self.value(key) is None else self.given[key].whole()

    def set(self, given: Given, ours: str, value: Any, why: str | None = None, *, changed: bool = False) -> None:
        """Let a value be this one of ours. A default never takes the place of what was written.

        Raises:
            RecipeError: the value is not of our key's type.
        """
        keys = tuple(ours.split("."))
        value = coerced(value, keys, given)
        before = self.places.get(keys)
        if given.is_default and before is not None and not before.is_default:
            return
        self.values[keys], self.places[keys] = value, given
        is_same = given.value == value and type(given.value) is type(value) and why is None
        outcome = Outcome.CHANGED if changed else Outcome.TAKEN if is_same else Outcome.TRANSLATED
        self.note(given, outcome, f"{ours} = {value!r}", why)

    def note(self, given: Given, outcome: Outcome, ours: str | None = None, why: str | None = None) -> None:
        """Record what became of a value."""
        self.entries.append(Entry(given, outcome, ours, why))

    def leave(self, given: Given, why: str) -> None:
        """Record that a value has no counterpart."""
        self.note(given, Outcome.LEFT_OUT, why=why)

    def inner(self, keys: Keys, value: Any) -> Given:
        """Return a value that stands inside of a block or a list of the source."""
        return Given(".".join(keys), value, self.document.where(keys), keys)

    def check_block(self, what: str, value: Mapping[str, Any], keys: Keys, read: Collection[str], left: str) -> None:
        """Say of each key of a block that has no counterpart that it has none.

        Args:
            what: The block, as a user would name it.
            value: The block.
            keys: Where it stands.
            read: Its keys that its translation looks at.
            left: Its other keys, separated by blanks.

        Raises:
            RecipeError: the block has another key.
        """
        known = {*read, *left.split()}
        for name, inner in value.items():
            place = (*keys, str(name))
            if name not in known:
                fix = did_you_mean(str(name), sorted(known)) or "Remove it."
                raise self.document.wrong(f"{self.tool.name} has no key {str(name)!r} in {what}", place, fix)
            if name not in read and inner is not None:
                self.leave(self.inner(place, inner), "tuner has no such setting of this block: tuner sets it")

    def run(self) -> None:
        """Translate every key of the document.

        Raises:
            RecipeError: a key that the tool has not, or a value that fits no type.
        """
        self._collect()
        self.tool.prepare(self)
        for given in list(self.given.values()):
            if given.value is not None and not (given.is_default and given.key not in self.tool.table):
                self._apply(self._rule(given), given)
            else:
                self._rule(given)
        self.tool.settle(self)
        for line in self.document.more_calls:
            call = Given("a further call", None, f"{self.document.name}:{line}")
            self.leave(call, "one recipe is one training: import this call on its own, as a command line")

    def check_all_told(self) -> None:
        """Assert that something is said of every key."""
        accounted = {entry.given.key for entry in self.entries}
        missing = [one.key for one in self.given.values() if one.value is not None and not one.is_default]
        assert accounted.issuperset(missing), f"{sorted(set(missing) - accounted)} are unaccounted for"

    def _collect(self) -> None:
        for keys, value in walk(self.document.values, self.tool.table):
            key = ".".join(keys)
            if key not in self.tool.table and key.removeprefix("no_") in self.tool.table and value is True:
                key, value = key.removeprefix("no_"), False  # as Hugging Face's parser of flags has it
            self.given[key] = Given(key, value, self.document.where(keys), keys)
        for key, value in self.tool.defaults(self.document).items():
            if self.value(key) is None:
                self.given[key] = Given(key, value, f"{self.tool.name}'s default", tuple(key.split(".")), True)

    def _rule(self, given: Given) -> Rule:
        table = self.tool.table
        if given.key in table:
            return table[given.key]
        others = self.tool.others
        if others is None or key_tables.has(others, given.key):
            # A block that is empty here is named by what it could hold.
            fitting = (key for key in table if "*" in key and _fits(given.key, key))
            if pattern := next(fitting, None):
                return table[pattern]
        if given.keys[0] in self.document.used:
            return told_with("the values that use it")
        names = {key for key in (*table, *(others or ())) if "*" not in key and not key.startswith("_")}
        fix = did_you_mean(given.key, sorted(names))
        raise RecipeError(f"{self.tool.name} has no key {given.key!r}", where=given.where, fix=fix or "Remove it.")

    def _apply(self, rule: Rule, given: Given) -> None:
        if isinstance(rule, str):
            self.leave(given, rule)
        elif isinstance(rule, Alias):
            self._alias(rule, given)
        else:
            rule(self, given)

    def _alias(self, alias: Alias, given: Given) -> None:
        if alias.key is None:
            self.leave(given, alias.instead or "")
            return
        value = given.value
        if alias.values and not isinstance(value, list | dict):
            value = alias.value(str(value))
            if value is None:
                self.leave(given, alias.instead or "")
                return
            value = None if value == "None" else value
        block, _, name = alias.key.rpartition(".")
        if block == "objective" and self.objective not in (those := objectives_with(name)):
            self.leave(given, f"belongs to {' and '.join(those)}, and this is {self.objective}")
            return
        if name == "loss_type" and self.objective == "dpo" and isinstance(value, str):
            value = [value]
        self.set(given, alias.key, value)


def _fits(key: str, pattern: str) -> bool:
    return fnmatchcase(key, pattern) or fnmatchcase(f"{key}.", pattern)


def told_with(what: str) -> Rule:
    """Return the rule of a key that another one's translation has looked at."""

    def rule(t: Translation, given: Given) -> None:
        t.note(given, Outcome.TAKEN, why=f"with {what}")

    return rule


def coerced(value: Any, keys: Keys, given: Given) -> Any:
    """Return a value in the type of our key: numbers and truths may be texts in YAML, and always are after a flag.

    Raises:
        RecipeError: it is neither.
    """
    annotation = schema_keys().get(keys)
    options = _options(annotation)
    if value is None or annotation is None or str in options:
        return _listed(value, options) if isinstance(value, str) else value
    if Literal in options and isinstance(value, str) and value.isdecimal():
        return int(value)
    if isinstance(value, list | tuple) and keys[-1] in _NUMBERS:
        return [replace(given, value=one).number() for one in value]
    said = replace(given, value=value)
    if bool in options:
        return said.truth()
    if int in options and float not in options:
        return said.whole()
    if float in options:
        return said.number()
    return _listed(value, options) if isinstance(value, str) else value


def _options(annotation: Any) -> set[Any]:
    """Return the plain types in an annotation, out of its unions and what `Annotated` adds."""
    if get_origin(annotation) in (Union, UnionType) or hasattr(annotation, "__metadata__"):
        inner = get_args(annotation)[:1] if hasattr(annotation, "__metadata__") else get_args(annotation)
        return set().union(*map(_options, inner))
    return {get_origin(annotation) or annotation}


def _listed(value: str, options: set[Any]) -> Any:
    """Return `[a, b]` as a list where our key takes one."""
    if options & {list, tuple} and value[:1] + value[-1:] == "[]":
        return [word.strip(" '\"") for word in value[1:-1].split(",") if word.strip(" '\"")]
    return [value] if options & {list, tuple} and not options & {str, Literal} else value
