"""The arguments of `from_pretrained` that say which commit is loaded, and whether code that comes with it may run.

Every call gets them from here, or says `trust_remote_code=False` itself: without a word transformers asks the terminal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tuner import paths, remote_code
from tuner.progress import told
from tuner.recipes.schema import Model

LoadOptions = dict[str, Any]
"""Keyword arguments of `from_pretrained`."""


def load_options(model: Model) -> LoadOptions:
    """Return the arguments for a model. Trusted code is first compared with what the user trusted, or recorded.

    Raises:
        ModelError: it is other code, or code that is bound to nothing.
    """
    assert model.path is not None, "checked before"
    is_local, is_commit = paths.local(model.path) is not None, remote_code.is_commit(model.revision)
    options: LoadOptions = {
        "revision": "main" if is_local else model.revision or "main",
        "trust_remote_code": model.trust_remote_code,
    }
    if not model.trust_remote_code:
        return options
    code = remote_code.check(model.path, model.revision)
    # A rank's recipe holds the hash of the code: its launcher has recorded it.
    if code and model.revision != code.hash and remote_code.record(code):
        told(f"Trusted from now on: {code}")
    # Files may name classes of the repository on the hub that they come from: these are taken from the same commit.
    return {**options, "code_revision": model.revision} if is_commit else options


def at(model: Model, folder: str) -> Model:
    """Return a model with its files in a folder: a download, or the tokenizer that was saved with its adapter."""
    revision = model.revision if remote_code.is_commit(model.revision) or folder == model.path else None
    return model.model_copy(update={"path": folder, "revision": revision})


def written(model: Model, folder: Path) -> Model:
    """Return a model with its files in a folder that this process has written: its code is what was trusted before."""
    placed = at(model, str(folder))
    code = remote_code.code_in(folder) if model.trust_remote_code else None
    is_bound = code is None or not code.files or remote_code.is_commit(placed.revision)
    return placed if is_bound or code is None else placed.model_copy(update={"revision": code.hash})
