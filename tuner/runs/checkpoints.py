"""Checkpoints that can be trusted: a manifest of sizes and hashes, written last, is what makes one valid.

It knows folders and bytes; what is inside a checkpoint is the worker's business.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.errors import RunDirectoryError
from tuner.files import disk_errors, sha256, write_json

MANIFEST = "manifest.json"
_NAME = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True)
class Verdict:
    """A checkpoint folder, its step, and what is wrong with it (None: valid)."""

    path: Path
    step: int
    problem: str | None


def seal(folder: Path, facts: dict[str, Any]) -> None:
    """Write the manifest of everything in `folder`, and facts such as world_size, when all ranks have written."""
    files = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / MANIFEST
    }
    for name in files:
        _flush(folder / name)
    write_json(folder / MANIFEST, {"facts": facts, "files": files})


def _flush(path: Path) -> None:
    # The manifest must not reach the disk before what it vouches for.
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def inspect(folder: Path, *, hashes: bool = True) -> str | None:
    """Return what is wrong with a checkpoint, naming the file, or None when every size (and hash) matches."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        expected = {str(name): (entry["bytes"], entry["sha256"]) for name, entry in files.items()}
    except OSError:
        return "it has no manifest: the save never finished"
    except (ValueError, KeyError, TypeError, AttributeError):
        return "its manifest is not readable"
    for name, (size, digest) in expected.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, not {size}"
        if hashes and sha256(path) != digest:
            return f"{name} has changed (its hash differs)"
    return None


def facts(folder: Path) -> dict[str, Any]:
    """Return what was true of the run that saved a valid checkpoint: world_size, step, deepspeed."""
    found: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8")).get("facts", {})
    return found


def survey(folder: Path) -> list[Verdict]:
    """Return the checkpoints of a run up to the newest valid one, newest first; older ones are not hashed."""
    verdicts: list[Verdict] = []
    for step, path in _newest_first(folder):
        verdicts.append(Verdict(path, step, inspect(path)))
        if verdicts[-1].problem is None:
            break
    return verdicts


def newest_valid(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the newest valid checkpoint and one line for each newer one that was passed over."""
    verdicts = survey(folder)
    passed = [f"{verdict.path.name} is passed over: {verdict.problem}" for verdict in verdicts if verdict.problem]
    valid = [verdict.path for verdict in verdicts if verdict.problem is None]
    return (valid[0] if valid else None), passed


def prune(folder: Path, keep: int) -> None:
    """Remove sealed checkpoints that are older than the `keep` newest whole ones; never one that may be needed.

    Whole means that every size matches: hashing all of them after each save would cost as much as the save.
    """
    sealed = [path for _, path in _newest_first(folder) if (path / MANIFEST).is_file()]
    num_whole = 0
    for path in sealed:
        if num_whole < keep:
            num_whole += inspect(path, hashes=False) is None
            continue
        # Without its manifest it is no checkpoint any more, so a kill in the middle leaves nothing that looks whole.
        (path / MANIFEST).unlink()
        shutil.rmtree(path)


def set_aside(folder: Path, name: str) -> None:
    """Rename a run's checkpoints to `checkpoints of NAME`, where they are kept and nothing resumes from them."""
    with disk_errors(folder):
        folder.rename(folder.with_name(f"{folder.name} of {name}"))


def _newest_first(folder: Path) -> list[tuple[int, Path]]:
    found = ((int(match[1]), path) for path in folder.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name)))
    return sorted(found, reverse=True)


def require_valid(folder: Path) -> Path:
    """Return `folder` if it is a valid checkpoint.

    Raises:
        RunDirectoryError: it is not there, or its manifest does not hold.
    """
    if not os.path.isdir(folder):  # noqa: PTH112 (a name too long is no folder, and no error)
        raise RunDirectoryError(f"no checkpoint {folder}", where="--resume", fix="Name a checkpoint-STEP folder.")
    problem = inspect(folder)
    if problem:
        fix = "Take an older checkpoint, or --resume auto."
        raise RunDirectoryError(f"{folder} is not a valid checkpoint: {problem}", where="--resume", fix=fix)
    return folder
