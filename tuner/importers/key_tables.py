"""Reads the tables of a tool's keys, `keys/TOOL.toml`: a new key is one more row there.

[same]: key of a recipe -> keys of the tool with the same values; a `*` stands for the last part of the tool's key.
[left]: reason why there is no counterpart -> keys of the tool; a `*` matches keys that [others] lists.
[changes]: reason -> keys that change what is learned, and that a recipe cannot have; `key=value|value` lists the values
    that mean what tuner does, otherwise those are false, 0 and empty ones.
[block.NAME.left], [block.NAME.changes]: the same for the keys of a block inside a list.
[others]: every key that a `*` may match, so that a misspelt key is an error; `block.*` is a block with any keys.
[groups]: name in angle brackets -> the words that it stands for.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from tuner.files import read_text
from tuner.importers.aliases import Alias

_FOLDER = Path(__file__).parent / "keys"


class Changes(NamedTuple):
    """Why a key that changes what is learned has no counterpart, and the values (lower case) that change nothing."""

    why: str
    harmless: frozenset[str] | None = None

    def is_harmless(self, value: object) -> bool:
        """Return whether a value, or each one of a list, means what tuner does anyway."""
        if self.harmless is None:
            return value in (None, "", [], {}, ()) or str(value).lower() in _OFF
        values = value if isinstance(value, list) else [value]
        return all(str(item).lower() in self.harmless for item in values)


_OFF = ("false", "no", "0", "0.0")
Reason = str | Changes
"""Why a key has no counterpart."""


class Words(NamedTuple):
    """A tool's keys with a rule (a key of a recipe, or why no key fits), and the keys that a `*` may match.

    `blocks`: name of a block inside a list -> the same for its keys.
    """

    rules: Mapping[str, Alias | Reason]
    others: frozenset[str]
    blocks: Mapping[str, Mapping[str, Reason]]


@cache
def of(tool: str) -> Words:
    """Return the keys that `keys/TOOL.toml` lists."""
    tables = tomllib.loads(read_text(_FOLDER / f"{tool}.toml"))
    groups = tables.get("groups", {})
    same = {
        word: Alias(our_key.replace("*", word.rpartition(".")[2]))
        for our_key, words in tables.get("same", {}).items()
        for word in _each(words, groups)
    }
    blocks = {name: _reasons(block, groups) for name, block in tables.get("block", {}).items()}
    others = frozenset(_each(tables.get("others", {}).get("words", ""), groups))
    return Words({**same, **_reasons(tables, groups)}, others, blocks)


def _reasons(tables: Mapping[str, Mapping[str, str]], groups: Mapping[str, str]) -> dict[str, Reason]:
    changes: dict[str, Reason] = {}
    for why, words in tables.get("changes", {}).items():
        for word in _each(words, groups):
            key, equals, values = word.partition("=")
            changes[key] = Changes(why, frozenset(values.lower().split("|")) if equals else None)
    left = {word: why for why, words in tables.get("left", {}).items() for word in _each(words, groups)}
    return {**changes, **left}


def _each(words: str, groups: Mapping[str, str]) -> Iterator[str]:
    for word in words.split():
        group, is_group, suffix = word.removeprefix("<").partition(">")
        yield from (f"{member}{suffix}" for member in groups[group].split()) if is_group else (word,)


def has(others: frozenset[str], key: str) -> bool:
    """Return whether `others` has the key, a block that takes any key and holds it, or a key inside it."""
    around = {f"{block}.*" for block in accumulate(key.split("."), "{}.{}".format)}
    return key in others or not others.isdisjoint(around) or key in _blocks(others)


@cache
def _blocks(others: frozenset[str]) -> frozenset[str]:
    """Return the keys that hold a key of `others`."""
    return frozenset(block for key in others for block in accumulate(key.split(".")[:-1], "{}.{}".format))
