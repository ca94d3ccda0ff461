"""Values with origins side by side: which leaves two sides hold differently.

It loads nothing and prints nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tuner.recipes.merging import leaves
from tuner.recipes.origin import DEFAULT, Origin


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
