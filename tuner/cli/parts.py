"""What a part says of itself beyond its name and summary: path, parameters, formats, objectives.

It opens the parts that it is asked about and no other; `catalog` knows names alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from tuner.data.formats import FORMATS, KINDS
from tuner.recipes import catalog
from tuner.recipes.part import read_part


def details(kind: str, name: str) -> dict[str, Any]:
    """Return a part as `tuner list --json` tells it: a summary, and what its kind has."""
    facts: dict[str, Any] = {"summary": catalog.summary(kind, name)}
    if kind == "models":
        return {**facts, "path": values(kind, name)["model"]["path"], "parameters": parameters(name)}
    if kind == "datasets":
        paths = [rows["path"] for rows in data_sets(name) if rows.get("path")]
        return {**facts, "paths": paths, "objectives": [objective for objective in KINDS if suits(objective, name)]}
    return facts


@cache
def values(kind: str, name: str) -> dict[str, Any]:
    """Return what a part's file holds."""
    return read_part(kind, name).values


def parameters(model: str) -> int | None:
    """Return the parameters of a model part, or None where its facts are not known."""
    from tuner.fit.parameters import num_parameters  # pydantic's core, which names alone do not need
    from tuner.recipes.architecture import Architecture

    facts = values("models", model).get("architecture")
    return num_parameters(Architecture.model_validate(facts)) if facts else None


def data_sets(name: str) -> Iterator[dict[str, Any]]:
    """Yield the rows block of a data-set part, or those of its mixture."""
    rows = values("datasets", name).get("train_dataloader", {}).get("dataset", {})
    for share in rows.get("mixture") or [rows]:
        if "part" in share:
            yield from ({**inner, **share} for inner in data_sets(share["part"]))
        else:
            yield share


@cache
def suits(objective: str, dataset: str) -> bool:
    """Say whether an objective learns from a data-set part; where no format is written, it may."""
    formats = (FORMATS.get(str(rows.get("format"))) for rows in data_sets(dataset))
    return all(known.kind in KINDS[objective] for known in formats if known)
