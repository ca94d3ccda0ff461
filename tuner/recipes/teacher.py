"""The teacher of a recipe: its folder, and what its config.json says. It reads small files and asks no hub."""

from __future__ import annotations

from tuner.recipes import model_facts, starting_weights
from tuner.recipes.merging import Layer, Merged

_PATH = ("objective", "teacher")
_FACTS = "teacher_architecture"


def settle(merged: Merged) -> None:
    """Set a run that is the teacher to its result, and the teacher's architecture to what its config.json says."""
    path = merged.get(_PATH)
    if not isinstance(path, str):
        return
    if (result := starting_weights.result_of(path)) and result != path:
        merged.lay(Layer.at(merged.place_of(_PATH), {"objective": {"teacher": result}}))
        path = result
    facts, place = model_facts.facts_of(path, merged.get(("objective", "teacher_revision")))
    written = {"_delete_": True, **facts} if facts else None
    merged.lay(Layer.at(place, {"objective": {_FACTS: written}}))
