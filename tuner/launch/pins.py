"""Decisions that are made before a run's stages: by a checkpoint, by `--on-oom retry`, or by `tuner tune`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from tuner.recipes.merging import Kind, Place
from tuner.recipes.recipe import Recipe


class Pins(NamedTuple):
    """What one of them decided; the stages leave it as it is. Of several for the same value the last one counts.

    Args:
        reason: Who decided: the origin of each value shows it.
        values: By the keys of the recipe.
        level: The DeepSpeed preset, or 'none'; None: it is not pinned.
        note: A line for the user.
    """

    reason: str
    values: Mapping[str, object] = {}
    level: str | None = None
    note: str | None = None

    @property
    def flags(self) -> list[str]:
        """The same decisions as they are typed."""
        sets = [word for key, value in self.values.items() for word in ("--set", f"{key}={value}")]
        return [*sets, "--deepspeed", self.level] if self.level else sets


def laid_on(recipe: Recipe, pins: Sequence[Pins]) -> Recipe:
    """Return the recipe with the pinned values; what it has already keeps its origin."""
    for pin in pins:
        changed = {key: value for key, value in pin.values.items() if attrgetter(key)(recipe.config) != value}
        recipe = recipe.settled(changed, Place(Kind.DERIVED, pin.reason))
    return recipe


def of_level(pins: Sequence[Pins]) -> Pins | None:
    """Return the pin of the DeepSpeed preset that counts; None: it is not pinned."""
    return next((pin for pin in reversed(pins) if pin.level), None)


def notes(pins: Sequence[Pins]) -> tuple[str, ...]:
    """Return the lines for the user."""
    return tuple(pin.note for pin in pins if pin.note)
