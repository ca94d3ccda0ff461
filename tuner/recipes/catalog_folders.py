"""The folders that hold parts, in the order of their precedence, and the files in them.

The first folder that has a part of a name wins: those of `--catalog`, of TUNER_CATALOG, ./tuner_configs, those of
installed packages, and the package's own. It reads names of files, and of packages their entry points; no part.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from tuner.assets import CONFIGS, PACKAGE, TEMPLATES
from tuner.errors import RecipeError, UsageError, did_you_mean
from tuner.recipes.origin import Kind

OURS = "tuner"
"""The origin of the package's own parts."""
HERE = "tuner_configs"
VARIABLE = "TUNER_CATALOG"
GROUP = "tuner.catalog"
"""Of entry points; each names the module whose folder holds the parts."""
PRESETS = "deepspeed_presets"
KINDS = ("models", "methods", "objectives", "datasets", "recipes", TEMPLATES, PRESETS)
"""The folders of a catalog."""
NAME = re.compile(r"[a-z0-9]+(?:_[a-z0-9]+)*", re.ASCII)
"""A part's name: what recipe names are composed of, and what `catalog.suggest` compares."""
NAME_RULE = "lower-case letters and digits, with single underscores between them"

_SUFFIXES = {TEMPLATES: ".jinja", PRESETS: ".json"}
_LAYOUT = f"Give a folder with folders of parts: {', '.join(KINDS)}."
_given: list[Path] = []


class Folder(NamedTuple):
    """A folder laid out as `tuner/configs`; `origin` is what users call it, `kind` whose values its parts hold."""

    path: str
    origin: str
    kind: Kind

    def of(self, kind: str) -> str:
        """Return the folder of one kind of part."""
        is_ours = self.kind is Kind.PACKAGE and kind == PRESETS
        return os.path.join(PACKAGE if is_ours else self.path, kind)  # noqa: PTH118 (asked for with every name)


_OURS = Folder(str(CONFIGS), OURS, Kind.PACKAGE)


class PartFile(NamedTuple):
    """The file of a part, what messages call it, and the folders whose part of the same name it shadows."""

    full: str
    shown: str
    folder: Folder
    shadowed: tuple[Folder, ...] = ()

    @property
    def path(self) -> Path:
        """Where it is, from the root; made when it is asked for, as a list of 600 names takes long over Paths."""
        return Path(self.full)

    @property
    def is_ours(self) -> bool:
        """Whether it ships with the package; any other counts as a file of the user's."""
        return self.folder.kind is Kind.PACKAGE


@contextmanager
def using(*given: Path) -> Iterator[None]:
    """Look in these folders before all others, as `--catalog` asks."""
    before = given_folders()
    _given[:] = [*given, *before]
    try:
        yield
    finally:
        _given[:] = before


def given_folders() -> tuple[Path, ...]:
    """Return the folders that `--catalog` names."""
    return tuple(_given)


def folders() -> tuple[Folder, ...]:
    """Return all folders of parts, in the order of their precedence; the package's own is the last.

    Raises:
        UsageError: `--catalog` or TUNER_CATALOG names no folder.
    """
    variable = os.environ.get(VARIABLE, "")  # effect: where the user keeps parts
    named = [("--catalog", path) for path in _given]
    named += [(VARIABLE, Path(text)) for text in variable.split(os.pathsep) if text]
    for where, path in named:
        if not os.path.isdir(path):  # noqa: PTH112 (no error for a name too long)
            raise UsageError(f"there is no folder {str(path)!r}", where=where, fix=_LAYOUT)
    own = [path for _, path in named]
    own += [Path(HERE)] if os.path.isdir(HERE) else []  # noqa: PTH112 (asked for with every name)
    different: dict[str, str] = {}
    for folder in map(str, own):
        different.setdefault(os.path.realpath(folder), folder)  # it may be named twice
    users = [Folder(path, path, Kind.FILE) for path in different.values()]
    return (*users, *_installed(tuple(sys.path)), _OURS)


def has_own() -> bool:
    """Say whether there is any folder of parts but the package's, or an entry point that names none."""
    return len(folders()) > 1 or bool(_homeless(tuple(sys.path)))


def files(kind: str) -> Mapping[str, PartFile]:
    """Return the parts of one of `KINDS`, sorted by name.

    Raises:
        UsageError: as `folders`, or a folder cannot be read.
    """
    stamped = tuple((folder, _changed(folder, kind)) for folder in folders())
    return _files(kind, os.getcwd(), stamped)  # noqa: PTH109 (asked for with every name)


def _changed(folder: Folder, kind: str) -> int:
    """Return when files of a folder were last added or removed; the package's stay as they are."""
    try:
        return 0 if folder.kind is Kind.PACKAGE else os.stat(folder.of(kind)).st_mtime_ns  # noqa: PTH116
    except OSError:
        return 0


@lru_cache(maxsize=256)
def _files(kind: str, cwd: str, stamped: tuple[tuple[Folder, int], ...]) -> Mapping[str, PartFile]:
    """`cwd` tells folders of the same relative path apart, and the stamps those that changed."""
    found: dict[str, PartFile] = {}
    for folder, _ in stamped:
        unsaid = f"{PACKAGE}/" if folder.kind is Kind.PACKAGE else ""
        for name, path in _listed(folder, kind):
            if name in found:
                first = found[name]
                found[name] = first._replace(shadowed=(*first.shadowed, folder))
            elif NAME.fullmatch(name):
                found[name] = PartFile(os.path.join(cwd, path), path.removeprefix(unsaid), folder)  # noqa: PTH118
    return dict(sorted(found.items()))


def _listed(folder: Folder, kind: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the file of everything in a folder that is meant to be a part of a kind."""
    place, suffix = folder.of(kind), _SUFFIXES.get(kind, ".py")
    for name in _entries(place):
        if name.endswith(suffix) and not name.startswith(("_", ".")):  # __init__.py of a package's folder
            yield name.removesuffix(suffix), f"{place}/{name}"


def _entries(place: str) -> list[str]:
    """Return the names in a folder; none where it is not there."""
    try:
        return os.listdir(place)  # noqa: PTH208 (every command asks for 600 names)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        what = f"the folder cannot be read: {error.strerror}"
        raise UsageError(what, where=place, fix="Correct its permissions, or use another catalog.") from error


def misplaced() -> Iterator[RecipeError]:
    """Yield what in a user's catalog is not read: a folder nearly named as a kind, a file not named as a part."""
    for folder in folders():
        if folder.kind is Kind.PACKAGE:
            continue
        for name in sorted({*_entries(folder.path)}.difference(KINDS)):
            if fix := did_you_mean(name, KINDS):
                yield RecipeError(f"{name!r} is not a kind of part", where=Path(folder.path, name), fix=fix)
        for kind in KINDS:
            for name, path in sorted(_listed(folder, kind)):
                if not NAME.fullmatch(name):
                    yield RecipeError(f"{name!r} is not a valid name for a part", where=path, fix=f"Use {NAME_RULE}.")
    for entry_point, _, module in _homeless(tuple(sys.path)):
        what = f"the entry point {entry_point!r} of {GROUP} points to {module!r}, and that folder does not exist"
        yield RecipeError(what, where="installed packages", fix="Install that package again.")


@cache
def _installed(path: tuple[str, ...]) -> tuple[Folder, ...]:
    found = ((origin, place) for _, origin, module in _announced(path) for place in _places(module))
    return tuple(Folder(place, origin, Kind.FILE) for origin, place in found)


def _homeless(path: tuple[str, ...]) -> list[tuple[str, str, str]]:
    return [one for one in _announced(path) if not _places(one[2])]


@cache
def _announced(path: tuple[str, ...]) -> tuple[tuple[str, str, str], ...]:
    """Return (name, origin, module) of the entry points of installed packages, sorted by package."""
    # importlib.metadata takes 30 ms to import, and 5 ms to ask; this look takes 1 ms (107 packages).
    if not any(map(_announces, path)):
        return ()
    from importlib.metadata import entry_points

    found = {(f"package {one.dist.name if one.dist else one.name}", one) for one in entry_points(group=GROUP)}
    ordered = sorted(found, key=lambda pair: (pair[0], pair[1].name))
    return tuple((one.name, origin, one.module) for origin, one in ordered)


def _announces(place: str) -> bool:
    """Return whether a package that is installed in a folder of sys.path has an entry point of ours."""
    try:
        names = os.listdir(place)  # noqa: PTH208
    except OSError:
        return False
    infos = (name for name in names if name.endswith((".dist-info", ".egg-info")))
    return any(GROUP.encode() in _bytes(f"{place}/{name}/entry_points.txt") for name in infos)


def _bytes(file: str) -> bytes:
    try:
        with open(file, "rb") as stream:  # noqa: PTH123 (a Path of each package takes longer than the look)
            return stream.read()
    except OSError:
        return b""


def _places(module: str) -> tuple[str, ...]:
    """Return the folders of a module without importing it or the packages around it: that would run their code."""
    places: list[str] | None = None
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        spec = next(filter(None, (finder.find_spec(name, places) for finder in sys.meta_path)), None)
        if spec is None:
            return ()
        origin = [str(Path(spec.origin).parent)] if spec.origin else []
        places = [*spec.submodule_search_locations] if spec.submodule_search_locations is not None else origin
    return tuple(place for place in places or () if os.path.isdir(place))  # noqa: PTH112 (not in a zip archive)
