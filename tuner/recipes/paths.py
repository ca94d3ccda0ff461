"""Whether a recipe's path is a file here, a file of the package, or an id on the hub."""

from __future__ import annotations

import difflib
import glob
import json
import re
from pathlib import Path

from tuner.errors import DataError, ModelError
from tuner.recipes import catalog
from tuner.recipes.schema import RecipeConfig
from tuner.recipes.source import is_writable

URL = "hf://"
"""What the path of a file on the hub begins with."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_MAX_HUB_ID = 96
"""Characters; source: huggingface_hub, validate_repo_id."""
_RELATIVES = {
    "Qwen/Qwen-": "qwen1_5_7b_chat",
    "THUDM/chatglm": "glm4_9b_chat_hf",
    "deepseek-ai/deepseek-moe": "deepseek_v2_lite",
    "openbmb/MiniCPM-": "minicpm3_4b",
}
"""Parts whose architecture transformers has, by what the hub ids begin with whose architecture it has not."""
_FILES = (".json", ".jsonl", ".csv", ".parquet", ".arrow", ".txt", ".gz", ".zst", ".bz2", ".safetensors")


def local(path: str) -> Path | None:
    """Return the local path that `path` means, whether it exists or not, or None for an id or a file on the hub."""
    if path.startswith(URL):
        return None
    if path.startswith(catalog.ASSET):
        return Path(catalog.asset(path))
    found = expanded(path)
    looks_local = path.startswith((".", "/", "~")) or path.endswith(_FILES) or not _is_hub_id(path)
    return found if looks_local or exists(found) else None


def _is_hub_id(path: str) -> bool:
    return len(path) <= _MAX_HUB_ID and bool(_HUB_ID.fullmatch(path))


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


def matching(path: Path) -> list[Path]:
    """Return what is at `path`, or else, in their order, the files that it means as a pattern: data/**/*.jsonl."""
    if exists(path):
        return [path]
    # Path.glob cannot start from an absolute pattern.
    found = glob.glob(str(path), recursive=True) if glob.has_magic(str(path)) else []  # noqa: PTH207
    return sorted(file for file in map(Path, found) if file.is_file())


def check_model(config: RecipeConfig) -> None:
    """Check that the model's path is set, that transformers has its architecture, and that a local path holds a model.

    Raises:
        ModelError: no path, only code that the recipe does not trust, nothing there, or no config.json in it.
    """
    path = config.model.path
    if not path:
        raise ModelError("no model is named", where="model.path", fix="Give one: --model PATH or a hub id.")
    if config.model.remote_code and not config.model.trust_remote_code:
        raise _only_remote_code(path)
    folder = local(path)
    if folder is None:
        return
    if not exists(folder):
        raise ModelError(f"the model {path!r} does not exist", where="model.path", fix=_nearby(folder))
    if not folder.is_dir():
        raise ModelError(f"the model {path!r} is no folder", where="model.path", fix="Name the folder it is in.")
    if not exists(folder / "config.json"):
        raise ModelError(f"{path!r} holds no config.json", where="model.path", fix="Name a folder of save_pretrained.")


def _only_remote_code(path: str) -> ModelError:
    relative = next((part for prefix, part in _RELATIVES.items() if path.startswith(prefix)), None)
    instead = f" Or take a relative that needs none: {relative}." if relative else ""
    trust = "--set model.revision=<40-digit commit> --set model.trust_remote_code=True"
    return ModelError(
        f"transformers has no architecture for {path!r}: it comes with code of its own, which is not run unasked",
        where="model.path",
        fix=f"Read that code at one commit, then add: {trust}.{instead}",
    )


def check_data(config: RecipeConfig) -> None:
    """Check that every data set's path is set and, where it is local, there and not empty.

    Raises:
        DataError: no path, nothing there, or an empty file or folder.
    """
    for key in ("train_dataloader", "val_dataloader"):
        loader = getattr(config, key)
        if loader is None:
            continue
        if not loader.dataset.mixture:
            _check_path(loader.dataset.path, f"{key}.dataset.path")
        for number, share in enumerate(loader.dataset.mixture or ()):
            _check_path(share.path, f"{key}.dataset.mixture[{number}].path")


def _check_path(path: str | None, where: str) -> None:
    if not path:
        raise DataError("no data set is named", where=where, fix="Give one: --data FILE.")
    place = local(path)
    if place is None:
        return
    if not matching(place):
        raise DataError(f"the data {path!r} does not exist", where=where, fix=_nearby(place))
    if exists(place) and not (place.is_file() or place.is_dir()):
        # A pipe would be waited for without end, a device read without end.
        raise DataError(f"the data {path!r} is neither a file nor a folder", where=where, fix="Name a file or folder.")
    if place.is_file() and place.stat().st_size == 0:
        raise DataError(f"the data file {path!r} is empty", where=where, fix="Write at least one row into it.")
    if place.is_dir() and not any(place.iterdir()):
        raise DataError(f"the data folder {path!r} is empty", where=where, fix="Put a data file into it.")


def _nearby(path: Path) -> str:
    folder = path.parent
    names = [entry.name for entry in folder.iterdir()] if exists(folder) and folder.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"Did you mean {str(folder / close[0])!r}?" if close else "Check the path."


def recipe_name(file: Path) -> str:
    """Return what a recipe file is called: its stem; of a run directory's recipe.py the run's recipe, or the folder."""
    if file.stem != "recipe":
        return file.stem
    try:
        named = json.loads((file.parent / "run.json").read_text(encoding="utf-8"))["name"]
    except (OSError, ValueError, KeyError, TypeError):
        named = file.absolute().parent.name
    is_plain = isinstance(named, str) and is_writable(named) and Path(named).name == named
    return named if named and is_plain else file.stem
