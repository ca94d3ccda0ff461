"""Read metrics.jsonl: one line for each logged step, even if the file is damaged.

It writes nothing. `directory` appends the lines, and moves the lines of steps that a resumed run repeats.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tuner.files import JsonObject, load_json
from tuner.runs.directory import RunDirectory
from tuner.runs.follow import Growing, tail

Line = JsonObject
_LARGEST = sys.float_info.max


class Curve(NamedTuple):
    """The values logged under one key, and the step of each."""

    steps: list[int]
    values: list[float]


class Curves:
    """The finite numbers that were logged under some keys of a run that need not exist yet; `read` goes on in them."""

    def __init__(self, run_dir: RunDirectory, keys: Iterable[str]) -> None:
        self._file, self._keys = run_dir.metrics, tuple(keys)
        self._begin(None)

    def _begin(self, inode: tuple[int, int] | None) -> None:
        self._inode, self._new = inode, Growing(self._file)
        self.by_key = {key: Curve([], []) for key in self._keys}
        """The curves, which grow; others once the file has been replaced, as by a run that goes on from earlier."""

    def read(self, *, whole_lines: bool = True) -> None:
        """Add the new lines. An unfinished last line is left for later, or also read if `whole_lines` is False."""
        try:
            status = self._file.stat()
        except OSError:  # removed: what was read stays until there is another one
            self._inode = None
            return
        inode = status.st_dev, status.st_ino
        if inode != self._inode or status.st_size < self._new.num_read:
            self._begin(inode)
        for lines in _in_parts(self._new, whole_lines=whole_lines):
            for key, curve in self.by_key.items():
                for line in lines:
                    value = line.get(key)
                    if isinstance(value, int | float) and -_LARGEST <= value <= _LARGEST:
                        curve.steps.append(line["step"])
                        curve.values.append(value)


def curves(run_dir: RunDirectory, keys: Iterable[str]) -> dict[str, Curve]:
    """Return the finite numbers that were logged under some keys."""
    growing = Curves(run_dir, keys)
    growing.read()
    growing.read(whole_lines=False)
    return growing.by_key


def lowest(validations: Iterable[tuple[int, float]]) -> tuple[int, float] | None:
    """Return the step with the lowest validation loss, the earliest if equal, and that loss; None: no step has one.

    The loss before the first step is the base model's.
    """
    return min((point for point in validations if point[0]), key=lambda point: point[::-1], default=None)


MEMORY = "memory_bytes"
"""The key of the most memory that rank 0 has held so far."""


def peak_bytes(run_dir: RunDirectory) -> int:
    """Return the most memory that rank 0 has logged in any attempt; 0 if none is logged."""
    return int(max(curves(run_dir, [MEMORY])[MEMORY].values, default=0))


def every_line(run_dir: RunDirectory) -> list[Line]:
    """Return every line, the earliest first; an empty list if the run has logged nothing."""
    new = Growing(run_dir.metrics)
    parts = (lines for whole_lines in (True, False) for lines in _in_parts(new, whole_lines=whole_lines))
    return [line for lines in parts for line in lines]


def _in_parts(new: Growing, *, whole_lines: bool) -> Iterator[list[Line]]:
    # A megabyte at a time: 200,000 lines as objects take 240 MB, as curves alone 95.
    while data := new.read(whole_lines=whole_lines):
        texts = [text for text in data.decode(errors="replace").split("\n") if text.strip()]
        yield list(_lines(_parsed(texts)))


def latest(run_dir: RunDirectory) -> Line:
    """Return the newest value of everything that is logged; only the end of the file is read."""
    newest: Line = {}
    for line in _lines(map(_value, reversed(tail(run_dir.metrics).splitlines()))):
        newest = {**line, **newest}
        if "loss" in newest:
            break
    return newest


def num_tokens(run_dir: RunDirectory, began: int = 0) -> float | None:
    """Return the tokens of the steps after `began`, if all steps had as many; None: they are not known.

    A run that resumed in a directory of its own counts from the checkpoint on: another run took the steps before it.
    """
    last = latest(run_dir)
    tokens, step = last.get("num_tokens"), last.get("step", 0)
    return tokens * (step - began) / step if isinstance(tokens, int | float) and tokens and step > began else None


def _lines(values: Iterable[object]) -> Iterator[Line]:
    return (line for line in values if isinstance(line, dict) and isinstance(line.get("step"), int))


def _parsed(texts: Sequence[str]) -> Iterable[object]:
    """Return the value of each line.

    One call reads them all: a call for each takes four times as long, and a long run has logged 200,000.
    """
    try:
        values: list[object] = json.loads(f"[{','.join(texts)}]", parse_constant=str)
    except (ValueError, RecursionError):  # one of them is torn, as the last one of a run that was killed
        return map(_value, texts)
    return values


def _value(text: str) -> object:
    """Return the value of a line, or None if the line is incomplete."""
    try:
        return load_json(text)
    except ValueError:
        return None
