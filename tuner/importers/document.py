"""A config as its tool wrote it: nested values that remember their lines.

It knows no tool and no key of ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from tuner.errors import RecipeError
from tuner.recipes import merging, yaml_text

Keys = merging.Keys
"""The way to a value; the place in a list counts from 0."""


@dataclass(frozen=True)
class Name:
    """A name of Python's in an XTuner config, such as `AutoModelForCausalLM.from_pretrained`: looked at, never run."""

    text: str

    @property
    def last(self) -> str:
        """Its last word; of `X.from_pretrained`, X."""
        return self.text.removesuffix(".from_pretrained").rpartition(".")[2]

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Document:
    """One config.

    Attributes:
        values: Nested dicts and lists.
        name: The path as the user gave it, or 'the command line'.
        lines: From 1; of the keys that have one.
        folder: Where relative paths of the file begin.
        command: The words that begin a command line, such as ('trl', 'sft'); empty for a file.
        environ: What a command line sets before it, such as NPROC_PER_NODE=2.
        used: Names at the top that other values are written with.
        more_calls: Lines of a script's further calls that train, of which this document is not.
        files: Keys at the top that another file holds -> that file's name.
    """

    values: dict[str, Any]
    name: str
    lines: Mapping[Keys, int] = field(default_factory=dict)
    folder: Path = Path()
    command: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    more_calls: tuple[int, ...] = ()
    used: frozenset[str] = frozenset()

    @classmethod
    def of_yaml(cls, path: Path) -> Self:
        """Read a YAML or JSON file that holds one mapping; raises as `yaml_text.read` does."""
        found = yaml_text.read(path)
        return cls(found.values, str(path), found.lines, path.parent)

    def where(self, keys: Keys = ()) -> str:
        """Return the line of a key, or of the nearest key around it, as `file:line`."""
        name = self.files.get(keys[0], self.name) if keys else self.name
        inner = (keys[:end] for end in range(len(keys), 0, -1))
        line = next((self.lines[one] for one in inner if one in self.lines), None)
        return name if line is None else f"{name}:{line}"

    def wrong(self, what: str, keys: Keys = (), fix: str | None = None) -> RecipeError:
        """Return an error about the value at `keys`."""
        return RecipeError(what, where=self.where(keys), fix=fix)

    def resolved(self, *, whole: bool = True) -> Self:
        """Return the document with every `${a.b}` replaced by the value at a.b; raises as `interpolation` does."""
        values, used = yaml_text.with_references(self.values, self.wrong, whole=whole)
        return replace(self, values=values, used=self.used | used)


def walk(values: Mapping[str, Any], ends: Mapping[str, Any], keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yield every value with the way to it; a dict is gone into, unless its dotted key is among `ends`."""
    for key, value in values.items():
        inner = (*keys, str(key))
        if isinstance(value, dict) and value and ".".join(inner) not in ends:
            yield from walk(value, ends, inner)
        else:
            yield inner, value
