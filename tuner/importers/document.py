"""A config of another tool as nested values, each with its line.

This module knows no tool and no key of a recipe.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from tuner.errors import RecipeError
from tuner.files import JsonObject
from tuner.recipes import merging, yaml_text

Value = Any
"""A value of another tool's config before it is checked: text, number, list or block."""
Keys = merging.Keys
"""The keys that lead to a value, from the outermost; positions in a list count from 0."""


@dataclass(frozen=True)
class PythonName:
    """A Python name in an XTuner config, such as `AutoModelForCausalLM.from_pretrained`. It is never imported."""

    text: str

    @property
    def last(self) -> str:
        """The last part of the name; for `X.from_pretrained`, X."""
        return self.text.removesuffix(".from_pretrained").rpartition(".")[2]

    def __repr__(self) -> str:
        return self.text


def last_name(value: object) -> str:
    """Return the last part of a Python name or of a dotted text."""
    return value.last if isinstance(value, PythonName) else str(value).rpartition(".")[2]


@dataclass(frozen=True)
class ForeignConfig:
    """One config.

    Attributes:
        values: Nested dicts and lists.
        name: The path as the user gave it, or 'the command line'.
        lines: Line number of each key, from 1, where it is known.
        folder: The folder that relative paths in the file start from.
        command: Program and command of a command line, such as ('trl', 'sft'); empty for a file.
        environ: Variables set in front of a command line, such as NPROC_PER_NODE=2.
        used: Names at the top of the file that other values refer to.
        more_calls: Lines of further training commands in the same script; this document is the first.
        files: Key at the top -> the name of the file that it comes from, if that is another file.
        written: Key at the top -> the key that the file has for it, if that is another word.
    """

    values: JsonObject
    name: str
    lines: Mapping[Keys, int] = field(default_factory=dict)
    folder: Path = Path()
    command: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    more_calls: tuple[int, ...] = ()
    used: frozenset[str] = frozenset()
    written: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_yaml(cls, path: Path) -> Self:
        """Read a YAML or JSON file that holds one mapping; raises as `yaml_text.read_yaml` does."""
        yaml = yaml_text.read_yaml(path)
        return cls(yaml.values, str(path), yaml.lines, path.parent)

    def where(self, keys: Keys = ()) -> str:
        """Return the line of a key, or of the nearest key around it, as `file:line`."""
        name = self.files.get(keys[0], self.name) if keys else self.name
        line = merging.line_of(self.lines, keys)
        return name if line is None else f"{name}:{line}"

    def wrong(self, message: str, keys: Keys = (), fix: str | None = None) -> RecipeError:
        """Return an error about the value at `keys`."""
        return RecipeError(message, where=self.where(keys), fix=fix)

    def resolved(self, *, is_complete: bool = True) -> Self:
        """Return the document with every `${a.b}` replaced by the value at a.b; raises as `interpolation` does."""
        values, used = yaml_text.with_references(self.values, self.wrong, is_complete=is_complete)
        return replace(self, values=values, used=self.used | used)


def walk(values: Mapping[str, Value], ends: Mapping[str, Value], keys: Keys = ()) -> Iterator[tuple[Keys, Value]]:
    """Yield every value with its keys. Blocks are opened, unless their dotted key is in `ends`."""
    for key, value in values.items():
        inner = (*keys, str(key))
        if isinstance(value, dict) and value and ".".join(inner) not in ends:
            yield from walk(value, ends, inner)
        else:
            yield inner, value
