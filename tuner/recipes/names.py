"""What the text in a recipe's place names: the one look at the text and at the disk.

What follows decides by the kind. Another tool's file is known by its keys; no file is run.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import NamedTuple

from tuner import assets, paths
from tuner.hooks import other_tools
from tuner.recipes import catalog, document_file
from tuner.recipes.catalog import Reading
from tuner.recipes.recipe_file import SUFFIXES
from tuner.runs.checkpoints import is_checkpoint
from tuner.runs.directory import is_run

RESULT = "final"
"""The folder of a run directory that holds its result."""
MODEL_CONFIG = "config.json"
"""The file that only the folder of a whole model has; an adapter has `paths.ADAPTER`."""
_SCRIPTS = (".sh", ".bash")
_CONFIG_SUFFIXES = (*SUFFIXES, *_SCRIPTS)
"""The suffixes of recipes and of other tools' configs."""


class NameKind(Enum):
    """What a text names; the value is what messages call it."""

    RECIPE = "a recipe"
    RECIPE_FILE = "a recipe file"
    MODEL = "a model"
    RUN = "a run directory"
    CHECKPOINT = "a checkpoint"
    FOLDER = "a folder"
    DEEPSPEED = "a DeepSpeed config"
    OTHER_TOOL = "another tool's config"
    DATA = "a data file"
    UNCLEAR = "a file without a key of a recipe"
    MISSING = "a missing file"
    UNKNOWN = "an unknown name"


MODELS = (NameKind.MODEL, NameKind.RUN, NameKind.CHECKPOINT)
"""What a run can start from; `path_checks` says whether all is there."""
CONFIGS = (NameKind.DEEPSPEED, NameKind.UNCLEAR)
"""What may be a DeepSpeed config by itself; `zero.choice` says whether it is."""


class Name(NamedTuple):
    """What a text names.

    Args:
        path: The file or folder, with `~` expanded; for a recipe's name a folder of that name, which may hold its runs.
            None: a word, or an id on the hub.
        reading: What a recipe's name means: a recipe of the catalog, or the parts that it is made of; with its epochs.
        preset: The full name of the DeepSpeed preset that is called so, or 'none', whatever the kind.
        tool: The tool that a file belongs to.
    """

    text: str
    kind: NameKind
    path: Path | None = None
    reading: Reading | None = None
    preset: str | None = None
    tool: str | None = None


def identify(text: str | Name) -> Name:
    """Return what a text names: a run, a checkpoint or a model here, else a preset, file or recipe, or a hub's id.

    Raises:
        RecipeError: the user's own parts let a name be read in two ways, or `package:` names no file of the package.
    """
    if isinstance(text, Name):
        return text
    path, preset = paths.expanded(assets.asset(text)), catalog.preset_name(text)
    for kind, holds in ((NameKind.RUN, is_run), (NameKind.CHECKPOINT, is_checkpoint), (NameKind.MODEL, holds_model)):
        if holds(path):
            return Name(text, kind, path, preset=preset)
    if preset:
        return Name(text, NameKind.DEEPSPEED, preset=preset)
    if text.endswith(paths.DATA):
        return Name(text, NameKind.DATA, path)
    if paths.is_file(path) and path.suffix in _CONFIG_SUFFIXES:
        return _of_file(text, path)
    is_folder = bool(text) and paths.is_folder(path)
    if "/" not in text and (reading := catalog.find(text)):
        return Name(text, NameKind.RECIPE, path if is_folder else None, reading)
    if is_folder:
        return Name(text, NameKind.FOLDER, path)
    if paths.exists(path) and text:
        return Name(text, NameKind.UNCLEAR, path)
    if is_path(text):
        is_id = path.suffix not in _CONFIG_SUFFIXES and paths.local(text) is None  # spelled as an id on the hub
        return Name(text, NameKind.MODEL) if is_id else Name(text, NameKind.MISSING, path)
    # What begins as a preset's name and is none is misspelt: the error says so.
    return Name(text, NameKind.DEEPSPEED if text.startswith(catalog.OF_PRESETS) else NameKind.UNKNOWN)


def is_path(text: str) -> bool:
    """Return whether a text in a recipe's place can only be a path or an id on the hub, and no word."""
    return "/" in text or text.endswith(_CONFIG_SUFFIXES)


def holds_model(folder: Path) -> bool:
    """Return whether a folder, or its result as a run, holds a model or an adapter."""
    files = (MODEL_CONFIG, paths.ADAPTER)
    return any(paths.is_file(path / file) for path in (folder, folder / RESULT) for file in files)


def _of_file(text: str, path: Path) -> Name:
    """Return what a file with the suffix of a recipe or of a script is, by its keys."""
    if path.suffix in _SCRIPTS:
        return Name(text, NameKind.OTHER_TOOL, path)
    beginning = document_file.beginning(path)
    if path.suffix == ".py":
        tool = other_tools().owner_of_python(beginning)
        return Name(text, NameKind.OTHER_TOOL if tool else NameKind.RECIPE_FILE, path, tool=tool)
    if path.suffix == ".json" and document_file.holds_rows(beginning):
        return Name(text, NameKind.DATA, path)
    is_recipe, tools = document_file.owners(path)
    if is_recipe:
        return Name(text, NameKind.RECIPE_FILE, path)
    if foreign_tools := [tool for tool in tools if tool != document_file.ACCELERATE]:
        return Name(text, NameKind.OTHER_TOOL, path, tool=foreign_tools[0])
    is_config = tools or (path.suffix == ".json" and document_file.holds_deepspeed(beginning))
    return Name(text, NameKind.DEEPSPEED if is_config else NameKind.UNCLEAR, path, tool=next(iter(tools), None))
