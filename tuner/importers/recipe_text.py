"""Renders an imported recipe as a recipe file; a comment beside each value names its line in the source.

It returns text and writes no files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap

from tuner.errors import visible
from tuner.files import JsonObject
from tuner.importers.document import Keys
from tuner.importers.imported_recipe import Imported
from tuner.importers.translation import Outcome, Setting
from tuner.recipes.standalone import render, render_docstring

_WIDTH = 120
_MAX_LINES, _MAX_KEYS = 300, 12


def text(imported: Imported, deepspeed: str | None = None) -> str:
    """Return the text of the recipe file.

    Args:
        deepspeed: Path of the DeepSpeed JSON to name in it.
    """
    values = imported.values if deepspeed is None else imported.values | {"deepspeed": deepspeed}
    lines = [render_docstring(visible(f"{Path(imported.source).name} of {imported.tool}, imported.")), ""]
    lines += [*_differences(imported)]
    lines += [f'_base_ = "{imported.base}"'] if imported.base else []
    lines += _words(imported, (), values)
    return "\n".join(lines) + "\n"


def _differences(imported: Imported) -> Iterator[str]:
    """Yield comments on what differs from the source; keys with the same reason share a line."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for entry in imported.entries:
        if entry.outcome in (Outcome.CHANGED, Outcome.LEFT_OUT, Outcome.UNKNOWN):
            shown = f"{entry.setting.name[:40]} ({_place(imported, entry.setting)})"
            by_reason.setdefault((str(entry.outcome), entry.why or ""), []).append(shown)
    lines = [f"{outcome}: {_some(keys)}: {why}" for (outcome, why), keys in by_reason.items()]
    for line in (*sorted(lines)[:_MAX_LINES], *imported.notes):
        yield from wrap(visible(line), _WIDTH, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False)
    if lines or imported.notes:
        yield ""


def _some(keys: list[str]) -> str:
    more = f" and {len(keys) - _MAX_KEYS} more" if len(keys) > _MAX_KEYS else ""
    return f"{', '.join(keys[:_MAX_KEYS])}{more}"


def _words(imported: Imported, keys: Keys, block: JsonObject) -> Iterator[str]:
    """Yield the lines of a block's values: assignments at the top, arguments of `dict` below."""
    pad, equals, end = "    " * len(keys), "=" if keys else " = ", "," if keys else ""
    for key, value in block.items():
        inner = (*keys, key)
        if _is_block(key, value) and keys[:1] != ("architecture",):
            yield f"{pad}{key}{equals}dict("
            yield from _words(imported, inner, value)
            yield f"{pad}){end}"
        else:
            yield f"{pad}{key}{equals}{render(value, len(pad))}{end}{_origin(imported, inner)}"


def _is_block(key: str, value: object) -> bool:
    # Keys of a DeepSpeed config and of columns are data, and may not be valid Python names.
    return isinstance(value, dict) and bool(value) and key not in ("deepspeed", "columns", "rope_parameters")


def _origin(imported: Imported, keys: Keys) -> str:
    setting = imported.settings.get(keys)
    if setting is None or setting.value is None:
        return ""
    return visible(f"  # {_place(imported, setting)}, {setting.name[:40]}").replace("\n", " ")


def _place(imported: Imported, setting: Setting) -> str:
    """Return the place of a value: the line, if it is in the imported file."""
    line = setting.where.removeprefix(f"{imported.source}:")
    return f"line {line}" if line.isdigit() else setting.where[-60:]
