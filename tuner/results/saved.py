"""Finds the weights that a user names: a run's result, its newest checkpoint, a checkpoint, or an adapter.

It looks at folders and loads no weights.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from tuner import paths
from tuner.errors import Argument, RunDirectoryError, UsageError
from tuner.paths import ADAPTER
from tuner.recipes import path_checks, trust
from tuner.recipes.loading import load
from tuner.recipes.schema import RecipeConfig
from tuner.runs import checkpoints
from tuner.runs.directory import RunDirectory, is_run
from tuner.runs.listing import no_run
from tuner.runs.resume_advice import resume_advice

SOURCE, DEST = Argument("source"), Argument("dest")
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors")
_PICKLED = re.compile(r"(pytorch|adapter)_model.*\.bin")
_PICKLES = (".pth", ".pt", ".bin", ".ckpt")


@dataclass(frozen=True)
class SavedModel:
    """A folder with weights written by transformers or PEFT, and the run that they come from, if it is known."""

    folder: Path
    description: str
    run_dir: RunDirectory | None = None
    step: int | None = None
    trust_remote_code: bool = False
    """Whether this command may run the code that comes with the model."""

    @property
    def is_adapter(self) -> bool:
        return (self.folder / ADAPTER).is_file()

    def recipe(self) -> RecipeConfig | None:
        """Return the recipe of the run, or None if the folder belongs to no run.

        Raises:
            RecipeError: the run trusted the code of its model, and this command does not.
        """
        if self.run_dir is None:
            return None
        recipe = load(str(self.run_dir.recipe), trust.granted(self.trust_remote_code))
        trust.refuse_remote_code(recipe, self.folder)
        return recipe.config


def find(path: Path, *, trust_remote_code: bool = False) -> SavedModel:
    """Return the weights at `path`; every file of a checkpoint is verified by its hash.

    Args:
        path: A run, a checkpoint, or a folder of weights.

    A checkpoint's weights are in the compute type, as in the result; at ZeRO-3 too, where they are gathered on save.

    Raises:
        UsageError: the folder has no weights that can be used.
        RunDirectoryError: there is nothing, the run never saved, or the checkpoint is not valid.
    """
    paths.refuse_forbidden(path, UsageError, SOURCE)
    fix = "Give a run directory of tuner, or a checkpoint in it."
    if path.suffix in _PICKLES and paths.is_file(path):
        raise UsageError(f"{path} is a file: a pickle, which tuner does not load", where=SOURCE, fix=fix)
    if not paths.exists(path) or path.is_file():
        raise no_run(path, SOURCE, fix)
    if is_run(path):
        saved = _of_run(RunDirectory(path))
    elif checkpoints.is_checkpoint(path):
        saved = _of_checkpoint(path)
    else:
        saved = _whole(SavedModel(path, f"the weights in {path}", _run_around(path.absolute().parent)))
    return replace(saved, trust_remote_code=trust_remote_code)


def _of_run(run_dir: RunDirectory) -> SavedModel:
    status = run_dir.read_status()
    paths.refuse_forbidden(run_dir.final, UsageError, SOURCE)
    if status.state == "done" and has_weights(run_dir.final):
        return SavedModel(run_dir.final, f"the result of {run_dir.path}", run_dir, status.step)
    newest, passed_over = checkpoints.newest_valid(run_dir.checkpoints)
    why = "".join(f"; {line}" for line in passed_over)
    if newest is None:
        problem = f"the run {run_dir.path} has no result and no valid checkpoint{why}"
        fix = f"Resume it first: {resume_advice(run_dir.path)}"
        raise RunDirectoryError(problem, where=SOURCE, fix=fix)
    description = f"checkpoint {newest.step} of {run_dir.path}, whose training is not finished{why}"
    return _whole(SavedModel(newest.path, description, run_dir, newest.step))


def _of_checkpoint(path: Path) -> SavedModel:
    checkpoint = checkpoints.read_checkpoint(path)
    if checkpoint.problem:
        problem = f"{path} is not a valid checkpoint: {checkpoint.problem}"
        raise RunDirectoryError(problem, where=SOURCE, fix="Use an older checkpoint, or give the run directory.")
    return _whole(
        SavedModel(path, f"the checkpoint {path}", _run_around(path.absolute().parent.parent), checkpoint.step)
    )


def _whole(source: SavedModel) -> SavedModel:
    path_checks.check_folder(str(source.folder), source.folder, SOURCE)
    if not has_weights(source.folder):
        pickled = next((file.name for file in sorted(source.folder.iterdir()) if _PICKLED.fullmatch(file.name)), None)
        if pickled:
            pickles = f"its weights as pickles ({pickled}), which can run code; tuner loads only safetensors"
            problem = f"{source.description}, holds {pickles}"
            fix = "If you trust it, convert it: load and save it once with transformers."
            raise UsageError(problem, where=SOURCE, fix=fix)
        if source.run_dir and checkpoints.inspect(source.folder, hashes=False) is None:
            problem = f"{source.description}, holds only the trained layers and not the frozen ones"
            fix = f"Finish the run: {resume_advice(source.run_dir.path)}"
            raise UsageError(problem, where=SOURCE, fix=fix)
        problem = f"{source.folder} has no {' or '.join(WEIGHTS)}"
        raise UsageError(problem, where=SOURCE, fix="Give a run directory of tuner, or a checkpoint in it.")
    return source


def _run_around(folder: Path) -> RunDirectory | None:
    return RunDirectory(folder) if is_run(folder) else None


def has_weights(folder: Path) -> bool:
    """Return whether a folder has safetensors of a whole model or of an adapter."""
    return any((folder / name).is_file() for name in WEIGHTS)


def check_dest(dest: Path) -> None:
    """Check that an export can be written to `dest`, without creating anything.

    Raises:
        UsageError: `dest` is not empty, or no folder can be created there.
    """
    if dest.suffix == ".gguf":
        fix = f"Give a folder for it and its Modelfile: tuner export SOURCE {dest.with_suffix('')} --as gguf."
        raise UsageError(f"{dest} is the name of a GGUF file, and an export is a folder", where=DEST, fix=fix)
    if os.path.lexists(dest) and not (dest.is_dir() and not any(dest.iterdir())):
        problem = f"{dest} is not empty" if dest.is_dir() else f"{dest} is a file"
        raise UsageError(problem, where=DEST, fix="Choose another folder; nothing was overwritten.")
    if dest.is_dir() and (dest.is_symlink() or dest.is_mount() or dest.samefile(".")):
        problem = f"{dest} is a link, a mount point or the working directory, and an export cannot replace it"
        raise UsageError(problem, where=DEST, fix=f"Choose a new folder in it: {dest / 'my-model'}.")
    above = next(folder for folder in dest.absolute().parents if paths.exists(folder))
    if dest.name == ".." or not above.is_dir():
        problem = f"{above} is a file" if not above.is_dir() else f"{dest} is not a valid folder name"
        raise UsageError(problem, where=DEST, fix="Choose another folder; nothing was overwritten.")
