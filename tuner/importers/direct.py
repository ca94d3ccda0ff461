"""Another tool's config in a recipe's place: its recipe is written where made things are kept, and trained from there.

The copy is named by its content, so the same config is the same file, whoever asks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tuner.errors import RecipeError
from tuner.files import make_folder, sha256, write_text
from tuner.importers import recipe_text, tools
from tuner.importers.imported_recipe import Imported
from tuner.importers.translation import Outcome
from tuner.recipes import paths

_WORD = re.compile(r"[^\w.-]+")


@dataclass(frozen=True)
class Kept:
    """The recipe of another tool's config: its file, and what it was made from."""

    path: Path
    imported: Imported


def recipe_of(name: str, environ: Mapping[str, str]) -> Kept | None:
    """Return the recipe of the config that `name` is, kept in tuner's cache. Errors as `keep`."""
    return keep(name, paths.cache(environ))


def keep(name: str, cache: Path) -> Kept | None:
    """Return the recipe of the config that `name` is, or None where it is none: a recipe, or a DeepSpeed config.

    Args:
        name: What stands in a recipe's place.
        cache: The folder that made things are kept in.

    Raises:
        RecipeError: what the config holds is wrong, or its recipe would learn something else.
        DiskError: the recipe cannot be kept.
    """
    if not tools.is_config(Path(name)):
        return None
    imported = tools.read([name])
    if imported.obstacle:
        fix = f"Check it first: tuner import {name}"
        raise RecipeError(f"{name!r} of {imported.tool} cannot be trained directly: {imported.obstacle}", fix=fix)
    text = recipe_text.text(imported)
    folder = cache / "imported" / sha256(text.encode())[:12]
    path = folder / f"{_WORD.sub('_', Path(name).stem)}.py"
    if not path.exists():
        make_folder(folder)
        write_text(path, text)
    return Kept(path, imported)


def told(name: str, kept: Kept) -> str:
    """Return the line that says what was done, and how to keep the result."""
    changed = sum(entry.outcome is not Outcome.TAKEN for entry in kept.imported.entries)
    count = "1 key was" if changed == 1 else f"{changed} keys were"
    what = f"{name} of {kept.imported.tool} is imported; {count} changed or ignored"
    return f"{what}. To see them and keep the recipe: tuner import {name}"
