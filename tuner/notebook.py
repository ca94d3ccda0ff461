"""How results show themselves in Python: a few lines of text, and tables in a notebook.

It knows no result; each of them hands over its cells.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tuner.errors import shortened, visible

_MAX_CELL, _END_OF_CELL = 200, 40
_CELL = "text-align:left;padding:2px 10px"
_COLOURS = {True: "#1a7f37", False: "#b42318"}
"""Behind white text, which is then read on a light and on a dark page (contrast 5:1 and 6.6:1)."""


class Mark(NamedTuple):
    """A cell that says whether something is well: a notebook colours it too."""

    text: str
    is_good: bool

    def __str__(self) -> str:
        return self.text


Row = Sequence[object]


def lines_of(rows: Iterable[Row]) -> list[str]:
    """Return rows of equally many cells as lines of text in columns."""
    cells = [[brief(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    padded = ((f"  {cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in cells)
    return ["".join(row).rstrip() for row in padded]


def table(rows: Iterable[Row], *, title: str = "", head: Sequence[str] = ()) -> str:
    """Return rows as an HTML table in the page's own colours; the first cell of a row is its name."""
    caption = f"<caption style='{_CELL};font-weight:bold'>{_escaped(brief(title))}</caption>" if title else ""
    header = "".join(f"<th style='{_CELL}'>{_escaped(cell)}</th>" for cell in head)
    body = "".join(
        f"<tr><th style='{_CELL}'>{_escaped(brief(name))}</th>{''.join(map(_cell, cells))}</tr>"
        for name, *cells in rows
    )
    return f"<table>{caption}{f'<tr>{header}</tr>' if header else ''}{body}</table>"


def paragraphs(lines: Iterable[str]) -> str:
    """Return lines of text as HTML."""
    return "".join(f"<div>{_escaped(brief(line))}</div>" for line in lines)


def _escaped(text: str) -> str:
    from html import escape  # 10 ms, for the names of all characters

    return escape(text)


def _cell(cell: object) -> str:
    text = _escaped(brief(cell))
    if isinstance(cell, Mark):
        style = f"color:#ffffff;background:{_COLOURS[cell.is_good]};padding:0 6px;border-radius:3px"
        text = f"<span style='{style}'>{text}</span>"
    return f"<td style='{_CELL}'>{text}</td>"


def brief(cell: object) -> str:
    """Return a value as one line that a terminal only shows, cut where it is long."""
    return shortened(visible(str(cell)).replace("\n", " "), _MAX_CELL, _END_OF_CELL)
