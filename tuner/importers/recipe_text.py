"""An imported recipe as a file of ours, each value with the line that it came from beside it.

Values in, text out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap
from typing import Any

from tuner.errors import visible
from tuner.importers.document import Keys
from tuner.importers.imported_recipe import Imported
from tuner.importers.translation import Given, Outcome
from tuner.recipes.recipe import render, render_docstring

_WIDTH = 120
_MAX_LINES, _MAX_KEYS = 300, 12


def text(imported: Imported, deepspeed: str | None = None) -> str:
    """Return the recipe's file.

    Args:
        deepspeed: Where the DeepSpeed JSON is that goes with it.
    """
    values = imported.values if deepspeed is None else imported.values | {"deepspeed": deepspeed}
    lines = [render_docstring(visible(f"{Path(imported.source).name} of {imported.tool}, imported.")), ""]
    lines += [*_accounts(imported)]
    lines += [f'_base_ = "{imported.base}"'] if imported.base else []
    for key, value in values.items():
        lines += _assignment(imported, key, value)
    return "\n".join(lines) + "\n"


def _accounts(imported: Imported) -> Iterator[str]:
    """Yield what is otherwise than in the source, as comments; keys that share a reason share a line."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for one in imported.entries:
        if one.outcome in (Outcome.CHANGED, Outcome.LEFT_OUT):
            shown = f"{one.given.key[:40]} ({_place(imported, one.given)})"
            by_reason.setdefault((str(one.outcome), one.why or ""), []).append(shown)
    lines = [f"{outcome}: {_some(keys)}: {why}" for (outcome, why), keys in by_reason.items()]
    for line in (*sorted(lines)[:_MAX_LINES], *imported.notes):
        yield from wrap(visible(line), _WIDTH, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False)
    if lines or imported.notes:
        yield ""


def _some(keys: list[str]) -> str:
    more = f" and {len(keys) - _MAX_KEYS} more" if len(keys) > _MAX_KEYS else ""
    return f"{', '.join(keys[:_MAX_KEYS])}{more}"


def _assignment(imported: Imported, key: str, value: Any) -> list[str]:
    if not _is_block(key, value):
        return [f"{key} = {render(value, 0)}{_origin(imported, (key,))}"]
    return [f"{key} = dict(", *_words(imported, (key,), value), ")"]


def _words(imported: Imported, keys: Keys, block: dict[str, Any]) -> Iterator[str]:
    pad = "    " * len(keys)
    for key, value in block.items():
        inner = (*keys, key)
        if _is_block(key, value) and keys[0] != "architecture":
            yield f"{pad}{key}=dict("
            yield from _words(imported, inner, value)
            yield f"{pad}),"
        else:
            yield f"{pad}{key}={render(value, len(pad))},{_origin(imported, inner)}"


def _is_block(key: str, value: Any) -> bool:
    # The keys of a DeepSpeed config and of columns are data, and not always words of Python's.
    return isinstance(value, dict) and bool(value) and key not in ("deepspeed", "columns", "rope_parameters")


def _origin(imported: Imported, keys: Keys) -> str:
    given = imported.givens.get(keys)
    if given is None or given.value is None:
        return ""
    return visible(f"  # {_place(imported, given)}, {given.key[:40]}").replace("\n", " ")


def _place(imported: Imported, given: Given) -> str:
    """Return where a value stands: in the one file that is imported, its line."""
    line = given.where.removeprefix(f"{imported.source}:")
    return f"line {line}" if line.isdigit() else given.where[-60:]
