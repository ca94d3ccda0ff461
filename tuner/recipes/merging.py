"""Values laid over each other in layers, with the place that each value comes from and the values that it replaced.

Code decides by the kind of a place; the text of a place is for people. The only key known here is `_delete_`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

from tuner.files import JsonObject

Keys = tuple[str, ...]
"""The path to a value through nested dicts."""


class Kind(Enum):
    """The kind of place that a value comes from."""

    PACKAGE = auto()
    """A part, a recipe or a preset that ships with the package."""
    FILE = auto()
    """A user's file."""
    FLAG = auto()
    """This command line."""
    NAME = auto()
    """The recipe's name, for example its epochs."""
    DERIVED = auto()
    """Derived from other values, or detected on the machine."""
    DEFAULT = auto()
    """The schema's default."""


class Place(NamedTuple):
    """The place of a value: `name` is a file's name in messages, or the typed words; line and column count from 1."""

    kind: Kind
    name: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        if self.line is None:
            return self.name  # perhaps a text with an option
        return ":".join(str(part) for part in (self.name, self.line, self.column) if part is not None)

    @property
    def is_users(self) -> bool:
        """Whether the user chose the value."""
        return self.kind not in (Kind.PACKAGE, Kind.DERIVED, Kind.DEFAULT)


class Overridden(NamedTuple):
    """A value that was replaced, and its place."""

    value: object
    place: Place


class Origin(NamedTuple):
    """The place of a value, and the values that it replaced, latest first."""

    place: Place
    overridden: tuple[Overridden, ...] = ()

    @classmethod
    def derived(cls, text: str, overridden: tuple[Overridden, ...] = ()) -> Origin:
        """Return the origin of a value that tuner derived; `text` says how."""
        return cls(Place(Kind.DERIVED, text), overridden)

    def over(self, place: Place, value: object) -> Origin:
        """Return the origin of a value at `place` that replaces `value`, which has this origin."""
        return Origin(place, (Overridden(value, self.place), *self.overridden))

    @property
    def text(self) -> str:
        """The place as text."""
        return str(self.place)

    def to_json(self) -> JsonObject:
        return {"from": self.text, "beat": [{"value": old.value, "from": str(old.place)} for old in self.overridden]}


DEFAULT = Origin(Place(Kind.DEFAULT, "default"))
"""The origin of the schema's defaults."""


class Layer(NamedTuple):
    """Values to lay over those before, the place of each, and a warning or a note about them for the user."""

    values: JsonObject
    place: Callable[[Keys], Place]
    warning: str | None = None
    note: str | None = None

    @classmethod
    def at(cls, place: Place, values: JsonObject, warning: str | None = None, note: str | None = None) -> Layer:
        """Return a layer with one place for all values."""
        return cls(values, lambda _: place, warning, note)


@dataclass
class Merged:
    """The values so far. `order` numbers the layer that wrote each key last."""

    values: JsonObject = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    order: dict[str, int] = field(default_factory=dict)
    num_layers: int = 0
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def lay(self, layer: Layer) -> None:
        """Lay one more layer over the values; a dict is merged into the dict below, or with `_delete_` replaces it."""
        self.num_layers += 1
        self.warnings += [layer.warning] if layer.warning else []
        self.notes += [layer.note] if layer.note else []
        self._lay(self.values, layer.values, (), layer)

    def get(self, keys: Keys) -> Any:
        """Return a key's value, or None if the key is missing or its block is not a dict."""
        return lookup(self.values, keys)

    def place_of(self, keys: Keys) -> Place:
        """Return the place of a key's value: the key's own, the first inside it, or its block's."""
        for end in range(len(keys), 0, -1):
            if inner := self._leaf_keys(keys[:end]):
                return self.origins[inner[0]].place
        return DEFAULT.place

    def places_in(self, keys: Keys) -> set[Place]:
        """Return the places of the value at a key and of the values inside it."""
        return {self.origins[key].place for key in self._leaf_keys(keys)}

    def order_of(self, keys: Keys) -> int:
        """Return the number of the last layer that wrote a key or a key inside it; 0 if no layer did."""
        return max((self.order[key] for key in _inside(self.order, keys)), default=0)

    def _leaf_keys(self, keys: Keys) -> list[str]:
        """Return the dotted keys of the leaves at a key or below it."""
        dotted = ".".join(keys)
        if dotted in self.origins and not isinstance(lookup(self.values, keys), dict):
            return [dotted]  # most keys are leaves: a search of all 130 for each took a sixth of a recipe's loading
        return _inside(self.origins, keys)

    def _lay(self, below: JsonObject, above: JsonObject, prefix: Keys, layer: Layer) -> None:
        for key, value in above.items():
            keys, old = (*prefix, key), below.get(key)
            if key == "_delete_" and prefix:
                continue
            if isinstance(value, dict) and isinstance(old, dict):
                if value.get("_delete_"):
                    self._prune(old, value, keys)
                self._lay(old, value, keys, layer)
            else:
                self._replace(below, keys, value, layer)

    def _prune(self, below: JsonObject, above: JsonObject, prefix: Keys) -> None:
        for key in list(below):
            old, new = below[key], above.get(key)
            if key not in above:
                self._forget((*prefix, key))
                del below[key]
            elif isinstance(old, dict) and isinstance(new, dict):
                self._prune(old, new, (*prefix, key))

    def _replace(self, below: JsonObject, keys: Keys, value: object, layer: Layer) -> None:
        dotted, old = ".".join(keys), below.get(keys[-1])
        before = self._forget(keys) if keys[-1] in below else None
        self.order[dotted] = self.num_layers
        if isinstance(value, dict) and value:
            below[keys[-1]] = {}
            self._lay(below[keys[-1]], value, keys, layer)
            return
        below[keys[-1]] = value
        origin = Origin(layer.place(keys), before.overridden if before else ())
        self.origins[dotted] = before.over(origin.place, old) if before and old != value else origin

    def _forget(self, keys: Keys) -> Origin | None:
        """Remove the origins of a key and of all below it; return the first of them."""
        gone = self._leaf_keys(keys)
        for key in gone:
            self.order.pop(key, None)
        origins = [self.origins.pop(key) for key in gone]
        return origins[0] if origins else None


def _inside(dotted: Iterable[str], keys: Keys) -> list[str]:
    block = ".".join(keys)
    return [key for key in dotted if key == block or key.startswith(f"{block}.")]


def line_of(lines: Mapping[Keys, int], keys: Keys) -> int | None:
    """Return the line of a key, or of the innermost block around it that has one."""
    return next((lines[keys[:end]] for end in range(len(keys), 0, -1) if keys[:end] in lines), None)


def lookup(values: object, keys: Sequence[object], default: object = None) -> Any:
    """Return the value at `keys` in nested dicts, or `default` if there is no such key."""
    for key in keys:
        if not isinstance(values, Mapping) or key not in values:
            return default
        values = values[key]
    return values


def nested(keys: Keys, value: object) -> JsonObject:
    """Return nested dicts with `value` at `keys`; there is at least one key."""
    block: JsonObject = {keys[-1]: value}
    for key in reversed(keys[:-1]):
        block = {key: block}
    return block


def leaves(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield (dotted key, value) of every leaf: the keys of `origins`."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


class Section(NamedTuple):
    """Nested values, and the origin of each leaf by its dotted key."""

    values: Mapping[str, object]
    origins: Mapping[str, Origin]


class Side(NamedTuple):
    """One side's value and its origin."""

    value: object
    origin: Origin

    def to_json(self) -> JsonObject:
        return {"value": self.value, **self.origin.to_json()}


class Difference(NamedTuple):
    """A key that differs; None for a side without this key."""

    key: str
    left: Side | None
    right: Side | None

    def to_json(self) -> JsonObject:
        return {
            "left": self.left.to_json() if self.left else None,
            "right": self.right.to_json() if self.right else None,
        }


def differences(left: Section, right: Section) -> Iterator[Difference]:
    """Yield the keys that differ, block by block in the order of the left side."""
    left_sides, right_sides = (
        {key: Side(value, section.origins.get(key, DEFAULT)) for key, value in leaves(section.values)}
        for section in (left, right)
    )
    blocks = list(dict.fromkeys([*left.values, *right.values]))
    for key in sorted(dict.fromkeys([*left_sides, *right_sides]), key=lambda key: blocks.index(key.split(".")[0])):
        # 1 == True in Python, and not in a config; 5e8 == 500000000 in both.
        values = [
            (side.value, isinstance(side.value, bool)) for side in (left_sides.get(key), right_sides.get(key)) if side
        ]
        if len(values) == 1 or values[0] != values[1]:
            yield Difference(key, left_sides.get(key), right_sides.get(key))
