"""Hydra's `defaults`: a YAML file with the files that it builds on, laid over each other as Hydra does it.

A name without a file is passed over: whoever needs what it would say finds that missing, and ROLL's configs name more
than they use.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from tuner import paths
from tuner.errors import TunerError
from tuner.recipes import yaml_text
from tuner.recipes.merging import Layer, Merged
from tuner.recipes.origin import Keys, Kind, Place
from tuner.recipes.yaml_text import Yaml

DEFAULTS = "defaults"
_SELF = "_self_"
_AT_ROOT = ("_here_", "_global_")
_MAX_FILES = 64


def merged(found: Yaml, folder: Path, name: str, error: type[TunerError]) -> Merged:
    """Return a file's values over those of the files that its `defaults` name; `_self_` says where its own stand.

    Args:
        folder: That of the file, where relative names begin.
        name: What messages call it.

    Raises:
        TunerError: of the class `error`: a file outside of the file's surroundings, or one that is wrong.
    """
    made = Merged()
    for layer in _layers(_File(found, folder, name), _homes(folder), error, count()):
        made.lay(layer)
    return made


class _File(NamedTuple):
    found: Yaml
    folder: Path
    name: str

    def place(self, keys: Keys) -> Place:
        lines = (self.found.lines.get(keys[:end]) for end in range(len(keys), 0, -1))
        return Place(Kind.FILE, self.name, next(filter(None, lines), None))


def _homes(folder: Path) -> tuple[Path, ...]:
    # ROLL's examples name ../config/deepspeed_zero3; its tests name examples/config from below the working directory.
    return folder.resolve().parent, Path.cwd()


def _layers(file: _File, homes: tuple[Path, ...], error: type[TunerError], read: Iterator[int]) -> Iterator[Layer]:
    own = {key: value for key, value in file.found.values.items() if key != DEFAULTS}
    named = file.found.values.get(DEFAULTS) or []
    if not isinstance(named, list):
        raise error(f"{DEFAULTS} is not a list of files", where=file.place((DEFAULTS,)))
    for number, entry in enumerate(named if _SELF in named else [*named, _SELF]):
        where = file.place((DEFAULTS, str(number)))
        if entry == _SELF:
            yield Layer(own, file.place)
        elif inner := _named(entry, file.folder, homes, error, where):
            if next(read) == _MAX_FILES:
                raise error(f"more than {_MAX_FILES} nested base files", where=where, fix="Check for a cycle.")
            found = yaml_text.read(inner, may_be_empty=True, error=error)
            yield from _layers(_File(found, inner.parent, str(inner)), homes, error, read)


def _named(entry: Any, folder: Path, homes: tuple[Path, ...], error: type[TunerError], where: Place) -> Path | None:
    """Return the file that an entry names, such as `../config/zero3@_here_`; None where it is not there."""
    if isinstance(entry, dict) and len(entry) == 1:
        group, option = next(iter(entry.items()))
        if group.startswith("override "):  # about Hydra itself
            return None
        group, at, package = group.partition("@")
        entry = f"{group}/{option}{at}{package}"
    if not isinstance(entry, str):
        raise error(f"{entry!r} is not a file name", where=where, fix="Use a name such as ../config/zero3@_here_.")
    name, _, package = entry.partition("@")
    path = folder / f"{name}.yaml"
    if not paths.is_file(path):
        return None
    if not any(home in path.resolve().parents for home in homes):
        fix = "Use a file below the parent folder or below the working directory."
        raise error(f"{name!r} is outside of the config's folders", where=where, fix=fix)
    if package not in _AT_ROOT and "/" in name:
        what = (
            f"without @_here_, Hydra puts the values of {name!r} below its folder's name, "
            f"where ${{...}} does not find them"
        )
        raise error(what, where=where, fix=f"Use {name}@_here_.")
    return path
