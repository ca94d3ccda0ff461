"""Print lines for a person. Control characters, which a file's name may hold, are shown as their codes."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TypedDict, Unpack

import click

from tuner.errors import CONTROLS, visible
from tuner.files import JSON_VERSION, JsonObject, dump_json


class Style(TypedDict, total=False):
    """A style of `click.style`."""

    fg: str | None
    bold: bool
    dim: bool


def say(text: str = "", *, err: bool = False, **style: Unpack[Style]) -> None:
    """Print text without control characters on standard output or standard error, in a style of `click.style`."""
    click.echo(click.style(visible(text), **style) if style else visible(text), err=err)


def say_json(answer: JsonObject | Sequence[JsonObject], *, is_first: bool = False) -> None:
    """Print the answer of a command for programs on standard output; each object says the version of its shape.

    Args:
        is_first: It is one line, and a program that goes on reading gets it at once.
    """
    objects = [{"version": JSON_VERSION, **values} for values in ([answer] if isinstance(answer, dict) else answer)]
    value = objects[0] if isinstance(answer, dict) else objects
    text = json.dumps(value) if is_first else dump_json(value)
    click.echo(re.sub(CONTROLS, lambda match: f"\\u{ord(match[0]):04x}", text), nl=is_first)
    if is_first:
        sys.stdout.flush()


def columns(*, err: bool = False) -> int | None:
    """Return the width of the terminal; None if standard output (or error) is not a terminal."""
    if not (sys.stderr if err else sys.stdout).isatty():
        return None
    import shutil  # a pipe has no width

    return shutil.get_terminal_size().columns


def wrapped(line: str, indent: str = "", *, err: bool = False) -> str:
    """Return a line, wrapped to the terminal's width; lines after the first are indented."""
    if (width := columns(err=err)) is None or len(line) <= width:
        return line
    import textwrap

    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def say_table(rows: Iterable[Sequence[str]], *, gap: int = 1, bold: int | None = None) -> None:
    """Print rows as a table: the first column is left-aligned, the others right-aligned; one column is bold.

    In a terminal that is too narrow, the words of the first row are broken after each underscore.
    """
    rows = [[visible(cell) for cell in row] for row in rows]
    widths = _widths(rows)
    if (width := columns()) is not None and sum(widths) + gap * (len(widths) - 1) > width:
        rows = [*_broken(rows[0]), *rows[1:]]
        widths = _widths(rows)
    for row in rows:
        padded = [
            f"{row[0]:<{widths[0]}}",
            *(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        if bold is not None:
            padded[bold] = click.style(padded[bold], fg="green", bold=True)
        click.echo((" " * gap).join(padded))


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _broken(heads: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the lines of heads that are broken after each underscore; short ones stand in the last line."""
    lines_of_heads = [head.replace("_", "_\n").split("\n") for head in heads]
    height = max(map(len, lines_of_heads))
    yield from zip(*([""] * (height - len(lines)) + lines for lines in lines_of_heads), strict=True)
