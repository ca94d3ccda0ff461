"""The facts of the model that a recipe starts from: of its own config.json, or of the catalog's part for it.

It looks at small files and asks no hub; `architecture` says which facts there are.
"""

from __future__ import annotations

from tuner.recipes import catalog, paths
from tuner.recipes.config_json import read_architecture, read_type
from tuner.recipes.merging import Layer, Merged
from tuner.recipes.origin import Kind, Place
from tuner.recipes.part import read_part

_MODEL = ("model", "path")


def derive_architecture(merged: Merged) -> None:
    """A model path that is newer than the facts beside it makes those facts another model's."""
    path, is_newer = merged.get(_MODEL), merged.order_of(_MODEL) > merged.order_of(("architecture",))
    if not isinstance(path, str) or not (is_newer or merged.values["architecture"] is None):
        return
    facts, place = read_architecture(paths.expanded(catalog.asset(path))), Place(Kind.DERIVED, f"{path}/config.json")
    if facts is None:
        part = catalog.part_named(path)
        source = read_part("models", part) if part else None
        facts = source.values.get("architecture") if source else None
        place = source.place(()) if source else Place(Kind.DERIVED, "unknown model")
    merged.lay(Layer.at(place, {"architecture": {"_delete_": True, **facts} if facts else None}))


def kind_of(merged: Merged) -> str | None:
    """Return the model_type that the facts name, or the model's folder where its config.json does not hold all."""
    kind, path = merged.get(("architecture", "model_type")), merged.get(_MODEL)
    if isinstance(merged.get(("architecture",)), dict):
        return kind if isinstance(kind, str) else None
    return read_type(paths.expanded(catalog.asset(path))) if isinstance(path, str) else None
