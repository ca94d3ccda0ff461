"""What the user of this command trusts. A recipe, a run or a part can ask for code; only a flag typed here grants it.

`withhold` decides about the code that comes with a model, and `refuse` about all else that a recipe names. The code of
a model is bound to what the user trusted first (`remote_code`): a run's recipe holds in `model.revision` its commit, or
the hash of the code in its folder.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from tuner import paths, remote_code
from tuner.errors import Key, ModelError, Option, RecipeError, together
from tuner.recipes.merging import Kind, Layer, Merged, Place, lookup, nested
from tuner.recipes.recipe import Overrides, Recipe
from tuner.recipes.schema import RecipeConfig
from tuner.remote_code import FLAG, KEY, Code

FLAG_PAIR = (FLAG, "")
"""The flag as one of the pairs of `Overrides`."""
_KEYS = ("model", "trust_remote_code")
_WITHHELD = Place(Kind.DERIVED, f"not granted: only {FLAG} grants it")


def withhold(merged: Merged, *, allow_code: bool) -> None:
    """Lay False over `model.trust_remote_code`, unless this command grants it: the one place that decides.

    The flag and --set grant it by themselves; --allow-code grants it to a recipe that asks for it.
    """
    place = merged.place_of(_KEYS)
    if lookup(merged.values, _KEYS) and not (allow_code or place.kind is Kind.FLAG):
        warning = f"{KEY}=True ({place}) has no effect without {FLAG}"
        merged.lay(Layer.at(_WITHHELD, nested(_KEYS, False), warning=warning))


def granted(trusted: bool) -> Overrides:
    """Return the overrides of a command that has no others than the flag, if it was typed."""
    return Overrides(pairs=(FLAG_PAIR,)) if trusted else Overrides()


def as_written(recipe: Recipe) -> Recipe:
    """Return the recipe with the trust that it asks for, to compare recipes: never to load a model."""
    origin = recipe.origins.get(KEY)
    if origin is None or origin.place != _WITHHELD:
        return recipe
    return recipe.settled({KEY: True}, origin.overridden[0].place)


def refuse(recipe: Recipe, *, allow_code: bool = False, of_run: bool = False) -> None:
    """Refuse a recipe that names code which this command does not allow. All of it is shown in one error.

    What is typed after --set, --reward or --push is the user's own choice.

    Args:
        recipe: With its origins.
        allow_code: Whether --allow-code was given.
        of_run: A run will start: also what it does when it ends counts, a command and an upload.

    Raises:
        RecipeError: it names code.
    """
    errors = [*_remote_code(recipe)]
    if not allow_code:
        errors += [*_functions_of_others(recipe), *_kernels_of_hub(recipe), *(_at_the_end(recipe) if of_run else ())]
    if errors:
        raise together(errors)


def refuse_remote_code(recipe: Recipe, result: Path) -> None:
    """Refuse the recipe of a run that trusted the code of its model, if this command does not allow that.

    Args:
        recipe: The run's.
        result: The folder of the run's weights, which may hold the code too.

    Raises:
        RecipeError: it does.
    """
    for error in _remote_code(recipe, result):
        raise error


def _remote_code(recipe: Recipe, result: Path | None = None) -> Iterator[RecipeError]:
    """Yield an error if the recipe asks to run the code of its model, and that was withheld."""
    origin = recipe.origins.get(KEY)
    if origin is not None and origin.place == _WITHHELD:
        model = recipe.config.model
        path = str(result) if result and remote_code.code_in(result).files else model.path
        message = f"{KEY} = True runs the code of the model {path!r}"
        yield RecipeError(message, where=origin.overridden[0].place, fix=remote_code.advice(path, model.revision))


_CALLBACKS, _OBJECTIVE = "train_cfg.callbacks", "objective."
_USES = {
    _CALLBACKS: ("callbacks", "training"),
    f"{_OBJECTIVE}rewards": ("rewards", "rewards"),
    f"{_OBJECTIVE}tools": ("tools", "tools"),
    f"{_OBJECTIVE}environment": ("environment", "tools"),
}
"""Keys that name Python code: how a message writes them, and what the code is for."""


def _functions_of_others(recipe: Recipe) -> Iterator[RecipeError]:
    """Yield an error for each function or class that the recipe names and that is not in a module of the user's own."""
    for key, name in _functions(recipe.config):
        place, module = recipe.origins[key].place, name.rpartition(":")[0]
        if place.kind is Kind.FLAG:
            continue
        written, purpose = _USES.get(key, ("format", "rows"))
        if key.startswith(_OBJECTIVE) and module.endswith(".py"):
            why, fix = "runs the code of a file", f"Read {module}"
        elif home := foreign_home(module):
            why = f"refers to code of an installed package, which was not written for {purpose} ({home})"
            fix = f"Read {home}"
        elif home is not None:
            why = "refers to a module that is in no folder of PYTHONPATH, so it is not known as your own"
            fix = "Put its folder on PYTHONPATH, or read that code"
        else:
            continue
        fix = f"{fix}, then add {Option('allow_code', True)}."
        yield RecipeError(f"{written} = {name!r} {why}", where=place, fix=fix)


def _functions(config: RecipeConfig) -> Iterator[tuple[str, str]]:
    """Yield the key and the name of each Python function in a recipe."""
    for key, loader in config.loaders.items():
        for name, rows in (("format", [loader.dataset]), ("mixture", loader.dataset.mixture or ())):
            functions = (share.format for share in rows if share.format and ":" in share.format)
            yield from ((f"{key}.dataset.{name}", function) for function in functions)
    yield from ((_CALLBACKS, name) for name in config.train_cfg.callbacks)
    for key, names in config.objective.own_functions.items():
        yield from ((f"{_OBJECTIVE}{key}", name) for name in names)


def _kernels_of_hub(recipe: Recipe) -> Iterator[RecipeError]:
    """Yield an error if attention is code of the hub: transformers takes `OWNER/NAME` for a repository of kernels."""
    name, place = recipe.config.model.attn_implementation, recipe.origins["model.attn_implementation"].place
    if name and "/" in name and place.kind is not Kind.FLAG:
        repository = name.rpartition("|")[2].partition("@")[0].partition(":")[0].strip()
        page = f"https://huggingface.co/{repository}"
        message = f"model.attn_implementation = {name!r} runs the code of a repository on the hub"
        yield RecipeError(message, where=place, fix=f"Read it at {page}, then add {Option('allow_code', True)}.")


def _at_the_end(recipe: Recipe) -> Iterator[RecipeError]:
    """Yield an error for the command (`log.notify`) and the upload (`checkpoint.repository`) that a file asks for."""
    notify, place = recipe.config.log.notify, recipe.origins["log.notify"].place
    if notify and place.kind is not Kind.FLAG:
        message = f"log.notify = {notify!r} names a command, which runs when the run ends"
        yield RecipeError(message, where=place, fix=f"Look at that command, then add {Option('allow_code', True)}.")
    name, place = recipe.config.checkpoint.repository, recipe.origins["checkpoint.repository"].place
    if name and place.kind is not Kind.FLAG:
        message = f"checkpoint.repository = {name!r} names a repository, to which the trained weights are pushed"
        fix = f"If you want that, add {Option('push', name)} or {Option('allow_code', True)}."
        yield RecipeError(message, where=place, fix=fix)


def foreign_home(module: str) -> str | None:
    """Return where the code of a module is that is not the user's own, "" if it was not found; None for an own module.

    An own module is below a folder that PYTHONPATH names, and belongs to no installed distribution: a cluster's modules
    put site-packages on PYTHONPATH. An empty entry is no name: Python takes it for the working directory, and its
    files may be a stranger's. Nothing is imported.
    """
    top = module.partition(":")[0].partition(".")[0]
    if top in sys.stdlib_module_names or top in sys.builtin_module_names or top == __package__.partition(".")[0]:
        return f"the module {top}"
    try:
        spec = PathFinder.find_spec(top)
    except (ValueError, ImportError):
        spec = None
    places = _places(spec)
    if not places:
        return ""
    pythonpath = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # effect: where the user keeps modules
    entries = [Path(text).resolve() for text in pythonpath if text]
    for location in places:
        above = [entry for entry in entries if entry in location.resolve().parents]
        if not above or _is_distributed(location.resolve(), top, above):
            return str(location)
    return None


def _places(spec: ModuleSpec | None) -> list[Path]:
    if spec is None:
        return []
    origin = [spec.origin] if spec.origin and spec.has_location else []
    return [Path(location) for location in (*(spec.submodule_search_locations or ()), *origin)]


def _is_distributed(location: Path, top: str, entries: list[Path]) -> bool:
    """Return whether a module belongs to a distribution that is installed in one of the entries, or from its folder."""
    from importlib.metadata import distributions  # 30 ms, and few recipes name code

    for distribution in distributions(path=[*map(str, entries)]):
        names = {file.parts[0].removesuffix(".py") for file in distribution.files or () if file.parts}
        if top in names | set((distribution.read_text("top_level.txt") or "").split()):
            return True
    return any(folder in location.parents for folder in _editable_folders())


def _editable_folders() -> Iterator[Path]:
    """Yield the folders of editable installs, which pip notes beside the distribution."""
    from importlib.metadata import distributions  # as above

    for distribution in distributions():
        try:
            noted = json.loads(distribution.read_text("direct_url.json") or "{}")
        except ValueError:
            continue
        url = noted.get("url", "") if isinstance(noted, dict) and "dir_info" in noted else ""
        if isinstance(url, str) and url.startswith("file://"):
            yield Path(url.removeprefix("file://")).resolve()


def check_bound(config: RecipeConfig) -> Code | None:
    """Check that a recipe's trusted code is bound: on the hub to a commit, in a folder to what was trusted first.

    Returns:
        The code in the model's folder; None if the folder has no code, or if it is not trusted.

    Raises:
        ModelError: `model.revision` binds nothing, or the code has changed.
    """
    model = config.model
    if not (model.trust_remote_code and model.path):
        return None
    if paths.local(model.path) is not None and remote_code.is_commit(model.revision):
        message = f"model.revision = {model.revision!r} is a commit, and {model.path!r} is a folder, which has none"
        fix = f"Use {Key('model.revision', None)}: the code of a folder is bound to its hash."
        raise ModelError(message, where="model.revision", fix=fix)
    code = remote_code.check(model.path, model.revision)
    if code:
        remote_code.check_record(code)
    return code


def bound_revision(config: RecipeConfig) -> str | None:
    """Return `model.revision` for a recipe that runs: the hash of the code in the model's folder, if it is trusted."""
    model = config.model
    folder = paths.local(model.path) if model.path and model.trust_remote_code else None
    code = remote_code.code_in(folder) if folder and paths.is_folder(folder) else None
    return code.hash if code and code.files else model.revision
