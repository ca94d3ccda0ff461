"""metrics.jsonl read back: one line for each logged step, whatever state the file is in.

It writes nothing; `directory` appends the lines, and the worker decides what stands in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tuner.files import load_json
from tuner.runs.directory import RunDirectory
from tuner.runs.follow import tail

Line = dict[str, Any]


def course(run: RunDirectory) -> list[Line]:
    """Return the lines of a run in the order of their steps.

    A run that went on from a checkpoint did some steps twice: what it logged first is left out.
    """
    try:
        text = run.metrics.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    kept: list[Line] = []
    for line in _lines(text.splitlines()):
        # A step's training loss and its validation loss are lines of their own, the latter always after the former.
        while kept and (kept[-1]["step"] > line["step"] or ("loss" in line and kept[-1]["step"] == line["step"])):
            kept.pop()
        kept.append(line)
    return kept


def latest(run: RunDirectory) -> Line:
    """Return the newest value of everything that is logged; only the end of the file is read."""
    newest: Line = {}
    for line in _lines(reversed(tail(run.metrics).splitlines())):
        newest = {**line, **newest}
        if "loss" in newest:
            break
    return newest


def _lines(texts: Iterable[str]) -> Iterator[Line]:
    """Yield what can be read: the first line of a tail and the last one of a killed run may be torn."""
    for text in texts:
        try:
            line = load_json(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            yield line
