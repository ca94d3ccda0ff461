"""Values laid over each other in layers, with the place that each value comes from and the values that it replaced.

Code decides by the kind of a place; the text of a place is for people. The only key known here is `_delete_`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

Keys = tuple[str, ...]
"""The path to a value through nested dicts."""


class Kind(Enum):
    """Who wrote a value."""

    PACKAGE = auto()
    """A part, a recipe or a preset that ships with the package."""
    FILE = auto()
    """A file of the user's."""
    FLAG = auto()
    """The user, on this command line."""
    NAME = auto()
    """The recipe's name, as its epochs."""
    DERIVED = auto()
    """Worked out of other values, or seen on the machine."""
    DEFAULT = auto()
    """The schema."""


class Place(NamedTuple):
    """Where a value stands: `name` is a file as messages call it, or what was typed; line and column count from 1."""

    kind: Kind
    name: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        return ":".join(str(part) for part in (self.name, self.line, self.column) if part is not None)


class Overridden(NamedTuple):
    """A value that another one was laid over, and where it was written."""

    value: Any
    place: Place


class Origin(NamedTuple):
    """Where a value came from, and the values that it overrode, latest first."""

    place: Place
    overridden: tuple[Overridden, ...] = ()

    @classmethod
    def derived(cls, text: str, overridden: tuple[Overridden, ...] = ()) -> Origin:
        """Return the origin of a value that tuner worked out, and `text` says how."""
        return cls(Place(Kind.DERIVED, text), overridden)

    def over(self, place: Place, value: Any) -> Origin:
        """Return the origin of what is written at `place` over `value`, whose origin this is."""
        return Origin(place, (Overridden(value, self.place), *self.overridden))

    @property
    def source(self) -> str:
        """The place, to be shown."""
        return str(self.place)

    def to_json(self) -> dict[str, Any]:
        return {"from": self.source, "beat": [{"value": old.value, "from": str(old.place)} for old in self.overridden]}


DEFAULT = Origin(Place(Kind.DEFAULT, "default"))
"""The origin of a value that nobody wrote."""


class Layer(NamedTuple):
    """Values to lay over those before, where each stands, and a warning or a note about them for the user."""

    values: dict[str, Any]
    place: Callable[[Keys], Place]
    warning: str | None = None
    note: str | None = None

    @classmethod
    def at(cls, place: Place, values: dict[str, Any], warning: str | None = None, note: str | None = None) -> Layer:
        """Return a layer of which all values come from one place."""
        return cls(values, lambda _: place, warning, note)


@dataclass
class Merged:
    """The values so far. `order` numbers the layer that wrote each key last."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    order: dict[str, int] = field(default_factory=dict)
    num_layers: int = 0
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def lay(self, layer: Layer) -> None:
        """Lay one more layer over the values; a dict goes into the dict below it, or replaces it with `_delete_`."""
        self.num_layers += 1
        self.warnings += [layer.warning] if layer.warning else []
        self.notes += [layer.note] if layer.note else []
        self._lay(self.values, layer.values, (), layer)

    def get(self, keys: Keys) -> Any:
        """Return a key's value, or None where there is none, whatever stands in its block's place."""
        return lookup(self.values, keys)

    def place_of(self, keys: Keys) -> Place:
        """Return where a key's value came from: the key's own origin, its first inner one, or its block's."""
        for end in range(len(keys), 0, -1):
            if inner := self._at(keys[:end]):
                return self.origins[inner[0]].place
        return DEFAULT.place

    def places_in(self, keys: Keys) -> set[Place]:
        """Return where the value at a key, and the values in its block, came from."""
        return {self.origins[key].place for key in self._at(keys)}

    def order_of(self, keys: Keys) -> int:
        """Return the number of the layer that wrote a key, or the latest of its block, last; 0: none did."""
        dotted = ".".join(keys)
        return max((order for key, order in self.order.items() if _is_in(key, dotted)), default=0)

    def _at(self, keys: Keys) -> list[str]:
        """Return the dotted keys of the leaves that stand at a key or below it."""
        dotted = ".".join(keys)
        return [key for key in self.origins if _is_in(key, dotted)]

    def _lay(self, below: dict[str, Any], above: dict[str, Any], prefix: Keys, layer: Layer) -> None:
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

    def _prune(self, below: dict[str, Any], above: dict[str, Any], prefix: Keys) -> None:
        for key in list(below):
            old, new = below[key], above.get(key)
            if key not in above:
                self._forget((*prefix, key))
                del below[key]
            elif isinstance(old, dict) and isinstance(new, dict):
                self._prune(old, new, (*prefix, key))

    def _replace(self, below: dict[str, Any], keys: Keys, value: Any, layer: Layer) -> None:
        existed, old = keys[-1] in below, below.get(keys[-1])
        before = self._forget(keys) if existed else None
        self.order[".".join(keys)] = self.num_layers
        if isinstance(value, dict) and value:
            below[keys[-1]] = {}
            self._lay(below[keys[-1]], value, keys, layer)
            return
        below[keys[-1]] = value
        place = layer.place(keys)
        if before and old != value:
            self.origins[".".join(keys)] = before.over(place, old)
        else:
            self.origins[".".join(keys)] = Origin(place, before.overridden if before else ())

    def _forget(self, keys: Keys) -> Origin | None:
        """Drop the origins of a key and of all below it; return the first of them."""
        gone = self._at(keys)
        for key in gone:
            self.order.pop(key, None)
        found = [self.origins.pop(key) for key in gone]
        return found[0] if found else None


def _is_in(key: str, block: str) -> bool:
    return key == block or key.startswith(f"{block}.")


def lookup(values: Any, keys: Sequence[Any], default: Any = None) -> Any:
    """Return what stands at `keys` in nested dicts, or `default` where the way there is no dict."""
    for key in keys:
        if not isinstance(values, Mapping) or key not in values:
            return default
        values = values[key]
    return values


def nested(keys: Keys, value: Any) -> dict[str, Any]:
    """Return the nested dicts in which `value` stands at `keys`, of which there is at least one."""
    for key in reversed(keys):
        value = {key: value}
    return dict(value)


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every leaf: the keys of `origins`."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


class Section(NamedTuple):
    """Nested values, and where each leaf comes from (by dotted key)."""

    values: Mapping[str, Any]
    origins: Mapping[str, Origin]

    def sides(self) -> dict[str, Side]:
        """Return every leaf by its dotted key."""
        return {key: Side(value, self.origins.get(key, DEFAULT)) for key, value in leaves(self.values)}


class Side(NamedTuple):
    """One side's value and its origin."""

    value: Any
    origin: Origin

    def to_json(self) -> dict[str, Any]:
        return {"value": self.value, **self.origin.to_json()}


class Difference(NamedTuple):
    """A key that differs; a side that has no such key is None."""

    key: str
    left: Side | None
    right: Side | None

    def to_json(self) -> dict[str, Any]:
        return {
            "left": self.left.to_json() if self.left else None,
            "right": self.right.to_json() if self.right else None,
        }


def differences(left: Section, right: Section) -> Iterator[Difference]:
    """Yield what differs, block by block in the order of the left side."""
    ours, theirs = left.sides(), right.sides()
    blocks = list(dict.fromkeys([*left.values, *right.values]))
    for key in sorted(dict.fromkeys([*ours, *theirs]), key=lambda key: blocks.index(key.split(".")[0])):
        one, other = ours.get(key), theirs.get(key)
        if one is None or other is None or not _same(one.value, other.value):
            yield Difference(key, one, other)


def _same(left: Any, right: Any) -> bool:
    # 1 == True in Python, and not in a config; 5e8 == 500000000 in both.
    return bool(left == right) and isinstance(left, bool) == isinstance(right, bool)
