"""The files of rows that a model is tried on, each with rows held out; no row stands in two files."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.real import short, text
from tests.real.text import Row, number_of

SIZES = {"docs-135": (135, 100), "docs-1000": (1000, 200), "short-10000": (10_000, 200), "pairs": (1000, 100)}
"""A file's rows, and those held out beside it."""
_SHORT_ANSWER = 100


def paths(folder: Path, name: str) -> tuple[Path, Path]:
    """Return the two files of a name: what to train on, and what is held out."""
    return folder / f"{name}.jsonl", folder / f"{name}.val.jsonl"


def write(folder: Path) -> dict[str, tuple[int, int]]:
    """Write every file; return how many rows each has, with those held out."""
    counts = {}
    for name, lines in contents().items():
        train, _ = SIZES[name]
        parts = lines[:train], lines[train:]
        for path, part in zip(paths(folder, name), parts, strict=True):
            path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in part), encoding="utf-8")
        counts[name] = len(parts[0]), len(parts[1])
    return counts


def contents() -> dict[str, list[dict[str, Any]]]:
    """Return the lines of each file, those held out last.

    Raises:
        ValueError: this Python's documentation makes too few rows.
    """
    every = text.rows()
    brief = _take(iter([row for row in every if len(row.answer) <= _SHORT_ANSWER]), "docs-135")
    taken = {row.name for row in brief}
    rest = iter([row for row in every if row.name not in taken])
    return {
        "docs-135": [messages(row) for row in brief],
        "docs-1000": [messages(row) for row in _take(rest, "docs-1000")],
        "short-10000": [messages(row) for row in sorted(short.rows(sum(SIZES["short-10000"])), key=_by_question)],
        "pairs": pairs(_take(rest, "pairs")),
    }


def _take(rows: Iterator[Row], name: str) -> list[Row]:
    wanted = sum(SIZES[name])
    taken = list(itertools.islice(rows, wanted))
    if len(taken) < wanted:
        raise ValueError(f"{name} needs {wanted} rows, and this Python's documentation makes {len(taken)}")
    return taken


def _by_question(row: Row) -> int:
    return number_of(row.question)


def messages(row: Row) -> dict[str, Any]:
    """Return a row as a conversation of one question and its answer."""
    turns = [{"role": "user", "content": row.question}, {"role": "assistant", "content": row.answer}]
    return {"messages": turns}


def pairs(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return pairs for DPO: the better answer is the documentation's own.

    The worse one is the documentation of another subject of the same kind: as well written, and about something else.
    """
    followers: dict[str, Row] = {}
    lines = []
    for row in reversed(rows):  # each is followed by the next of its kind; the last one of a kind by the first
        other = followers.get(row.kind) or next(follower for follower in rows if follower.kind == row.kind)
        followers[row.kind] = row
        lines.append({"prompt": row.question, "chosen": row.answer, "rejected": other.answer})
    return lines[::-1]
