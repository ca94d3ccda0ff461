"""Checkpoints that can be trusted: a manifest of sizes and hashes, written last, is what makes one valid.

It knows folders and bytes; what is inside a checkpoint is the worker's business.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.errors import RunDirectoryError
from tuner.files import sha256, write_json

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
        if path.is_file() and path.name != MANIFEST
    }
    write_json(folder / MANIFEST, {"facts": facts, "files": files})


def inspect(folder: Path) -> str | None:
    """Return what is wrong with a checkpoint, naming the file, or None when every hash matches."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    except OSError:
        return "it has no manifest: the save never finished"
    except (ValueError, KeyError, TypeError):
        return "its manifest is not readable"
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, not {entry['bytes']}"
        if sha256(path) != entry["sha256"]:
            return f"{name} has changed (its hash differs)"
    return None


def facts(folder: Path) -> dict[str, Any]:
    """Return what was true of the run that saved a valid checkpoint: world_size, step, deepspeed."""
    found: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8")).get("facts", {})
    return found


def survey(folder: Path) -> list[Verdict]:
    """Return the checkpoints of a run up to the newest valid one, newest first; older ones are not hashed."""
    found = [(int(match[1]), path) for path in folder.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))]
    verdicts: list[Verdict] = []
    for step, path in sorted(found, reverse=True):
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
    """Remove checkpoints that are older than the `keep` newest ones with a manifest; never one that may be needed."""
    found = sorted(
        ((int(match[1]), path) for path in folder.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))),
        reverse=True,
    )
    sealed = [path for _, path in found if (path / MANIFEST).is_file()]
    for path in sealed[keep:]:
        # Without its manifest it is no checkpoint any more, so a kill in the middle leaves nothing that looks whole.
        (path / MANIFEST).unlink()
        shutil.rmtree(path)


def require_valid(folder: Path) -> Path:
    """Return `folder` if it is a valid checkpoint.

    Raises:
        RunDirectoryError: it is not there, or its manifest does not hold.
    """
    if not folder.is_dir():
        raise RunDirectoryError(f"no checkpoint {folder}", where="--resume", fix="Name a checkpoint-STEP folder.")
    problem = inspect(folder)
    if problem:
        fix = "Take an older checkpoint, or --resume auto."
        raise RunDirectoryError(f"{folder} is not a valid checkpoint: {problem}", where="--resume", fix=fix)
    return folder
