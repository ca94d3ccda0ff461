"""One part's file as it ships: its values, and the line each stands on."""

from __future__ import annotations

from dataclasses import replace

from tuner.errors import RecipeError, did_you_mean
from tuner.recipes import catalog
from tuner.recipes.origin import Kind
from tuner.recipes.recipe_file import RecipeFile, read_file


def read_part(kind: str, name: str) -> RecipeFile:
    """Read a part of one of `catalog.KINDS`.

    A model part whose `architecture` is the name of another model part has that one's facts.

    Raises:
        RecipeError: the file is not data, or `architecture` names no part that holds facts of its own.
    """
    source = _read(kind, name)
    other = source.values.get("architecture")
    if not isinstance(other, str):
        return source
    where, known = source.where(("architecture",)), catalog.names("models")
    if other not in known:
        raise RecipeError(f"no model {other!r} to share facts with", where=where, fix=did_you_mean(other, known))
    facts = _read("models", other).values.get("architecture")
    if not isinstance(facts, dict):
        fix = "Name the part in which they stand."
        raise RecipeError(f"model {other!r} holds no facts of its own", where=where, fix=fix)
    return replace(source, values={**source.values, "architecture": facts})


def _read(kind: str, name: str) -> RecipeFile:
    path = catalog.part_path(kind, name)
    return read_file(path, str(path.relative_to(catalog.PACKAGE)), Kind.PACKAGE)
