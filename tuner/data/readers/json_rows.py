"""Reads JSON Lines, and JSON arrays of rows of any length, as rows that know their line.

A text of many lines is decoded row by row: only so does each row know its line, and a file may be larger than memory.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from tuner.data import limits
from tuner.data.readers import text_files
from tuner.data.readers.text_files import Cursor, OnError, PlacedRow
from tuner.data.unique_keys import unique_keys
from tuner.errors import DataError

_SPACE = re.compile(r"[ \t\r\n]*")
# No token of JSON but a string is longer: an error so near the end of what was read may be for want of the rest.
_LONGEST_TOKEN = 32


def read_jsonl(path: Path, on_error: OnError, at: Cursor | None = None) -> Iterator[PlacedRow]:
    """Yield the row of each line that is not blank."""
    decoder = json.JSONDecoder(object_pairs_hook=unique_keys)
    for number, line in text_files.lines(path, on_error, at):
        if written := line.rstrip():
            try:
                value = _decode(partial(decoder.decode, written), path, number)
                row = _placed(path, number, value)
            except DataError as error:
                on_error(error)
            else:
                yield row


def read_json(path: Path, on_error: OnError) -> Iterator[PlacedRow]:
    """Yield the rows of an array; a file that starts otherwise is taken for JSON Lines, as `datasets` does."""
    with text_files.opened(path) as stream:
        window = _Window(path, stream)
        start = window.next()
        if start == "[":
            yield from _read_array(window, on_error)
            return
        if start == "{":
            _refuse_object(window)
    yield from read_jsonl(path, on_error)


class _Window:
    """The part of a JSON text that is in memory; `at` is where reading has come to in it."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self.path, self._stream = path, stream
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.text, self.at = "", 0
        self._first_line, self._counted = 1, 0

    def line(self) -> int:
        """Return the line of the file that `at` is on."""
        self._first_line += self.text.count("\n", self._counted, self.at)
        self._counted = self.at
        return self._first_line

    def more(self) -> bool:
        """Read on, and forget what lies before `at`; False, and nothing changes, at the end of the file."""
        line, rest = self.line(), self.text[self.at :]
        if len(rest) > text_files.MAX_ROW_BYTES:
            raise text_files.too_long(self.path, line)
        # At least as much again as there is, so that a long row is not decoded over and over.
        raw = self._stream.read(max(text_files.BYTES_AT_ONCE, len(rest)))
        try:
            read = self._decoder.decode(raw, final=not raw)
        except UnicodeDecodeError as error:
            line += rest.count("\n") + error.object.count(b"\n", 0, error.start)
            problem = f"a byte of the line (0x{error.object[error.start]:02x}) is not UTF-8"
            raise DataError(problem, where=f"{self.path}:{line}", fix="Save the file as UTF-8.") from error
        if raw:
            self.text, self.at, self._counted = rest + read, 0, 0
        return bool(raw)

    def next(self) -> str:
        """Go to the next character that is no space and return it; '' at the end of the file."""
        while True:
            self.at = cast(re.Match[str], _SPACE.match(self.text, self.at)).end()
            if self.at < len(self.text) or not self.more():
                return self.text[self.at : self.at + 1]

    def value(self, decoder: json.JSONDecoder) -> Any:
        """Return the JSON value that starts at `at`, and go to its end; errors count lines from the value's first."""
        while True:
            try:
                value, self.at = decoder.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated") or error.pos > len(self.text) - _LONGEST_TOKEN
                if not (cut and self.more()):
                    start = self.text.rfind("\n", 0, self.at) + 1
                    raise json.JSONDecodeError(error.msg, self.text[start:], error.pos - start) from None
            else:
                return value


def _refuse_object(window: _Window) -> None:
    """Check that a file of JSON Lines does not begin with one object over many lines, as an indented file does."""
    line = window.line()
    try:
        value = window.value(json.JSONDecoder())
    except (ValueError, RecursionError):  # a line of it is wrong, and told when it is read as one
        return
    except DataError:  # longer than a row
        value = None
        if "\n" not in window.text:
            return
    if value is not None and window.line() == line:
        return
    key = next((name for name, inner in (value or {}).items() if isinstance(inner, list)), None)
    inside = "" if key is None else f", with a list under {key!r}"
    problem = f"the file is one object over many lines{inside}, not rows"
    fix = "Save only the list of rows, as [...], or one object per line."
    raise DataError(problem, where=f"{window.path}:{line}", fix=fix)


def _read_array(window: _Window, on_error: OnError) -> Iterator[PlacedRow]:
    decoder = json.JSONDecoder(object_pairs_hook=unique_keys)
    window.at += 1
    following, number, before = ",", 0, 0
    while following == "," and window.next() not in ("]", ""):
        line, number = window.line(), number + 1
        # Behind the first row of a line the number is told too: a file may be one line.
        at, before = f"{line}, row {number}" if line == before else str(line), line
        value = _decode(partial(window.value, decoder), window.path, line)
        try:
            yield _placed(window.path, at, value)
        except DataError as error:
            on_error(error)
        following = window.next()
        window.at += following == ","
    end, line = window.next(), window.line()
    window.at += 1
    if end != "]" or window.next():
        problem = "',' or ']' is missing after a row" if end else "the array is truncated"
        raise DataError(problem, where=f"{window.path}:{line}", fix="Correct the file, or create it again.")


def _decode(decode: Callable[[], Any], path: Path, line: int) -> Any:
    """Decode the row that starts at `line` of `path`."""
    fix = "Correct or remove the row."
    try:
        value = decode()
        if limits.too_deep(value):
            raise RecursionError
        return value
    except json.JSONDecodeError as error:
        torn = error.pos >= len(error.doc) or error.msg.startswith("Unterminated")
        closing = '"' if error.msg.startswith("Unterminated") else "}"
        reason = f"it ends before the closing {closing!r}" if torn else f"{error.msg} (column {error.colno})"
        problem = f"the row is not valid JSON: {reason}"
        raise DataError(problem, where=f"{path}:{line if torn else line + error.lineno - 1}", fix=fix) from error
    except RecursionError as error:
        raise DataError("the row is nested too deeply", where=f"{path}:{line}", fix=fix) from error
    except ValueError as error:
        raise DataError(str(error), where=f"{path}:{line}", fix=fix) from error


def _placed(path: Path, line: int | str, value: Any) -> PlacedRow:
    if not isinstance(value, dict):
        of = "null" if value is None else f"of type {type(value).__name__}"
        fix = 'Write each row as an object such as {"text": "..."}.'
        raise DataError(f"the row is {of}, not an object", where=f"{path}:{line}", fix=fix)
    return f"{path}:{line}", value
