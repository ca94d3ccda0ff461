"""One part's file: its values, the line each stands on, and whose they are."""

from __future__ import annotations

from tuner import assets
from tuner.errors import RecipeError, did_you_mean
from tuner.recipes import catalog
from tuner.recipes.origin import Kind
from tuner.recipes.recipe_file import RecipeFile, read_file


def read_part(kind: str, name: str) -> RecipeFile:
    """Read a part of one of `catalog.KINDS`.

    A model part whose `architecture` is the name of another model part has that one's facts.

    Raises:
        RecipeError: there is no such part, its file is not data, or `architecture` names no part that holds facts of
            its own.
    """
    source = _read(kind, name)
    other = source.values.get("architecture")
    if not isinstance(other, str):
        return source
    where, known = source.where(("architecture",)), catalog.names("models")
    if other not in known:
        raise RecipeError(f"no model {other!r} to share facts with", where=where, fix=did_you_mean(other, known))
    facts = _holder(source, other).values.get("architecture")
    if not isinstance(facts, dict):
        fix = "Give the part that holds them."
        raise RecipeError(f"model {other!r} has no facts of its own", where=where, fix=fix)
    return source._replace(values={**source.values, "architecture": facts})


def _holder(source: RecipeFile, name: str) -> RecipeFile:
    """Return the model part that another one names; one of the package means the package's, whatever shadows that."""
    if source.kind is Kind.PACKAGE:
        return read_file(assets.CONFIGS / "models" / f"{name}.py", kind=Kind.PACKAGE)
    return _read("models", name)


def _read(kind: str, name: str) -> RecipeFile:
    file = catalog.part_file(kind, name)
    return read_file(file.path, file.shown, file.folder.kind)
