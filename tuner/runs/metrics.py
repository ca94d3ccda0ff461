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
from tuner.runs.follow import Growing, tail

Line = dict[str, Any]
_LARGEST = sys.float_info.max


class Curve(NamedTuple):
    """What was logged under one key: steps, and the value at each."""

    steps: list[int]
    values: list[float]


class Curves:
    """What was logged under some keys, without what is no finite number; `read` goes on where it last ended.

    Args:
        run: It need not be there yet.
        keys: Of the lines.
    """

    def __init__(self, run: RunDirectory, keys: Iterable[str]) -> None:
        self._file, self._keys = run.metrics, tuple(keys)
        self._begin(None)

    def _begin(self, inode: tuple[int, int] | None) -> None:
        self._inode, self._new = inode, Growing(self._file)
        self.by_key = {key: Curve([], []) for key in self._keys}
        """The curves, which grow; others once the file has been replaced, as by a run that goes on from earlier."""

    def read(self, *, whole_lines: bool = True) -> None:
        """Add what is new; a line that has no end yet is left for later, or where nobody goes on with it, read too."""
        try:
            found = self._file.stat()
        except OSError:  # removed: what was read stays until there is another one
            self._inode = None
            return
        inode = found.st_dev, found.st_ino
        if inode != self._inode or found.st_size < self._new.num_read:
            self._begin(inode)
        for lines in _in_parts(self._new, whole_lines=whole_lines):
            for key, curve in self.by_key.items():
                logged = _with_number(lines, key)
                curve.steps.extend([line["step"] for line in logged])
                curve.values.extend([line[key] for line in logged])


def curves(run: RunDirectory, keys: Iterable[str]) -> dict[str, Curve]:
    """Return what was logged under some keys, without what is no finite number."""
    found = Curves(run, keys)
    found.read()
    found.read(whole_lines=False)
    return found.by_key


def every_line(run: RunDirectory) -> list[Line]:
    """Return every line, the earliest first; none of a run that has logged nothing."""
    new = Growing(run.metrics)
    parts = (lines for whole_lines in (True, False) for lines in _in_parts(new, whole_lines=whole_lines))
    return [line for lines in parts for line in lines]


def _in_parts(new: Growing, *, whole_lines: bool) -> Iterator[list[Line]]:
    # A megabyte at a time: 200,000 lines as objects take 240 MB, as curves alone 95.
    while data := new.read(whole_lines=whole_lines):
        texts = [text for text in data.decode(errors="replace").split("\n") if text.strip()]
        yield list(_lines(_parsed(texts)))


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
