"""Trains another tool's config directly: its recipe is written to tuner's cache and trained from there.

The file name holds a hash of the content, so the same config always has the same recipe file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tuner import paths
from tuner.errors import RecipeError, brief_repr, marked
from tuner.files import make_folder, sha256, write_text
from tuner.importers import recipe_text, tools
from tuner.importers.translation import Entry, Outcome

_WORD = re.compile(r"[^\w.-]+")
_MAX_SHOWN = 6
"""Differences that one message names."""


class Converted(NamedTuple):
    """The recipe made of another tool's config: its file, and one line that says what was changed."""

    path: Path
    summary: str


def recipe_of(name: str, environ: Mapping[str, str]) -> Converted:
    """Return the recipe of another tool's config, written to tuner's cache.

    Args:
        name: The path of the config, as the user wrote it.
        environ: Says where the cache is.

    Raises:
        RecipeError: a value of the config is wrong, or its recipe would learn something else.
        DiskError: the recipe cannot be kept.
    """
    imported = tools.import_config([name])
    reasons = [*([marked(imported.obstacle)] if imported.obstacle else []), *map(_difference, imported.differences)]
    if reasons:
        more = f"; and {len(reasons) - _MAX_SHOWN} more" if len(reasons) > _MAX_SHOWN else ""
        message = f"{name!r} of {imported.tool} cannot be trained directly: {'; '.join(reasons[:_MAX_SHOWN])}{more}"
        raise RecipeError(message, fix=f"See every key, and get the recipe to train: tuner import {name}")
    text = recipe_text.text(imported)
    folder = paths.cache(environ) / "imported" / sha256(text.encode())[:12]
    path = folder / f"{_WORD.sub('_', Path(name).stem)}.py"
    if not path.exists():
        make_folder(folder)
        write_text(path, text)
    changed = sum(entry.outcome is not Outcome.TAKEN for entry in imported.entries)
    count = "1 key was" if changed == 1 else f"{changed} keys were"
    summary = f"{name} of {imported.tool} is imported; {count} changed or ignored"
    return Converted(path, f"{summary}. To see them and keep the recipe: tuner import {name}")


def _difference(entry: Entry) -> str:
    """Return what a key changes, with its place."""
    setting = entry.setting
    return f"{setting.name} = {brief_repr(setting.value)} ({setting.where}): {marked(entry.why or '').rstrip('.')}"
