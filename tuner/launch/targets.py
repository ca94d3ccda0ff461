"""Whether a name is a recipe, a DeepSpeed config or a run, and the values of the last two."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from tuner.recipes import catalog, document_file, merging, starting_weights
from tuner.recipes.merging import Origin, Place, Section, leaves
from tuner.recipes.recipe_file import DOCUMENTS
from tuner.runs import directory, listing
from tuner.runs.directory import RunDirectory
from tuner.zero.config import Document

Kind = Literal["recipe", "config", "run"]
_RUN_FACTS = {"versions", "hardware", "precision", "world_size", "num_nodes", "batch", "platform"}


def kind_of(name: str | None) -> Kind:
    """Return what a name stands for. No name, or a model's name, is a recipe made of options.

    Raises:
        RunDirectoryError: a folder that is no run directory.
    """
    if name is None:
        return "recipe"
    path = Path(name)
    if path.suffix in DOCUMENTS and (document_file.says_what_to_train(path) or document_file.is_recipe(path)):
        return "recipe"
    if os.path.isdir(path):  # noqa: PTH112 (a name too long is no folder, and no error)
        if directory.is_run(path):
            return "run"
        if starting_weights.holds_model(path):
            return "recipe"
        raise listing.no_run(name, "NAME", "Name a recipe, a DeepSpeed config, or a run's folder.")
    named = name == "none" or catalog.resembles_preset(name)
    is_file = path.suffix in (".json", ".yaml", ".yml") or (path.suffix != ".py" and os.path.isfile(path))  # noqa: PTH113
    return "config" if named or is_file else "recipe"


def config_section(document: Document) -> Section:
    """Return a DeepSpeed config as it is written, each value with its line and column."""
    origins = {key: Origin(document.place(tuple(key.split(".")))) for key, _ in leaves(document.value)}
    return Section(document.value, origins)


def run_section(path: Path) -> Section:
    """Return the versions, the hardware and the geometry of a run.

    Raises:
        RunDirectoryError: run.json cannot be read.
    """
    run = RunDirectory(path)
    values = run.read_run().model_dump(mode="json", include=_RUN_FACTS, exclude_unset=True)
    return Section(values, {key: Origin(Place(merging.Kind.DERIVED, str(run.run))) for key, _ in leaves(values)})
