"""The facts of a part beyond its name and summary: its origin, path, parameters, formats and objectives.

It opens only the parts that it is called with; `catalog` knows only names.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from tuner.data.formats import FORMATS
from tuner.data.sample_kinds import kinds_of
from tuner.errors import ModelError, RecipeError, Text, TunerError
from tuner.files import JsonObject
from tuner.fit.parameters import num_parameters
from tuner.recipes import catalog, loading
from tuner.recipes.catalog import PartFile
from tuner.recipes.recipe_file import read_part
from tuner.recipes.schema.architecture import Architecture
from tuner.recipes.schema.objectives import OBJECTIVES
from tuner.zero import choice, lint


def mistake(kind: str, name: str) -> TunerError | None:
    """Return the mistake in a part that is the user's own, or None; the package's parts have none."""
    file = catalog.part_file(kind, name)
    if file.is_ours:
        return None
    try:
        if kind == catalog.PRESETS:
            lint.check(choice.open_config(name, file.shown))
        else:
            loading.check_part(kind, name)
    except TunerError as error:
        error.where = error.where or Text(file.shown)
        return error
    return None


def values(kind: str, name: str) -> JsonObject:
    """Return the values in a part's file."""
    return read_part(kind, name).values


def parameters(model: str) -> int | None:
    """Return the number of parameters of a model part, or None if its architecture is not known."""
    return parameters_of(values("models", model).get("architecture"))


def parameters_of(architecture: JsonObject | None) -> int | None:
    """Return the number of parameters of an architecture, or None if that is not known."""
    try:
        return num_parameters(Architecture.model_validate(architecture)) if architecture else None
    except ModelError:  # of a type that the plan has no formula for
        return None


def data_sets(name: str) -> Iterator[JsonObject]:
    """Yield the rows block of a data-set part, or the blocks of its mixture."""
    rows = values("datasets", name).get("train_dataloader", {}).get("dataset", {})
    for share in rows.get("mixture") or [rows]:
        if "part" in share:
            yield from ({**inner, **share} for inner in data_sets(share["part"]))
        else:
            yield share


def learners(dataset: str) -> tuple[str, ...]:
    """Return the objectives that can learn from a data-set part; all if the part names no format."""
    return _learners(dataset, catalog.part_file("datasets", dataset))


@cache
def _learners(dataset: str, _: PartFile) -> tuple[str, ...]:
    """`PartFile` distinguishes parts of the same name: the catalog's folder may have changed."""
    if mistake("datasets", dataset):
        return ()
    try:
        formats = [FORMATS.get(str(rows.get("format"))) for rows in data_sets(dataset)]
    except RecipeError:
        return ()
    kinds = {row_format.kind for row_format in formats if row_format}
    return tuple(objective for objective in OBJECTIVES if kinds.issubset(kinds_of(objective)))
