"""metrics.jsonl read back: one line for each logged step, whatever state the file is in.

It writes nothing; `directory` appends the lines, and sets those aside whose steps a resumed run takes again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from tuner.files import load_json
from tuner.runs.directory import RunDirectory
from tuner.runs.follow import tail

Line = dict[str, Any]
_PART_BYTES = 1 << 20
_LARGEST = sys.float_info.max


class Curve(NamedTuple):
    """What was logged under one key: steps, and the value at each."""

    steps: list[int]
    values: list[float]


def curves(run: RunDirectory, keys: Iterable[str]) -> dict[str, Curve]:
    """Return what was logged under some keys, without what is no finite number."""
    found = {key: Curve([], []) for key in keys}
    for lines in _in_parts(run):
        for key, curve in found.items():
            logged = _with_number(lines, key)
            curve.steps.extend([line["step"] for line in logged])
            curve.values.extend([line[key] for line in logged])
    return found


def every_line(run: RunDirectory) -> list[Line]:
    """Return every line, the earliest first; none of a run that has logged nothing."""
    return [line for lines in _in_parts(run) for line in lines]


def _in_parts(run: RunDirectory) -> Iterator[list[Line]]:
    # In parts: 200,000 lines as objects take 240 MB, as curves alone 95.
    try:
        with run.metrics.open(encoding="utf-8", errors="replace") as stream:
            while texts := stream.readlines(_PART_BYTES):
                yield list(_lines(_parsed(texts)))
    except OSError:
        pass


def _with_number(lines: Sequence[Line], key: str) -> list[Line]:
    found = (line for line in lines if key in line and isinstance(line[key], (int, float)))
    return [line for line in found if -_LARGEST <= line[key] <= _LARGEST]


def latest(run: RunDirectory) -> Line:
    """Return the newest value of everything that is logged; only the end of the file is read."""
    newest: Line = {}
    for line in _lines(map(_value, reversed(tail(run.metrics).splitlines()))):
        newest = {**line, **newest}
        if "loss" in newest:
            break
    return newest


def _lines(found: Iterable[Any]) -> Iterator[Line]:
    return (line for line in found if isinstance(line, dict) and isinstance(line.get("step"), int))


def _parsed(texts: Sequence[str]) -> Iterable[Any]:
    """Return what each line holds.

    One call reads them all: a call for each takes four times as long, and a long run has logged 200,000.
    """
    try:
        found: list[Any] = json.loads(f"[{','.join(texts)}]", parse_constant=str)
    except (ValueError, RecursionError):  # one of them is torn, as the last one of a run that was killed
        return map(_value, texts)
    return found


def _value(text: str) -> Any:
    """Return what a line holds, None for one that is torn."""
    try:
        return load_json(text)
    except ValueError:
        return None
