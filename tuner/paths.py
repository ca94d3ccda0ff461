"""Whether a recipe's path is a file here, a file of the package, or an id on the hub."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping
from pathlib import Path

from tuner.assets import ASSET, asset
from tuner.errors import MachineError, TunerError, UsageError

URL = "hf://"
"""What the path of a file on the hub begins with."""

ADAPTER = "adapter_config.json"
"""The file that PEFT describes an adapter in."""
ADAPTED = "adapter.path"
TENSORS = "adapter_model.safetensors"

_HUB_ID = re.compile(r"(?!.*(--|\.\.|\.git$))[A-Za-z0-9]([\w.-]*\w)?(/[A-Za-z0-9]([\w.-]*\w)?)?", re.ASCII)
_MAX_HUB_ID = 96
"""Characters. Source of both: huggingface_hub, validate_repo_id."""
DATA = (".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".gz", ".zst", ".bz2")
"""The suffixes of data files; a .json file may also be a recipe or a DeepSpeed config."""
_FILES = (*DATA, ".json", ".safetensors")


def local(path: str) -> Path | None:
    """Return the local path that `path` means, whether it exists or not, or None for an id or a file on the hub."""
    if path.startswith(URL):
        return None
    if path.startswith(ASSET):
        return Path(asset(path))
    on_disk = expanded(path)
    looks_local = path.startswith((".", "/", "~")) or path.endswith(_FILES) or not is_hub_id(path)
    return on_disk if looks_local or exists(on_disk) else None


def is_hub_id(path: str) -> bool:
    """Return whether a path is spelled as the id of a model or data set on the hub."""
    return len(path) <= _MAX_HUB_ID and bool(_HUB_ID.fullmatch(path))


def expanded(path: str) -> Path:
    """Return the path with `~` as the home folder; `~name` stays if this machine has no user of that name."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def new_file(dest: Path | None, name: str, where: str, *suffixes: str) -> Path:
    """Return the file to write: `dest`, or `name` with the first of `suffixes` in the folder `dest`, or here.

    Raises:
        UsageError: it does not end in one of `suffixes`, its folder does not exist, or something is there already.
    """
    usual = f"{name}{suffixes[0]}"
    path = dest or Path(usual)
    path = path / usual if is_folder(path) else path
    if path.suffix not in suffixes:
        problem, fix = f"does not end in {' or '.join(suffixes)}", f"Use {path}{suffixes[0]} or a folder."
        raise UsageError(f"{str(path)!r} {problem}", where=where, fix=fix)
    if not is_folder(path.parent):
        raise UsageError(f"no folder {str(path.parent)!r}", where=where, fix="Create it first.")
    if os.path.lexists(path):
        raise UsageError(f"{path} exists", where=where, fix="Choose another name; nothing was overwritten.")
    return path


def home() -> Path:
    """Return the home folder.

    Raises:
        MachineError: HOME is not set, and the user is in no list of users.
    """
    try:
        return Path.home()
    except RuntimeError as error:
        problem = f"there is no home folder: HOME is not set, and user {os.geteuid()} is not in /etc/passwd"
        raise MachineError(problem, where="HOME", fix="Set HOME to a writable folder.") from error


def cache(environ: Mapping[str, str]) -> Path:
    """Return the folder of files that tuner makes: imported recipes, small models, rows of Python's callers."""
    return Path(environ.get("TUNER_CACHE") or home() / ".cache" / "tuner")


def exists(path: Path) -> bool:
    """Return whether something is at `path`; False if it cannot be looked up (a name too long, a closed folder)."""
    try:
        return path.exists()
    except OSError:
        return False


def forbidden(path: Path) -> str | None:
    """Return which permission this user lacks to read what is at `path`, or None."""
    full_path = path.absolute()
    for folder in reversed(full_path.parents):
        if is_folder(folder) and not os.access(folder, os.X_OK, effective_ids=True):
            return f"no permission to enter the folder {str(folder)!r} ({_mode(folder)})"
    permissions = os.R_OK | os.X_OK if is_folder(full_path) else os.R_OK
    if exists(full_path) and not os.access(full_path, permissions, effective_ids=True):
        return f"no permission to read {str(path)!r} ({_mode(full_path)})"
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
        raise error(missing, where=where, fix="Ask its owner for permission, or use another path.")


def is_file(path: Path) -> bool:
    """Return whether a file is at `path`; a path that cannot be looked up is not a file."""
    return os.path.isfile(path)  # noqa: PTH113


def is_folder(path: Path) -> bool:
    """Return whether a folder is at `path`; a path that cannot be looked up is not a folder."""
    return os.path.isdir(path)  # noqa: PTH112


def matching(path: Path) -> list[Path]:
    """Return what is at `path`, or else, in their order, the files that it means as a pattern: data/**/*.jsonl."""
    if exists(path):
        return [path]
    # Path.glob cannot start from an absolute pattern.
    names = glob.glob(str(path), recursive=True) if glob.has_magic(str(path)) else []  # noqa: PTH207
    return sorted(file for file in map(Path, names) if file.is_file())
