"""What a part says of itself beyond its name and summary: whose it is, path, parameters, formats, objectives.

It opens the parts that it is asked about and no other; `catalog` knows names alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from tuner.data.formats import FORMATS, KINDS
from tuner.errors import ModelError, RecipeError, TunerError
from tuner.recipes import catalog
from tuner.recipes.catalog import PRESETS, PartFile
from tuner.recipes.recipe_file import read_part


def details(kind: str, name: str) -> dict[str, Any]:
    """Return a part as `tuner list --json` tells it: a summary, and what its kind has."""
    file = catalog.part_file(kind, name)
    facts: dict[str, Any] = {"summary": catalog.summary(kind, name), "origin": file.folder.origin, "file": file.shown}
    if file.shadowed:
        facts["shadows"] = [folder.origin for folder in file.shadowed]
    if wrong := mistake(kind, name):
        return {**facts, "error": wrong.to_json()}
    if kind == "models":
        path = values(kind, name).get("model", {}).get("path")
        return {**facts, "path": path, "parameters": parameters(name)}
    if kind == "datasets":
        try:
            paths = [rows["path"] for rows in data_sets(name) if rows.get("path")]
        except RecipeError as error:  # a mixture of the package's, one of whose parts the user's own shadows
            return {**facts, "error": error.to_json()}
        return {**facts, "paths": paths, "objectives": [one for one in KINDS if suits(one, name)]}
    return facts


def mistake(kind: str, name: str) -> TunerError | None:
    """Return what is wrong with a part of the user's own, or None; the package's are right."""
    file = catalog.part_file(kind, name)
    return None if file.is_ours else _mistake(kind, name, file)


@cache
def _mistake(kind: str, name: str, file: PartFile) -> TunerError | None:
    from tuner.recipes import loading  # the schema, which the package's own parts do not need to be listed

    try:
        if kind == PRESETS:
            from tuner.zero import choice, lint

            lint.check(choice.open_config(name, file.shown))
        else:
            loading.check_part(kind, name)
    except TunerError as error:
        error.where = error.where or file.shown
        return error
    return None


def values(kind: str, name: str) -> dict[str, Any]:
    """Return what a part's file holds."""
    return _values(kind, name, catalog.part_file(kind, name))


@cache
def _values(kind: str, name: str, file: PartFile) -> dict[str, Any]:
    """`file` tells parts of one name apart: another folder may be the catalog by now."""
    return read_part(kind, name).values


def parameters(model: str) -> int | None:
    """Return the parameters of a model part, or None where its facts are not known."""
    from tuner.fit.parameters import num_parameters  # pydantic, which names alone do not need
    from tuner.recipes.schema.architecture import Architecture

    facts = values("models", model).get("architecture")
    try:
        return num_parameters(Architecture.model_validate(facts)) if facts else None
    except ModelError:  # of a type that the plan has no formula for
        return None


def data_sets(name: str) -> Iterator[dict[str, Any]]:
    """Yield the rows block of a data-set part, or those of its mixture."""
    rows = values("datasets", name).get("train_dataloader", {}).get("dataset", {})
    for share in rows.get("mixture") or [rows]:
        if "part" in share:
            yield from ({**inner, **share} for inner in data_sets(share["part"]))
        else:
            yield share


def suits(objective: str, dataset: str) -> bool:
    """Say whether an objective learns from a data-set part; where no format is written, it may."""
    return _suits(objective, dataset, catalog.part_file("datasets", dataset))


@cache
def _suits(objective: str, dataset: str, file: PartFile) -> bool:
    if not file.is_ours and _mistake("datasets", dataset, file):
        return False
    try:
        formats = [FORMATS.get(str(rows.get("format"))) for rows in data_sets(dataset)]
    except RecipeError:
        return False
    return all(known.kind in KINDS[objective] for known in formats if known)
