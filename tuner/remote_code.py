"""The code that comes with a model: what it is, where it can be read, and whether it is what the user trusted.

On the hub code is bound to a commit. In a folder it is bound to what it was at its first trusted start: a record in
tuner's cache holds the hash of each file. `recipes.trust` decides whether it may run at all.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tuner import paths
from tuner.errors import Key, ModelError, Option
from tuner.files import disk_errors, make_folder, read_json_object, sha256, write_json

FLAG = "--trust-remote-code"
KEY = "model.trust_remote_code"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HASH = "sha256:"
_MOST_FILES = 1_000
_MOST_SHOWN = 20
"""Files of code that a message lists."""
WITH_CLASSES = (
    *("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json"),
    "video_preprocessor_config.json",
)
"""The files in which transformers looks for `auto_map`: the classes that come with a model."""


class Code(NamedTuple):
    """The Python files in a model's folder: the hash of each by its name."""

    folder: Path
    files: Mapping[str, str]

    @property
    def hash(self) -> str:
        """One hash of all names and hashes, as `model.revision` holds it."""
        text = "".join(f"{name}\0{digest}\n" for name, digest in sorted(self.files.items()))
        return f"{_HASH}{sha256(text.encode())}"

    @property
    def names(self) -> str:
        """The names of the files, for messages."""
        num_more = len(self.files) - _MOST_SHOWN
        listed = ", ".join(sorted(self.files)[:_MOST_SHOWN])
        return f"{listed} and {num_more} more" if num_more > 0 else listed

    def __str__(self) -> str:
        return f"the code in {self.folder}: {self.names} ({self.hash})"


def code_in(folder: Path) -> Code:
    """Return the code in a model's folder.

    Raises:
        ModelError: it has too many files, or one that cannot be read.
    """
    files = []
    for file in folder.rglob("*.py"):
        files.append(file)
        if len(files) > _MOST_FILES:
            message = f"{str(folder)!r} has more than {_MOST_FILES:,} files of code, which is no model's folder"
            raise ModelError(message, where="model.path", fix="Give the folder of the model alone.")
    try:
        return Code(folder, {str(file.relative_to(folder)): sha256(file) for file in sorted(files) if file.is_file()})
    except OSError as error:
        message = f"the code of {str(folder)!r} cannot be read: {error.strerror}"
        raise ModelError(message, where="model.path", fix="Correct the permissions of its files.") from error


def advice(path: str | None, revision: str | None = None) -> str:
    """Return where the code of a model can be read, and the flag that allows it."""
    folder = paths.local(path) if path else None
    if folder is None:
        pin = "" if is_commit(revision) else f" {Key('model.revision', 'COMMIT')}"
        page = f"https://huggingface.co/{path}/tree/{revision if is_commit(revision) else 'main'}"
        return f"Read its code at {page}, then add {Option('trust_remote_code', True)}{pin}."
    names = code_in(folder).names if paths.is_folder(folder) else ""
    if not names:
        return f"There is no code in {folder}: copy the model again with all its files."
    return f"Read the code in {folder} ({names}), then add {Option('trust_remote_code', True)}."


def described(path: str, revision: str | None) -> str:
    """Return which code a model runs, for messages; its files may be gone."""
    folder = paths.local(path)
    if folder is None:
        return f"the code of {path} at {revision}"
    return str(code_in(folder)) if paths.is_folder(folder) else f"the code in {folder}"


def is_commit(revision: str | None) -> bool:
    """Return whether a revision is a full commit, which cannot change."""
    return bool(revision and _COMMIT.fullmatch(revision))


def check(path: str, revision: str | None) -> Code | None:
    """Check that the code of a model that is about to run is what the user trusted; None if the model has no code.

    Args:
        path: The model's folder, or its id on the hub.
        revision: `model.revision`. For a folder: None, the hash of its code, or the commit of the model on the
            hub that the folder's files take code from.

    Raises:
        ModelError: no commit, other code than the hash or the record says, or code of an unknown commit.
    """
    folder = paths.local(path)
    if folder is None:
        if is_commit(revision):
            return None
        message = f"the code of {path!r} may run only at a full 40-digit commit, and model.revision is {revision!r}"
        fix = f"Set model.revision to it, or: hf download {path} --revision COMMIT --local-dir DIR, and give DIR."
        raise ModelError(message, where="model.revision", fix=fix)
    for file, reference in _references(folder):
        elsewhere, _, inside = reference.rpartition("--")
        if (elsewhere and not is_commit(revision)) or not re.fullmatch(r"\w+\.\w+", inside):
            message = f"{folder / file} refers to code outside its folder, {reference!r}, which is bound to no commit"
            fix = "Copy that code into the folder, and name it there without the repository."
            raise ModelError(message, where="model.path", fix=fix)
    code = code_in(folder)
    if not code.files:
        return None
    if revision and not is_commit(revision) and revision != code.hash:
        message = f"{code} is not the code of model.revision = {revision!r}"
        fix = f"Read it; if you trust it as it is now: {Key('model.revision', code.hash)}"
        raise ModelError(message, where="model.revision", fix=fix)
    if revision != code.hash:
        check_record(code)
    return code


def check_record(code: Code) -> None:
    """Check that the code in a folder is what the record says, if there is one.

    Raises:
        ModelError: it is other code.
    """
    recorded = read_json_object(_record(code.folder)).get("files")
    if not isinstance(recorded, dict) or recorded == code.files:
        return
    names = sorted(name for name in {*recorded, *code.files} if recorded.get(name) != code.files.get(name))
    message = f"the code in {code.folder} has changed since you trusted it: {', '.join(names[:_MOST_SHOWN])}"
    fix = f"Read it; if you trust it as it is now, remove {_record(code.folder)}."
    raise ModelError(message, where="model.path", fix=fix)


def record(code: Code) -> bool:
    """Record the code that a trusted start runs, and return whether this is the first one of this code.

    Raises:
        DiskError: the cache cannot be written.
    """
    file = _record(code.folder)
    if read_json_object(file).get("files") == dict(code.files):
        return False
    with disk_errors(file, "Set TUNER_CACHE to a writable folder."):
        make_folder(file.parent)
        write_json(file, {"folder": str(code.folder.absolute()), "files": dict(code.files)})
    return True


def _record(folder: Path) -> Path:
    name = sha256(str(folder.resolve()).encode())[:32]
    return paths.cache(os.environ) / "trusted_code" / f"{name}.json"  # effect: where the cache is


def _references(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the file and the text of each class that a model's files name."""
    for file in WITH_CLASSES:
        auto_map = read_json_object(folder / file).get("auto_map")
        values = auto_map.values() if isinstance(auto_map, dict) else [auto_map]
        for value in values:
            for reference in value if isinstance(value, list | tuple) else [value]:
                if reference is not None:
                    yield file, str(reference)


PICKLES = (".bin", ".pth", ".pt")
WEIGHTS = (".safetensors", *PICKLES)
"""The ends of the names of files with weights: safetensors, and what torch.save writes."""

PUBLISHED_PICKLES = {
    "openai/clip-vit-large-patch14-336": (
        1_711_974_081,
        "c6032c2e0caae3dc2d4fba35535fa6307dbb49df59c7e182b1bc4b3329b81801",
    )
}
"""Models that have no safetensors -> the bytes and the SHA-256 of their pickle, which holds tensors alone.

The tower of LLaVA 1.5 and of XTuner's recipes: pytorch_model.bin at commit ce19dc912ca5cd21c8a653c79e251e808ccabcd1.
"""


def is_published(pickle: Path) -> bool:
    """Return whether a file is one of `PUBLISHED_PICKLES`, to the byte."""
    try:
        size = pickle.stat().st_size
        return any(
            size == published_size and sha256(pickle) == digest for published_size, digest in PUBLISHED_PICKLES.values()
        )
    except OSError:
        return False


def untrusted_pickles(holder: str, where: str) -> ModelError:
    """Return the error of weights that are pickles, which the user does not trust; `holder` is or has them."""
    problem = f"{holder} holds weights as pickles, which can run code when they are read"
    fix = (
        f"Convert them to safetensors (docs/vision.md), or if you trust them, add {Option('trust_remote_code', True)}."
    )
    return ModelError(problem, where=where, fix=fix)
