"""Whether a recipe's path is a file here, a file of the package, or an id on the hub."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from tuner.errors import DataError, ModelError
from tuner.recipes import catalog
from tuner.recipes.schema import RecipeConfig

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_FILES = (".json", ".jsonl", ".csv", ".parquet", ".arrow", ".txt", ".safetensors")


def local(path: str) -> Path | None:
    """Return the local path that `path` means, whether it exists or not, or None for an id on the hub."""
    if path.startswith(catalog.ASSET):
        return Path(catalog.asset(path))
    found = expanded(path)
    looks_local = path.startswith((".", "/", "~")) or path.endswith(_FILES) or not _HUB_ID.fullmatch(path)
    return found if looks_local or exists(found) else None


def expanded(path: str) -> Path:
    """Return the path with `~` as the home folder; `~name` of nobody here is a folder of that name."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def exists(path: Path) -> bool:
    """Say whether something is at `path`; what cannot be asked for (a name too long, a closed folder) is not there."""
    try:
        return path.exists()
    except OSError:
        return False


def check_model(config: RecipeConfig) -> None:
    """Check that the model's path is set and, where it is local, holds a model.

    Raises:
        ModelError: no path, nothing there, or no config.json in it.
    """
    path = config.model.path
    if not path:
        raise ModelError("no model is named", where="model.path", fix="Give one: --model PATH or a hub id.")
    folder = local(path)
    if folder is None:
        return
    if not exists(folder):
        raise ModelError(f"the model {path!r} does not exist", where="model.path", fix=_nearby(folder))
    if not folder.is_dir():
        raise ModelError(f"the model {path!r} is no folder", where="model.path", fix="Name the folder it is in.")
    if not exists(folder / "config.json"):
        raise ModelError(f"{path!r} holds no config.json", where="model.path", fix="Name a folder of save_pretrained.")


def check_data(config: RecipeConfig) -> None:
    """Check that every data set's path is set and, where it is local, there and not empty.

    Raises:
        DataError: no path, nothing there, or an empty file or folder.
    """
    for key in ("train_dataloader", "val_dataloader"):
        loader = getattr(config, key)
        if loader is not None:
            _check_dataset(loader.dataset.path, f"{key}.dataset.path")


def _check_dataset(path: str | None, where: str) -> None:
    if not path:
        raise DataError("no data set is named", where=where, fix="Give one: --data FILE.")
    file = local(path)
    if file is None:
        return
    if not exists(file):
        raise DataError(f"the data {path!r} does not exist", where=where, fix=_nearby(file))
    if file.is_file() and file.stat().st_size == 0:
        raise DataError(f"the data file {path!r} is empty", where=where, fix="Write at least one row into it.")
    if file.is_dir() and not any(file.iterdir()):
        raise DataError(f"the data folder {path!r} is empty", where=where, fix="Put a data file into it.")


def _nearby(path: Path) -> str:
    folder = path.parent
    names = [entry.name for entry in folder.iterdir()] if exists(folder) and folder.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"Did you mean {str(folder / close[0])!r}?" if close else "Check the path."
