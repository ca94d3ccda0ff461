"""Whether a recipe's path is a file here, a file of the package, or an id on the hub."""

from __future__ import annotations

import difflib
import glob
import os
import re
from pathlib import Path

from tuner.errors import DataError, MachineError, ModelError, TunerError
from tuner.files import is_writable, read_json_object
from tuner.recipes import catalog
from tuner.recipes.architecture import MAX_LAYERS
from tuner.recipes.config_json import num_layers
from tuner.recipes.schema import RecipeConfig

URL = "hf://"
"""What the path of a file on the hub begins with."""

ADAPTER = "adapter_config.json"
"""The file that PEFT describes an adapter in."""
ADAPTED = "adapter.path"
TENSORS = "adapter_model.safetensors"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_MAX_HUB_ID = 96
"""Characters; source: huggingface_hub, validate_repo_id."""
_OF_A_MODEL = (".json", ".safetensors", ".model", ".jinja", ".txt")
_MAX_ENTRIES = 10_000
"""Of a folder of data: `datasets` takes 20 s to find the files of so many."""
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
    on_disk = expanded(path)
    looks_local = path.startswith((".", "/", "~")) or path.endswith(_FILES) or not _is_hub_id(path)
    return on_disk if looks_local or exists(on_disk) else None


def _is_hub_id(path: str) -> bool:
    return len(path) <= _MAX_HUB_ID and bool(_HUB_ID.fullmatch(path))


def expanded(path: str) -> Path:
    """Return the path with `~` as the home folder; `~name` of nobody here is a folder of that name."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def home() -> Path:
    """Return the home folder.

    Raises:
        MachineError: HOME is not set, and the user is in no list of users.
    """
    try:
        return Path.home()
    except RuntimeError as error:
        what = f"there is no home folder: HOME is not set, and user {os.geteuid()} is not in /etc/passwd"
        raise MachineError(what, where="HOME", fix="Set HOME to a folder that you may write.") from error


def exists(path: Path) -> bool:
    """Say whether something is at `path`; what cannot be asked for (a name too long, a closed folder) is not there."""
    try:
        return path.exists()
    except OSError:
        return False


def forbidden(path: Path) -> str | None:
    """Return which right of this user's is missing to read what is at `path`, or None where none is."""
    whole = path.absolute()
    for folder in reversed(whole.parents):
        if is_folder(folder) and not os.access(folder, os.X_OK, effective_ids=True):
            return f"no right to enter the folder {str(folder)!r} ({_mode(folder)})"
    wanted = os.R_OK | os.X_OK if is_folder(whole) else os.R_OK
    if exists(whole) and not os.access(whole, wanted, effective_ids=True):
        return f"no right to read {str(path)!r} ({_mode(whole)})"
    return None


def _mode(path: Path) -> str:
    status = path.stat()
    return f"mode {status.st_mode & 0o7777:04o}, owner {status.st_uid}, and you are {os.geteuid()}"


def refuse_forbidden(path: Path, error: type[TunerError], where: str) -> None:
    """Check that this user may read what is at `path`, if something is.

    Raises:
        TunerError: of the class `error`; he may not.
    """
    if missing := forbidden(path):
        raise error(missing, where=where, fix="Let its owner give you that right, or name another.")


def is_file(path: Path) -> bool:
    """Say whether a file is at `path`; what cannot be asked for is none."""
    return os.path.isfile(path)  # noqa: PTH113


def is_folder(path: Path) -> bool:
    """Say whether a folder is at `path`; what cannot be asked for is none."""
    return os.path.isdir(path)  # noqa: PTH112


def matching(path: Path) -> list[Path]:
    """Return what is at `path`, or else, in their order, the files that it means as a pattern: data/**/*.jsonl."""
    if exists(path):
        return [path]
    # Path.glob cannot start from an absolute pattern.
    names = glob.glob(str(path), recursive=True) if glob.has_magic(str(path)) else []  # noqa: PTH207
    return sorted(file for file in map(Path, names) if file.is_file())


def check_model(config: RecipeConfig) -> None:
    """Check that the model's path is set, transformers has its architecture, and its folder and template are there.

    Raises:
        ModelError: no path, only code that the recipe does not trust, nothing there, or no config.json in it.
        RecipeError: no such chat template.
    """
    path = config.model.path
    if not path:
        raise ModelError("no model is named", where="model.path", fix="Give one: --model PATH or a hub id.")
    if config.model.remote_code and not config.model.trust_remote_code:
        raise _only_remote_code(path)
    folder = local(path)
    if folder is not None:
        check_folder(path, folder, "model.path")
        if not exists(folder / "config.json"):
            raise _no_model(path, folder)
    check_adapter(config)
    if config.model.chat_template:
        catalog.chat_template(config.model.chat_template)


def check_adapter(config: RecipeConfig) -> None:
    """Check that the adapter to go on with, where a recipe names one, is there.

    Raises:
        ModelError: it is not.
    """
    path = config.adapter.path if config.adapter else None
    if path and not all(exists(expanded(path) / file) for file in (ADAPTER, TENSORS)):
        what = f"the adapter {path!r} holds no {ADAPTER} with {TENSORS}"
        raise ModelError(what, where=ADAPTED, fix="Name a run, or the folder of an adapter that PEFT saved.")


def _no_model(path: str, folder: Path) -> ModelError:
    saved = sorted(folder.glob("checkpoints/checkpoint-*"), key=lambda one: int(one.name.rpartition("-")[2]))
    if is_file(folder / "recipe.py"):
        named = f", or name a checkpoint of it: {saved[-1]}" if saved else ""
        fix = f"Go on with it first: tuner train {folder / 'recipe.py'} --resume {folder}{named}."
        return ModelError(f"the run {path!r} has no result yet", where="model.path", fix=fix)
    return ModelError(f"{path!r} holds no config.json", where="model.path", fix="Name a folder of save_pretrained.")


def check_folder(path: str, folder: Path, where: str) -> None:
    """Check that a model's folder can be read, and that its config does not count layers without end.

    Args:
        path: What the user wrote.
        folder: What it means.
        where: The key or flag that it was written to.

    Raises:
        ModelError: nothing there, no folder, no right to read it, or more layers than can be counted.
    """
    refuse_forbidden(folder, ModelError, where)
    if not exists(folder):
        raise ModelError(f"the model {path!r} {_missing(folder)}", where=where, fix=_nearby(folder))
    if not folder.is_dir():
        raise ModelError(f"the model {path!r} is no folder", where=where, fix="Name the folder it is in.")
    for file in sorted(folder.iterdir()):
        if file.suffix in _OF_A_MODEL:
            refuse_forbidden(file, ModelError, where)
    if (count := num_layers(folder)) > MAX_LAYERS:
        what = f"num_hidden_layers = {count} is more than {MAX_LAYERS:,}"
        raise ModelError(what, where=folder / "config.json", fix="Take the config that the model was published with.")


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
    refuse_forbidden(place, DataError, where)
    files = matching(place)
    if not files:
        raise DataError(f"the data {path!r} {_missing(place)}", where=where, fix=_nearby(place))
    for file in files[:_MAX_ENTRIES]:
        refuse_forbidden(file, DataError, where)
    if exists(place) and not (place.is_file() or place.is_dir()):
        # A pipe would be waited for without end, a device read without end.
        raise DataError(f"the data {path!r} is neither a file nor a folder", where=where, fix="Name a file or folder.")
    if place.is_file() and place.stat().st_size == 0:
        raise DataError(f"the data file {path!r} is empty", where=where, fix="Write at least one row into it.")
    if place.is_dir() and not any(place.iterdir()):
        raise DataError(f"the data folder {path!r} is empty", where=where, fix="Put a data file into it.")
    if place.is_dir() and _is_crowded(place):
        what = f"the data folder {path!r} holds more than {_MAX_ENTRIES:,} files and folders"
        fix = "Name the folder of the data alone, or its files by a pattern such as FOLDER/*.jsonl."
        raise DataError(what, where=where, fix=fix)


def _is_crowded(folder: Path) -> bool:
    """Say whether a folder holds so much that `datasets` would look through it for minutes, 40 times over."""
    count = 0
    for _, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]  # as `datasets` does
        count += len(folders) + len(files)
        if count > _MAX_ENTRIES:
            return True
    return False


def _missing(path: Path) -> str:
    return f"is a link to {str(path.readlink())!r}, which does not exist" if _is_link(path) else "does not exist"


def _is_link(path: Path) -> bool:
    return os.path.islink(path)  # noqa: PTH114 (no error for a name too long)


def _nearby(path: Path) -> str:
    folder = path.parent
    names = [entry.name for entry in folder.iterdir()] if exists(folder) and folder.is_dir() else []
    names = [name for name in names if name != path.name]
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"Did you mean {str(folder / close[0])!r}?" if close else "Check the path."


def recipe_name(file: Path) -> str:
    """Return what a recipe file is called: its stem; of a run directory's recipe.py the run's recipe, or the folder."""
    if file.stem != "recipe":
        return file.stem
    named = read_json_object(file.parent / "run.json").get("name", file.absolute().parent.name)
    is_plain = isinstance(named, str) and is_writable(named) and Path(named).name == named
    return named if named and is_plain else file.stem
