"""Check that the model, the adapter and the data of a recipe exist, may be read and are not empty."""

from __future__ import annotations

import os
from pathlib import Path

from tuner import assets, paths, remote_code
from tuner.errors import DataError, Key, ModelError, Option, nearest, options
from tuner.model_folder import MAX_LAYERS
from tuner.recipes import catalog, mistaken, names, trust
from tuner.recipes.model_facts import num_layers
from tuner.recipes.schema import RecipeConfig, Vision
from tuner.vocabulary import TEACHER

_OF_A_MODEL = (".json", ".safetensors", ".model", ".jinja", ".txt")
_MAX_ENTRIES = 10_000
"""Files in a folder of data; `datasets` takes 20 s to find that many."""
_RELATIVES = {
    "Qwen/Qwen-": "qwen1_5_7b_chat",
    "THUDM/chatglm": "glm4_9b_chat_hf",
    "deepseek-ai/deepseek-moe": "deepseek_v2_lite",
    "openbmb/MiniCPM-": "minicpm3_4b",
}
"""Beginnings of hub ids with an architecture that transformers lacks -> a related part that it can load."""


def check_model(config: RecipeConfig) -> None:
    """Check that the model's path is set, transformers has its architecture, and its folder exists.

    Raises:
        ModelError: no path, no such folder, no config.json in it, only remote code that is not trusted, or
            trusted code that has changed.
    """
    path = config.model.path
    if not path:
        fix = f"Give one: {Option('model')} with a path or a hub id."
        raise ModelError("no model is given", where="model.path", fix=fix)
    if config.model.remote_code and not config.model.trust_remote_code:
        relative = next((part for prefix, part in _RELATIVES.items() if path.startswith(prefix)), None)
        instead = f" Or use a related model that needs none: {relative}." if relative else ""
        message = (
            f"transformers has no architecture for {path!r}: it needs remote code, which tuner does not run by default"
        )
        raise ModelError(message, where="model.path", fix=f"{remote_code.advice(path)}{instead}")
    _refuse_data(path, config.train_dataloader.dataset.path)
    folder = paths.local(path)
    if folder is None and "/" not in path and (meant := mistaken.hub_id(path)):
        message = f"{path!r} has no owner, as an id on the hub has"
        raise ModelError(message, where="model.path", fix=f"Did you mean {meant}?")
    if folder is not None:
        check_folder(path, folder, "model.path")
        if not paths.exists(folder / "config.json"):
            raise mistaken.no_model(path, folder)
    if config.model.vision:
        _check_vision(config.model.vision)
    check_adapter(config)
    trust.check_bound(config)


def check_template(config: RecipeConfig) -> None:
    """Check that the chat template that the recipe names exists, and uses the names that the recipe gives a value.

    Raises:
        RecipeError: it does not.
    """
    if config.model.chat_template:
        assets.check_defaults(catalog.chat_template(config.model.chat_template), config.model.chat_template_kwargs)


def _refuse_data(path: str, data: str | None) -> None:
    """Check that the model's path is not a data file."""
    file = paths.expanded(path)
    is_data = path.endswith(paths.DATA) or (path.endswith(".json") and paths.is_file(file))
    if is_data and not paths.is_folder(file):
        give = Option("model", data) if data and not data.endswith(paths.DATA) else Option("model", "MODEL")
        fix = f"Give it with {Option('data')}: {options(give, Option('data', path))}"
        raise ModelError(f"{path!r} is a data file, not a model", where="model.path", fix=fix)


def _check_vision(vision: Vision) -> None:
    if tower := paths.local(vision.path):
        where = "model.vision.path"
        check_folder(vision.path, tower, where)
        if not paths.exists(tower / "config.json"):
            fix = "Give a folder with a CLIP model, as save_pretrained writes it."
            raise ModelError(f"the tower {vision.path!r} has no config.json", where=where, fix=fix)
    if vision.projector:
        projector, where = paths.expanded(vision.projector), "model.vision.projector"  # none is on the hub
        if paths.is_file(projector):
            paths.refuse_forbidden(projector, ModelError, where)
        else:
            check_folder(vision.projector, projector, where)


def check_adapter(config: RecipeConfig) -> None:
    """Check that the adapter in `adapter.path`, if there is one, exists.

    Raises:
        ModelError: it does not.
    """
    path = config.adapter.path if config.adapter else None
    if path and not all(paths.exists(paths.expanded(path) / file) for file in (paths.ADAPTER, paths.TENSORS)):
        message = f"the adapter {path!r} has no {paths.ADAPTER} with {paths.TENSORS}"
        raise ModelError(message, where=paths.ADAPTED, fix="Give a run, or the folder of an adapter that PEFT saved.")


def check_teacher(config: RecipeConfig) -> None:
    """Check that the path of the objective's teacher, if it has one, is set, and that a local one is a whole model.

    Raises:
        ModelError: it is not set, does not exist, or is an adapter or no model.
    """
    teacher = config.objective.taught_by
    if teacher is None:
        return
    if not teacher.path:
        fix = f"Give one: {Key('teacher', 'PATH')}, a folder, a run, or an id on the hub."
        raise ModelError("no teacher is given", where=TEACHER, fix=fix)
    folder = paths.local(teacher.path)
    if folder is None:
        return
    check_folder(teacher.path, folder, TEACHER)
    if paths.exists(folder / "config.json"):
        return
    if paths.exists(folder / paths.ADAPTER):
        fix = f"Merge it into its base: tuner export {teacher.path} DEST --merge, then {Key('teacher', 'DEST')}."
        raise ModelError(f"the teacher {teacher.path!r} is an adapter", where=TEACHER, fix=fix)
    fix = "Give a folder written by save_pretrained, or a run that has ended."
    raise ModelError(f"the teacher {teacher.path!r} has no config.json", where=TEACHER, fix=fix)


def check_folder(path: str, folder: Path, where: str) -> None:
    """Check that a model's folder can be read, and that its number of layers is plausible.

    Args:
        path: The user's text.
        folder: The folder that the text means.
        where: The key or flag of the text.

    Raises:
        ModelError: no such folder, no permission to read it, or too many layers.
    """
    paths.refuse_forbidden(folder, ModelError, where)
    if not paths.exists(folder):
        raise ModelError(f"the model {path!r} {_missing(folder)}", where=where, fix=_nearby(folder))
    if not folder.is_dir():
        raise ModelError(f"the model {path!r} is not a folder", where=where, fix="Give the folder it is in.")
    for file in sorted(folder.iterdir()):
        if file.suffix in _OF_A_MODEL:
            paths.refuse_forbidden(file, ModelError, where)
    if (count := num_layers(folder)) > MAX_LAYERS:
        message = f"num_hidden_layers = {count} is more than {MAX_LAYERS:,}"
        raise ModelError(message, where=folder / "config.json", fix="Use the config that the model was published with.")


def check_data(config: RecipeConfig) -> None:
    """Check that every data set's path is set and, if it is local, exists and is not empty.

    Raises:
        DataError: no path, no such file, or an empty file or folder.
    """
    for key, loader in config.loaders.items():
        for number, rows in enumerate(loader.dataset.data_sets):
            inner = f".mixture[{number}]" if loader.dataset.mixture else ""
            _check_path(rows.path, f"{key}.dataset{inner}.path")


def _check_path(path: str | None, where: str) -> None:
    if not path:
        raise DataError("no data set is given", where=where, fix=f"Give one: {Option('data', 'FILE')}.")
    local_path = paths.local(path)
    if local_path is None:
        return
    paths.refuse_forbidden(local_path, DataError, where)
    files = paths.matching(local_path)
    if not files:
        raise DataError(f"the data {path!r} {_missing(local_path)}", where=where, fix=_nearby(local_path))
    for file in files[:_MAX_ENTRIES]:
        paths.refuse_forbidden(file, DataError, where)
    if paths.exists(local_path) and not (local_path.is_file() or local_path.is_dir()):
        # Reading a pipe or a device would never end.
        raise DataError(f"the data {path!r} is neither a file nor a folder", where=where, fix="Give a file or folder.")
    if local_path.is_file() and local_path.stat().st_size == 0:
        raise DataError(f"the data file {path!r} is empty", where=where, fix="Add at least one row.")
    if local_path.is_dir() and names.holds_model(local_path):
        fix = f"Give it with {Option('model')}, and a file or folder of rows with {Option('data')}."
        raise DataError(f"the data {path!r} is a model's folder", where=where, fix=fix)
    if local_path.is_dir() and not any(local_path.iterdir()):
        raise DataError(f"the data folder {path!r} is empty", where=where, fix="Put a data file into it.")
    if local_path.is_dir() and _is_crowded(local_path):
        message = f"the data folder {path!r} has more than {_MAX_ENTRIES:,} files and folders"
        fix = "Give a folder with only the data, or a pattern such as FOLDER/*.jsonl."
        raise DataError(message, where=where, fix=fix)


def _is_crowded(folder: Path) -> bool:
    """Return whether a folder has so many files that `datasets` would search it for minutes, 40 times."""
    count = 0
    for _, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]  # as `datasets` does
        count += len(folders) + len(files)
        if count > _MAX_ENTRIES:
            return True
    return False


def _missing(path: Path) -> str:
    is_link = os.path.islink(path)  # noqa: PTH114 (no error for a name too long)
    return f"is a link to {str(path.readlink())!r}, which does not exist" if is_link else "does not exist"


def _nearby(path: Path) -> str:
    folder = path.parent
    neighbors = [entry.name for entry in folder.iterdir() if entry != path] if paths.is_folder(folder) else []
    near = nearest(path.name, neighbors)
    return f"Did you mean {str(folder / near)!r}?" if near else "Check the path."
