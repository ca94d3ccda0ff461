"""Where a value was written: of which kind the place is, for decisions, and its text, for users.

It decides nothing; whatever does asks for the kind, never for the text.
"""

from __future__ import annotations

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
