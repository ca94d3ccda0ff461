"""A tool's words as `keys/TOOL.toml` lists them, so that a new one is a row there.

[same]: a key of a recipe -> the words with its values.
[left]: why there is no counterpart -> words; a `*` stands for all that fit and that stand below [others].
[others]: without this list a `*` would take misprints too; `block.*` is a block that takes any key.
[groups]: what a name in angle brackets stands for: each of these words in its place.
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
    """The words with a rule (one of our keys, or why there is none), and those that a `*` of the rules may mean."""

    rules: Mapping[str, Alias | str]
    others: frozenset[str]


@cache
def of(tool: str) -> Words:
    """Return the words that a file of the folder lists."""
    found = tomllib.loads((_FOLDER / f"{tool}.toml").read_text(encoding="utf-8"))
    groups = found.get("groups", {})
    same = {word: Alias(ours) for ours, words in found.get("same", {}).items() for word in _each(words, groups)}
    left = {word: why for why, words in found.get("left", {}).items() for word in _each(words, groups)}
    return Words({**same, **left}, frozenset(_each(found.get("others", {}).get("words", ""), groups)))


def _each(words: str, groups: Mapping[str, str]) -> Iterator[str]:
    for word in words.split():
        group = next((name for name in groups if word.startswith(f"<{name}>")), None)
        if group is None:
            yield word
        else:
            yield from (f"{member}{word.removeprefix(f'<{group}>')}" for member in groups[group].split())


def has(others: frozenset[str], key: str) -> bool:
    """Say whether a key is among `others`, inside a block of theirs that takes any, or a block around some."""
    if key in others or f"{key}.*" in others:
        return True
    parts = key.split(".")
    if any(".".join((*parts[:end], "*")) in others for end in range(1, len(parts))):
        return True
    return any(one.startswith(f"{key}.") for one in others)
