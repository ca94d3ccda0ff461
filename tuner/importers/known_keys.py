"""The keys that other tools have, as `keys/TOOL.txt` lists them: what a table names with a `*` is one of these.

Without the list a `*` would take misprints too. A table's own words are not repeated there.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).parent / "keys"
_WORKER = "<worker>"
_WORKERS = (
    *("actor_train", "actor_infer", "critic", "reference", "reward", "reward_model", "student", "student_train"),
    *("student_infer", "sft_train", "teacher", "validation", "train_env_manager", "val_env_manager"),
)
"""ROLL's roles, which all have the same keys."""


@cache
def of(name: str) -> frozenset[str]:
    """Return the keys that a file of the folder lists; `block.*` among them is a block that takes any key."""
    lines = (_FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    words = [word for line in lines if not line.startswith("#") for word in line.split()]
    return frozenset(one for word in words for one in _each_worker(word))


def _each_worker(word: str) -> Iterable[str]:
    return [word.replace(_WORKER, worker) for worker in _WORKERS] if _WORKER in word else [word]


def has(keys: frozenset[str], key: str) -> bool:
    """Say whether a key is among `keys`, inside a block of theirs that takes any, or a block around some."""
    if key in keys or f"{key}.*" in keys:
        return True
    parts = key.split(".")
    if any(".".join((*parts[:end], "*")) in keys for end in range(1, len(parts))):
        return True
    return any(one.startswith(f"{key}.") for one in keys)
