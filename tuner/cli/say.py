"""Lines for a person: names of files may hold what a terminal takes for commands, so they are shown as their codes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import click

from tuner.errors import visible


def say(text: str = "", *, err: bool = False, **style: Any) -> None:
    """Print text that a terminal only shows, on standard output or standard error, in a style of `click.style`."""
    click.echo(click.style(visible(text), **style) if style else visible(text), err=err)


def columns(*, err: bool = False) -> int | None:
    """Return how wide the terminal is; None: standard output (or error) is none, and what reads a pipe has no width."""
    if not (sys.stderr if err else sys.stdout).isatty():
        return None
    import shutil  # a pipe has no width

    return shutil.get_terminal_size().columns


def wrapped(line: str, indent: str = "", *, err: bool = False) -> str:
    """Return a line as the lines that stand in the terminal, those after the first indented."""
    if (width := columns(err=err)) is None or len(line) <= width:
        return line
    import textwrap

    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def say_table(rows: Iterable[Sequence[str]], *, gap: int = 1, bold: int | None = None) -> None:
    """Print rows of as many cells: the first column begins on the left, the others end on the right; one is bold.

    Args:
        gap: Characters between two columns.
    """
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        padded = [
            f"{row[0]:<{widths[0]}}",
            *(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        if bold is not None:
            padded[bold] = click.style(padded[bold], fg="green", bold=True)
        click.echo((" " * gap).join(padded))
