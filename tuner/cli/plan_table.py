"""The table that `tuner plan` prints without a recipe: what a GPU can train, and the line to type for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from tuner.cli.say import say, say_table, wrapped
from tuner.errors import Option, Text
from tuner.files import sized
from tuner.fit.summary import UNIT

if TYPE_CHECKING:
    from tuner.launch.trainable import Cell, Row, Table

_NONE = "-"
_LIMIT = "*"
_FEW = 3
"""The most models that get a line each; for more of them an example shows how to get such lines."""
_ESTIMATES = (
    "Estimates for one row per micro-batch, recomputed activations, flash attention and the loss in chunks. "
    "See docs/gpus.md."
)


def show(table: Table) -> None:
    """Print the table, what does not fit, and the lines to type."""
    fitting = [row for row in table.rows if row.fits]
    assumed = Text(f" (assumed: {Option('host_memory')} names another)") if table.host_is_assumed else ""
    host = sized(table.machines.hardware.host_memory_bytes)
    say(wrapped(f"What {table.machines.name} can train, with {host} of host memory{assumed}"))
    if fitting:
        click.secho(wrapped(f"Tokens of the longest row, k = {UNIT:,}: on the GPU / with offloading"), italic=True)
        say_table([("", *table.methods), *map(_line, fitting)], gap=3)
    if any(cell.is_limit for row in fitting for pair in row.cells.values() for cell in pair):
        say(wrapped(f"{_LIMIT} The model has positions for no more; the memory would be enough."))
    if absent := [row.name for row in table.rows if not row.fits]:
        say(wrapped(f"Nothing fits: {', '.join(absent)}."))
    for problem in dict.fromkeys(text for row in table.rows for text in row.problems.values()):
        say(wrapped(problem))
    for line in _commands(fitting) if len(table.rows) <= _FEW else _example(fitting):
        say(wrapped(line, "  "))
    say(wrapped(_ESTIMATES), dim=True)


def _line(row: Row) -> tuple[str, ...]:
    return (row.name, *(cell_text(*pair) for pair in row.cells.values()))


def cell_text(on_gpus: Cell, offloaded: Cell) -> str:
    """Return a cell's two lengths, or the one that both are."""
    first, second = _length(on_gpus), _length(offloaded)
    return first if first == second else f"{first} / {second}"


def _length(cell: Cell) -> str:
    return f"{cell.tokens // UNIT:,}k{_LIMIT if cell.is_limit else ''}" if cell.tokens else _NONE


def _commands(rows: list[Row]) -> Iterator[str]:
    for row in rows:
        for method, pair in row.cells.items():
            on_gpus, offloaded = pair
            if on_gpus.command:
                yield f"{method}: {on_gpus.command}"
            if offloaded.command and offloaded.tokens > on_gpus.tokens:
                yield f"{method} with offloading: {offloaded.command}"


def _example(rows: list[Row]) -> Iterator[str]:
    shown = next((row for row in rows if any(pair[0].command for pair in row.cells.values())), None)
    if shown is None:
        return
    method = next(method for method in reversed([*shown.cells]) if shown.cells[method][0].command)
    yield f"The lines of a model: tuner plan {shown.name}, with the same options. Its {method}, for example:"
    yield f"  {shown.cells[method][0].command}"
