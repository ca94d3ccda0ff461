"""Has a model that no formula describes measured, once for its config, and keeps what was found in tuner's cache.

`measuring` does it, in a process of its own: a command that plans imports no torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from tuner import __version__, paths, remote_code
from tuner.errors import TunerError
from tuner.files import JsonObject, dump_json, load_json, make_folder, read_bytes, read_text, sha256, write_text
from tuner.hooks import Measurement, Trial
from tuner.machine.libraries import version_of
from tuner.progress import shown
from tuner.recipes import model_facts
from tuner.recipes.schema import Model
from tuner.recipes.schema.architecture import Architecture
from tuner.recipes.schema.measured import Measured

T = TypeVar("T")
_VERSION = 3
"""Of what is kept: it grows when `measuring` measures something else."""
_LIBRARIES = ("torch", "transformers", "peft")
_LONGEST_S = 120
"""The plan waits for it."""
_FOLDER = "measured"
_failed: dict[Path, str] = {}
"""Why nothing was found, by the file that would hold it. It is not kept: the next command may be luckier. But what one
command decides several times, as in each restart of a run, it decides alike, and waits for once."""


def measurement_of(model: Model, architecture: Architecture | None) -> Measurement:
    """Return what was measured of a model, or why nothing could be.

    Args:
        model: The recipe's; its own code runs only if `trust_remote_code` is granted.
        architecture: What is known of it; a model without files here is measured by that.
    """
    result = _found(model, architecture, {}, f"Measuring {model.path} on meta tensors", _checked)
    if isinstance(result, str):
        return Measurement(None, result)
    (found_architecture, measured), file = result
    measured_architecture = (architecture or found_architecture).with_measured(measured)
    return Measurement(measured_architecture, f"measured on meta tensors ({measured.seconds} s, kept in {file})")


def trial_of(model: Model) -> Trial:
    """Return whether samples of one row see each other in a small model of this kind, and how that was found.

    Its config.json decides: ranks load what it says, of which the facts of a recipe are a part.
    """
    attention = None if model.attn_implementation == "auto" else model.attn_implementation
    extra_keys = {"attention": attention}
    result = _found(model, None, extra_keys, f"Trying whether {model.path} keeps samples apart", _tried)
    if isinstance(result, str):
        return Trial(None, result)
    (apart, doubt, seconds), file = result
    return Trial(apart, doubt or f"tried with a small model of this kind ({seconds} s, kept in {file})")


def _found(
    model: Model,
    architecture: Architecture | None,
    extra_keys: JsonObject,
    doing: str,
    check: Callable[[JsonObject], T | None],
) -> tuple[T, Path] | str:
    """Return what the process has found of a model, and where it is kept; or why it found nothing.

    Args:
        extra_keys: More keys of the job.
        check: Returns what an answer holds, or None for one that is incomplete.
    """
    folder = model_facts.folder_of(model.path, model.revision) if model.path else None
    if folder and architecture and _contradicts(architecture, folder):
        folder = None  # the recipe's own facts count
    if folder is None and architecture is None:
        return "its config.json is not here"
    needed = (*_LIBRARIES, "trl") if extra_keys else _LIBRARIES
    if missing := [name for name in needed if version_of(name) is None]:
        return f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not installed here"
    try:
        if folder:
            job: JsonObject = {"path": str(folder), "trusts": bool(model.trust_remote_code), **extra_keys}
        else:
            job = {"facts": architecture and architecture.model_dump(mode="json"), **extra_keys}
        key = _key(job, folder, model.revision, [version_of(name) for name in needed])
        file = paths.cache(os.environ) / _FOLDER / f"{key}.json"
        kept = _read(file, check)
        options = {} if kept else _trusted(model)
    except (TunerError, OSError) as error:
        return str(error)
    if kept is None and file not in _failed:
        with shown(doing):
            answer = _run(job | options)
        kept = None if "why" in answer else check(answer)
        if kept is None:
            _failed[file] = str(answer.get("why", "what was found of it is incomplete"))
        else:
            _keep(file, answer)
    return _failed[file] if kept is None else (kept, file)


def _contradicts(architecture: Architecture, folder: Path) -> bool:
    """Return whether a recipe has a fact of config.json otherwise, as after `--set architecture.KEY=VALUE`."""
    config_values = model_facts.read_architecture(folder)
    if config_values is None:
        return model_facts.read_type(folder) != architecture.model_type
    try:
        of_folder = Architecture.model_validate(config_values)
    except ValidationError:
        return True
    both = of_folder.model_fields_set & architecture.model_fields_set
    return any(getattr(architecture, key) != getattr(of_folder, key) for key in both)


def _trusted(model: Model) -> JsonObject:
    """Return the options that let transformers run the model's own code, where the user trusts it."""
    if not model.trust_remote_code:
        return {}
    from tuner.models.arguments import load_options  # its room imports torch

    return {"options": load_options(model)}


def _key(job: JsonObject, folder: Path | None, revision: str | None, versions: list[str | None]) -> str:
    """Return a hash of all that decides what is measured: config.json, the model's own code, the libraries.

    Args:
        revision: The model's; its code may be that of another repository, at this commit.
        versions: Of the libraries that compute it.
    """
    config = sha256(read_bytes(folder / "config.json")) if folder else dump_json(job["facts"])
    code = remote_code.code_in(folder) if folder and job["trusts"] else None
    attention = [job["attention"]] if "attention" in job else []
    code_and_commit = code and [code.hash, revision if remote_code.is_commit(revision) else None]
    return sha256(dump_json([_VERSION, __version__, config, code_and_commit, versions, *attention]).encode())[:32]


def _run(job: JsonObject) -> JsonObject:
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    # -P: without it Python would import what the current folder has, which may be the model's.
    command = [sys.executable, "-P", "-m", "tuner.lab.measuring"]
    try:
        done = subprocess.run(
            command, input=dump_json(job), env=environ, capture_output=True, text=True, timeout=_LONGEST_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"why": f"it took longer than {_LONGEST_S} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        last = (done.stderr.splitlines() or ["it said nothing"])[-1]
        return {"why": f"the process ended with exit code {done.returncode}: {last}"}
    try:
        answer = load_json(lines[-1])  # libraries print before it
    except ValueError as error:
        return {"why": f"its answer is no JSON: {error}"}
    return answer if isinstance(answer, dict) else {"why": "its answer is no object"}


def _checked(answer: JsonObject) -> tuple[Architecture, Measured] | None:
    try:
        return Architecture.model_validate(answer["architecture"]), Measured.model_validate(answer["measured"])
    except (KeyError, TypeError, ValidationError):
        return None


def _tried(answer: JsonObject) -> tuple[str | None, str, float] | None:
    match answer:
        case {"apart": str(attention), "seconds": float(seconds)} if "doubt" not in answer:
            return attention, "", seconds
        case {"doubt": str(doubt), "seconds": float(seconds)} if doubt and "apart" not in answer:
            return None, doubt, seconds
    return None


def _read(file: Path, check: Callable[[JsonObject], T | None]) -> T | None:
    """Return what is kept; None where nothing is, or something else, or the file is another user's."""
    try:
        if file.stat().st_uid not in (0, os.getuid()):
            return None
        answer = load_json(read_text(file))
        return check(answer) if isinstance(answer, dict) else None
    except (OSError, ValueError):
        return None


def _keep(file: Path, answer: JsonObject) -> None:
    """Keep what was measured; on a disk that is full or read-only it is measured again the next time."""
    try:
        make_folder(file.parent)
        write_text(file, dump_json(answer))
    except (OSError, TunerError):
        return
