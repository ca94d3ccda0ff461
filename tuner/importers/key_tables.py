"""Reads the tables of a tool's keys, `keys/TOOL.toml`: a new key is one more row there.

[same]: key of a recipe -> keys of the tool with the same values.
[left]: reason why there is no counterpart -> keys of the tool; a `*` matches keys that [others] lists.
[others]: every key that a `*` may match, so that a misspelt key is an error; `block.*` is a block with any keys.
[groups]: name in angle brackets -> the words that it stands for.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tuner.recipes.aliases import Alias

_FOLDER = Path(__file__).parent / "keys"


class Words(NamedTuple):
    """A tool's keys with a rule (a key of a recipe, or why there is no such key), and the keys that a `*` may match."""

    rules: Mapping[str, Alias | str]
    others: frozenset[str]


@cache
def of(tool: str) -> Words:
    """Return the keys that `keys/TOOL.toml` lists."""
    tables = tomllib.loads((_FOLDER / f"{tool}.toml").read_text(encoding="utf-8"))
    groups = tables.get("groups", {})
    same = {word: Alias(ours) for ours, words in tables.get("same", {}).items() for word in _each(words, groups)}
    left = {word: why for why, words in tables.get("left", {}).items() for word in _each(words, groups)}
    return Words({**same, **left}, frozenset(_each(tables.get("others", {}).get("words", ""), groups)))


def _each(words: str, groups: Mapping[str, str]) -> Iterator[str]:
    for word in words.split():
        group = next((name for name in groups if word.startswith(f"<{name}>")), None)
        if group is None:
            yield word
        else:
            yield from (f"{member}{word.removeprefix(f'<{group}>')}" for member in groups[group].split())


def has(others: frozenset[str], key: str) -> bool:
    """Return whether `others` has the key, a block that takes any key and holds it, or a key inside it."""
    if key in others or f"{key}.*" in others:
        return True
    parts = key.split(".")
    if any(".".join((*parts[:end], "*")) in others for end in range(1, len(parts))):
        return True
    return any(one.startswith(f"{key}.") for one in others)
