"""The parts of recipes: the folders that hold them, their names, and how a recipe's name is composed of them.

    {model}_[{objective}_]{method}_{dataset}_e{epochs}

The first folder that has a part of a name wins: the folders of `--catalog`, of TUNER_CATALOG, ./tuner_configs, those of
installed packages, and the package's own. This module reads names of files and first lines; `recipe_file` reads a part.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from tuner import assets
from tuner.assets import CONFIGS, PACKAGE, TEMPLATES
from tuner.errors import Option, RecipeError, UsageError, did_you_mean, nearest
from tuner.files import open_regular, read_bytes, read_named_text, read_text
from tuner.hooks import NameWord, other_tools
from tuner.recipes.merging import Kind

OURS = "tuner"
"""The origin of the package's own parts."""
HERE = "tuner_configs"
VARIABLE = "TUNER_CATALOG"
GROUP = "tuner.catalog"
"""The group of entry points; each names a module, and the folder of that module holds the parts."""
PRESETS = "deepspeed_presets"
FOLDERS = ("models", "methods", "objectives", "datasets", "recipes", TEMPLATES, PRESETS)
"""The folders of a catalog."""
NAME = re.compile(r"[a-z0-9]+(?:_[a-z0-9]+)*", re.ASCII)
"""A part's name: what recipe names are composed of, and what `suggest` compares."""
NAME_RULE = "lower-case letters and digits, with single underscores between them"

_SUFFIXES = {TEMPLATES: ".jinja", PRESETS: ".json"}
NONE = "none"
"""In a preset's place, as in `zero.config`, which stands above: it names no file."""
OF_PRESETS = "deepspeed_"
"""What the full name of a preset begins with."""
_LAYOUT = f"Give a folder with folders of parts: {', '.join(FOLDERS)}."
_given: list[Path] = []


class Folder(NamedTuple):
    """A folder laid out as `tuner/configs`; `origin` is its name in messages, `kind` the kind of its places."""

    path: str
    origin: str
    kind: Kind

    def of(self, kind: str) -> str:
        """Return the folder of one kind of part."""
        is_ours = self.kind is Kind.PACKAGE and kind == PRESETS
        return os.path.join(PACKAGE if is_ours else self.path, kind)  # noqa: PTH118 (asked for with every name)


_OURS = Folder(str(CONFIGS), OURS, Kind.PACKAGE)


class PartFile(NamedTuple):
    """The file of a part, its name in messages, and the folders with a part of the same name that it shadows."""

    full: str
    shown: str
    folder: Folder
    shadowed: tuple[Folder, ...] = ()

    @property
    def path(self) -> Path:
        """The absolute path. It is made on use: 600 Paths would make a list of names slow."""
        return Path(self.full)

    @property
    def is_ours(self) -> bool:
        """Whether the part ships with the package; any other part counts as the user's file."""
        return self.folder.kind is Kind.PACKAGE


@contextmanager
def using(*paths: Path) -> Iterator[None]:
    """Search these folders before all others, as `--catalog` does."""
    before = given_folders()
    _given[:] = [*paths, *before]
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
    named_folders = [("--catalog", path) for path in _given]
    named_folders += [(VARIABLE, Path(text)) for text in variable.split(os.pathsep) if text]
    for where, path in named_folders:
        if not os.path.isdir(path):  # noqa: PTH112 (no error for a name too long)
            raise UsageError(f"there is no folder {str(path)!r}", where=where, fix=_LAYOUT)
    user_paths = [path for _, path in named_folders]
    user_paths += [Path(HERE)] if os.path.isdir(HERE) else []  # noqa: PTH112 (asked for with every name)
    different: dict[str, str] = {}
    for folder in map(str, user_paths):
        different.setdefault(os.path.realpath(folder), folder)  # it may be named twice
    users = [Folder(path, path, Kind.FILE) for path in different.values()]
    return (*users, *_installed(tuple(sys.path)), _OURS)


def has_own() -> bool:
    """Return whether there is a folder of parts besides the package's, or an entry point without a folder."""
    return len(folders()) > 1 or bool(_homeless(tuple(sys.path)))


def files(kind: str) -> Mapping[str, PartFile]:
    """Return the parts of one of `FOLDERS`, sorted by name.

    Raises:
        UsageError: as `folders`, or a folder cannot be read.
    """
    stamped = tuple((folder, _changed(folder, kind)) for folder in folders())
    return _files(kind, os.getcwd(), stamped)  # noqa: PTH109 (asked for with every name)


def _changed(folder: Folder, kind: str) -> int:
    """Return when files of a folder were last added or removed; 0 for the package's, which do not change."""
    try:
        return 0 if folder.kind is Kind.PACKAGE else os.stat(folder.of(kind)).st_mtime_ns  # noqa: PTH116
    except OSError:
        return 0


@lru_cache(maxsize=256)
def _files(kind: str, cwd: str, stamped: tuple[tuple[Folder, int], ...]) -> Mapping[str, PartFile]:
    """Return the parts of a kind; `cwd` and the time stamps are in the cache's key."""
    parts: dict[str, PartFile] = {}
    for folder, _ in stamped:
        unsaid = f"{PACKAGE}/" if folder.kind is Kind.PACKAGE else ""
        for name, path in _listed(folder, kind):
            if name in parts:
                first = parts[name]
                parts[name] = first._replace(shadowed=(*first.shadowed, folder))
            elif NAME.fullmatch(name):
                parts[name] = PartFile(os.path.join(cwd, path), path.removeprefix(unsaid), folder)  # noqa: PTH118
    return dict(sorted(parts.items()))


def _listed(folder: Folder, kind: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the path of each file in a folder that has a part's suffix."""
    place, suffix = folder.of(kind), _SUFFIXES.get(kind, ".py")
    for name in _entries(place):
        if name.endswith(suffix) and not name.startswith(("_", ".")):  # __init__.py of a package's folder
            yield name.removesuffix(suffix), f"{place}/{name}"


def _entries(folder: str) -> list[str]:
    """Return the names in a folder, or an empty list if there is no such folder."""
    try:
        return os.listdir(folder)  # noqa: PTH208 (every command asks for 600 names)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        message = f"the folder cannot be read: {error.strerror}"
        raise UsageError(message, where=folder, fix="Correct its permissions, or use another catalog.") from error


def misplaced() -> Iterator[RecipeError]:
    """Yield what is not read in a user's catalog: a folder with nearly a kind's name, a file without a part's name."""
    for folder in folders():
        if folder.kind is Kind.PACKAGE:
            continue
        for name in sorted({*_entries(folder.path)}.difference(FOLDERS)):
            if fix := did_you_mean(name, FOLDERS):
                yield RecipeError(f"{name!r} is not a kind of part", where=Path(folder.path, name), fix=fix)
        for kind in FOLDERS:
            for name, path in sorted(_listed(folder, kind)):
                if not NAME.fullmatch(name):
                    yield RecipeError(f"{name!r} is not a valid name for a part", where=path, fix=f"Use {NAME_RULE}.")
    for entry_point, _, module in _homeless(tuple(sys.path)):
        message = f"the entry point {entry_point!r} of {GROUP} points to {module!r}, and that folder does not exist"
        yield RecipeError(message, where="installed packages", fix="Install that package again.")


@cache
def _installed(path: tuple[str, ...]) -> tuple[Folder, ...]:
    places = ((origin, folder) for _, origin, module in _announced(path) for folder in _places(module))
    return tuple(Folder(folder, origin, Kind.FILE) for origin, folder in places)


def _homeless(path: tuple[str, ...]) -> list[tuple[str, str, str]]:
    return [announced for announced in _announced(path) if not _places(announced[2])]


@cache
def _announced(path: tuple[str, ...]) -> tuple[tuple[str, str, str], ...]:
    """Return (name, origin, module) of the entry points of installed packages, sorted by package."""
    # importlib.metadata takes 30 ms to import, and 5 ms to ask; this look takes 1 ms (107 packages).
    if not any(map(_announces, path)):
        return ()
    from importlib.metadata import entry_points

    entries = {
        (f"package {entry.dist.name if entry.dist else entry.name}", entry.name, entry.module)
        for entry in entry_points(group=GROUP)
    }
    return tuple((name, origin, module) for origin, name, module in sorted(entries))


def _announces(folder: str) -> bool:
    """Return whether a package that is installed in a folder of sys.path has an entry point of ours."""
    try:
        names = os.listdir(folder)  # noqa: PTH208
    except OSError:
        return False
    for name in names:
        with suppress(OSError):  # a Path of each package takes longer than the look
            is_info = name.endswith((".dist-info", ".egg-info"))
            if is_info and GROUP.encode() in read_bytes(f"{folder}/{name}/entry_points.txt"):
                return True
    return False


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
    return tuple(folder for folder in places or () if os.path.isdir(folder))  # noqa: PTH112 (not in a zip archive)


BASE = CONFIGS / "base.py"
KINDS = ("models", "methods", "objectives", "datasets", "recipes")
DEFAULT_METHOD = "lora"
"""Of a model that is trained without a recipe."""

_MAX_WORDS = 12
"""Of a part's name; none has more."""
_OBJECTIVE = re.compile(r"""^objective = dict\(type=["'](\w+)["']""", re.MULTILINE)
_PATH = re.compile(r"""path["']?\s*[=:]\s*["']([^"']+)["']""")
_EPOCHS = re.compile(r"(?P<stem>.+)_e(?P<epochs>[1-9][0-9]{0,3})")


class Parts(NamedTuple):
    """A composed name, taken apart; epochs is a count."""

    model: str
    objective: str
    method: str
    dataset: str
    epochs: int

    @property
    def name(self) -> str:
        return f"{self.model}_{training_name(self.objective, self.method)}_{self.dataset}_e{self.epochs}"

    def kinds(self) -> Iterator[tuple[str, str]]:
        """Yield the kind and the name of each part in the order of merging, later wins.

        The objective comes after the method, so that its learning rate replaces the method's.
        """
        yield "models", self.model
        yield "methods", self.method
        yield "objectives", self.objective
        yield "datasets", self.dataset


class Reading(NamedTuple):
    """The meaning of a name: a recipe of the catalog, or parts; `epochs` replaces those of a recipe.

    `words` are another tool's, outermost first: the first one is merged last.
    """

    name: str
    base: str | Parts
    epochs: int | None
    words: tuple[NameWord, ...]


def names(kind: str) -> tuple[str, ...]:
    """Return the sorted names of one of `KINDS`, or of another folder of a catalog."""
    return tuple(files(kind))


def of_package(kind: str) -> tuple[str, ...]:
    """Return the sorted names of the package's own parts of a kind."""
    return tuple(_files(kind, "", ((_OURS, 0),)))


def presets() -> tuple[str, ...]:
    """Return the names of the DeepSpeed presets."""
    return names(PRESETS)


def preset_name(text: str) -> str | None:
    """Return the preset that `text` names in full ('deepspeed_zero2') or short ('zero2'), or None; 'none' too."""
    return NONE if text == NONE else next((name for name in (text, f"{OF_PRESETS}{text}") if name in presets()), None)


def short_name(preset: str) -> str:
    """Return a preset's name as people write it: 'zero2' for 'deepspeed_zero2'."""
    return preset.removeprefix(OF_PRESETS)


def part_file(kind: str, name: str) -> PartFile:
    """Return the file of a part, with its folder.

    Raises:
        RecipeError: there is no such part.
    """
    known = files(kind)
    if name not in known:
        fix = did_you_mean(name, known, see=f"tuner list --{kind}" if kind in KINDS else None)
        raise RecipeError(f"there is no {name!r} among the {kind}", fix=fix)
    return known[name]


def shadowing(kind: str, name: str) -> str | None:
    """Return a line about the parts of the same name that a part shadows, or None."""
    file = files(kind).get(name)
    if file is None or not file.shadowed:
        return None
    origins = " and ".join(folder.origin for folder in file.shadowed)
    return f"{file.shown} shadows the {kind[:-1].replace('_', ' ')} {name!r} of {origins}."


def text_of(kind: str, name: str) -> str:
    """Return the text of a part; an empty text if it is a user's file that cannot be read."""
    return _text(part_file(kind, name))


def _text(file: PartFile) -> str:
    if file.is_ours:
        return _package_text(file.full)
    try:
        return read_named_text(file.path, RecipeError, max_bytes=assets.MAX_BYTES, fix="", name=file.shown)
    except RecipeError:
        return ""  # the code that needs its values reads it again and raises


def path_of(part: str) -> str:
    """Return the hub id or the folder in the text of a model part; the name of the part if it has neither."""
    return _path_in(part_file("models", part)) or part


def _path_in(file: PartFile) -> str | None:
    match = _PATH.search(_text(file))
    return match[1] if match else None


@cache
def _package_text(path: str) -> str:
    return read_text(Path(path))  # a hub id is looked for in 400 of them, several times for a run


def part_named(hub_id: str) -> str | None:
    """Return the model part with this `model.path`, a user's before the package's, or None."""
    return next(_with_path(hub_id), None)


def _with_path(hub_id: str) -> Iterator[str]:
    """Yield the model parts with this `model.path`, the user's before the package's."""
    mine_first = sorted(files("models").items(), key=lambda item: item[1].is_ours)
    yield from (name for name, file in mine_first if (_path_in(file) or name) == hub_id)


def shadowing_path(hub_id: str) -> str | None:
    """Return a line about the package's model part with this `model.path` that a user's part stands for, or None."""
    first, *later_parts = [part_file("models", name) for name in _with_path(hub_id)]
    package_part = next((file for file in later_parts if file.is_ours), None)
    if first.is_ours or package_part is None:
        return None
    return f"{first.shown} shadows {package_part.shown} of {OURS}: both are for {hub_id}."


def summary(file: PartFile) -> str:
    """Return the first line of a part's docstring; an empty text if it has no docstring or is not Python."""
    if not file.is_ours:
        return _first_line(_text(file))
    # All files of the package begin with it, and `tuner list` needs 600 of them.
    with open_regular(file.full) as stream:
        return stream.readline().decode().strip().strip('"').strip()


def _first_line(text: str) -> str:
    import ast  # 7 ms, for the user's own parts alone

    try:
        return next(iter((ast.get_docstring(ast.parse(text)) or "").splitlines()), "")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return ""


def chat_template(name: str) -> str:
    """Return the chat template that `name` means, also one of the user's catalog; see `assets.chat_template`.

    Raises:
        RecipeError: no such template, or its file is not UTF-8.
    """
    return assets.chat_template(name, {template: file.path for template, file in files(TEMPLATES).items()})


def with_epochs(name: str) -> tuple[str, int | None]:
    """Split `x_e3` into ('x', 3); a name without epochs keeps None."""
    match = _EPOCHS.fullmatch(name)
    return (match["stem"], int(match["epochs"])) if match else (name, None)


def find(name: str, hidden: str | None = None) -> Reading | None:
    """Return the meaning of a name: as it is written, or else with as few of another tool's words replaced as possible.

    Args:
        name: A composed name, a recipe of the catalog with or without `_eN`, or one of another tool's.
        hidden: A recipe that builds on this name, so the name does not mean that recipe.

    Raises:
        RecipeError: it can be read in two ways, which the names of a user's own parts can cause.
    """
    for text, words in _translations(name):
        stem, epochs = with_epochs(text)
        for recipe, over in ((text, None), (stem, epochs)):
            if recipe in names("recipes") and recipe != hidden:
                return Reading(name, recipe, over, words)
        if parts := _composed(stem, epochs):
            return Reading(name, parts, epochs, words)
    return None


def _translations(name: str) -> Iterator[tuple[str, tuple[NameWord, ...]]]:
    """Yield a name as it is written, then with one more of another tool's words replaced each time, and these words."""
    yield name, ()
    yield from other_tools().readings(name)


def _composed(stem: str, epochs: int | None) -> Parts | None:
    """Return the parts that a name is composed of, or None.

    Raises:
        RecipeError: it can be read in two ways, which the names of a user's own parts can cause.
    """
    readings, datasets = [], names("datasets")
    for model in names("models") if epochs else ():
        if stem.startswith(f"{model}_"):
            for training, (objective, method) in trainings().items():
                beginning = f"{model}_{training}_"
                if stem.startswith(beginning) and (dataset := stem.removeprefix(beginning)) in datasets:
                    readings.append(Parts(model, objective, method, dataset, epochs or 0))
    if len(readings) > 1:
        ways = " or ".join(f"{parts.model} + {parts.objective} {parts.method} + {parts.dataset}" for parts in readings)
        fix = "Rename a part of your own catalog."
        raise RecipeError(f"the name '{stem}_e{epochs}' can be read as {ways}", where="the recipe's name", fix=fix)
    return readings[0] if readings else None


@cache
def default_objective() -> str:
    """Return the objective of a recipe name that names none: that of configs/base.py."""
    (name,) = _OBJECTIVE.findall(read_text(BASE))
    return str(name)


def training_name(objective: str, method: str) -> str:
    """Return the word for a training in names: the method, after the objective unless that is the default."""
    return method if default_objective() == objective else f"{objective}_{method}"


def trainings() -> dict[str, tuple[str, str]]:
    """Return the objective and the method of each training word in names, such as 'lora' and 'dpo_lora'."""
    objectives = sorted(names("objectives"), key=lambda name: name != default_objective())  # it comes first
    return {training_name(*pair): pair for pair in itertools.product(objectives, names("methods"))}


def training(name: str) -> tuple[str, str]:
    """Return the objective and the method that `--method` names: a method, alone or after its objective.

    Raises:
        RecipeError: there is no such method.
    """
    known = trainings()
    if name in known:
        return known[name]
    if absent := _absent_objective(name):
        raise RecipeError(f"tuner has no objective {absent[0]!r}", where=Option("method"), fix=absent[1])
    fix = did_you_mean(name, known) or f"Known: {', '.join(names('methods'))}; each also as dpo_lora."
    if name in names("objectives"):
        fix = f"Write an objective with its method: {name}_lora trains an adapter, {name}_full all weights."
    raise RecipeError(f"no method {name!r}", where=Option("method"), fix=fix)


def _absent_objective(name: str) -> tuple[str, str] | None:
    """Return the objective of other tools in a name, and what to use instead of it; None without one."""
    words = re.sub(r"[-. ]", "_", name.lower()).split("_")
    for word in (*map("_".join, itertools.pairwise(words)), *words):
        if instead := other_tools().instead_of_objective(word):
            return word, instead
    return None


def unknown(name: str) -> RecipeError:
    """Return the error for a name that is no recipe's, with the nearest one."""
    if preset_name(name):
        fix = f"Use: tuner train RECIPE --deepspeed {name}."
        return RecipeError(f"{name!r} is a DeepSpeed preset, not a recipe", where="the recipe's name", fix=fix)
    if reason := other_tools().refusal_of_name(name):
        return RecipeError(f"{name!r} {reason}", fix="See: tuner list")
    if absent := _absent_objective(name):
        return RecipeError(f"no recipe {name!r}: tuner has no objective {absent[0]!r}", fix=absent[1])
    suggestion = _suggest_spelled(name)
    hint = f"Did you mean {suggestion!r}? " if suggestion else ""
    return RecipeError(f"no recipe {name!r}", fix=f"{hint}See: tuner list")


def _suggest_spelled(name: str) -> str | None:
    """Return the suggestion for a name without its epochs and another tool's last words, with these added."""
    stems = [with_epochs(text)[0] for text, _ in _translations(name)]
    stem = [stem for stem in stems if name.startswith(stem)][-1]
    nearest_name = suggest(stem)
    return f"{with_epochs(nearest_name)[0]}{name.removeprefix(stem)}" if nearest_name and stem != name else nearest_name


def suggest(name: str) -> str | None:
    """Return the recipe name that `name` most likely means; one part after the other is corrected."""
    import difflib

    spelled = re.sub(r"_e0+(?=[1-9])", "_e", re.sub(r"[-. ]", "_", name.strip().lower()))
    stem, epochs = with_epochs(re.sub(r"_e_*0*$|_e_\d+$", "", spelled))
    tokens = stem.split("_")
    model, tokens = _take(tokens, names("models"))
    tokens = tokens[1:] if tokens[:1] == [default_objective()] else tokens
    training, tokens = _take(tokens, trainings())
    dataset = nearest("_".join(tokens), names("datasets")) if tokens else None
    if model and training and dataset:
        return f"{model}_{training}_{dataset}_e{epochs or 3}"
    # Another tool's name may be complete with its defaults.
    if model and training and any(_composed(*with_epochs(text)) for text, _ in _translations(f"{model}_{training}")):
        return f"{model}_{training}"
    # Most recipes are exceptions of one model with similar names, so only a close match is suggested.
    return next(iter(difflib.get_close_matches(stem, names("recipes"), n=1, cutoff=0.9)), None)


def _take(tokens: list[str], known: Iterable[str]) -> tuple[str | None, list[str]]:
    """Return the known name most similar to the first tokens, the longer of two equal ones, and the tokens after it."""
    import difflib

    known, best = tuple(known), (0.0, "", 0)
    for count in range(1, min(len(tokens), _MAX_WORDS) + 1):
        head = "_".join(tokens[:count])
        for name in difflib.get_close_matches(head, known, n=1):
            likeness = difflib.SequenceMatcher(None, name, head).ratio() + 0.001 * (name.count("_") + 1)
            best = max(best, (likeness, name, count))
    return best[1] or None, tokens[best[2] :]
