"""The other models of a recipe: a teacher and reward models, and what their config.json say, for the plan.

It reads small files and asks no hub.
"""

from __future__ import annotations

from tuner.recipes import model_facts, starting_weights
from tuner.recipes.merging import Layer, Merged

_TEACHER, _REWARDS = ("objective", "teacher"), ("objective", "rewards")


def settle(merged: Merged) -> None:
    """Set runs to their results, and the architectures of the other models to what their config.json say."""
    _settle_teacher(merged)
    _settle_rewards(merged)


def _settle_teacher(merged: Merged) -> None:
    path = merged.get(_TEACHER)
    if not isinstance(path, str):
        return
    if (result := starting_weights.result_of(path)) and result != path:
        merged.lay(Layer.at(merged.place_of(_TEACHER), {"objective": {"teacher": result}}))
        path = result
    facts, place = model_facts.facts_of(path, merged.get(("objective", "teacher_revision")))
    written = {"_delete_": True, **facts} if facts else None
    merged.lay(Layer.at(place, {"objective": {"teacher_architecture": written}}))


def _settle_rewards(merged: Merged) -> None:
    rewards = merged.get(_REWARDS)
    if isinstance(rewards, dict):
        rewards = [rewards]
    if not isinstance(rewards, list | tuple):
        return
    settled = [
        {**one, "architecture": model_facts.facts_of(one["path"], None)[0]}
        if isinstance(one, dict) and one.get("type") == "model" and isinstance(one.get("path"), str)
        else one
        for one in rewards
    ]
    if settled != [*rewards]:
        merged.lay(Layer.at(merged.place_of(_REWARDS), {"objective": {"rewards": tuple(settled)}}))
