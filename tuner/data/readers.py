"""Reads one file, of any known kind, as rows that know their line; never more of it in memory than a row and a chunk.

It does not know where files are found or what a row means.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa

from tuner.data.columnar import Broken as Broken
from tuner.data.columnar import PlacedRow as PlacedRow
from tuner.data.columnar import Row as Row
from tuner.data.columnar import numbered as numbered
from tuner.data.columnar import read_arrow, read_parquet, refuse_twice, unreadable
from tuner.errors import DataError

_OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}
_PACKED = (".gz", ".zst", ".bz2")
_MAGIC = {
    b"\x1f\x8b": ("packed with gzip", "Name it '{}.gz'."),
    b"\x28\xb5\x2f\xfd": ("packed with zstd", "Name it '{}.zst'."),
    b"BZh": ("packed with bzip2", "Name it '{}.bz2'."),
    b"PK\x03\x04": ("a zip archive", "Unpack it."),
    b"PAR1": ("a Parquet file", "Name it '{}.parquet'."),
}
"""What no text begins with: what such a file is, and what to do with it."""
_SPACE = re.compile(r"[ \t\r\n]*")
_BYTES_AT_ONCE = 1 << 20
MAX_ROW_BYTES = 32 * 1024**2
"""Of one row of text: far above any sample, and what keeps a packed file of a few kilobytes from filling the memory."""
# No token of JSON but a string is longer: an error so near the end of what was read may be for want of the rest.
_LONGEST_TOKEN = 32


def kind(path: Path) -> str | None:
    """Return the kind of a file, such as '.jsonl' (for x.jsonl.gz too), or None where no reader knows it."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = suffixes[-1:] and suffixes[-1] in _PACKED
    last = suffixes[-2:-1] if packed else suffixes[-1:]
    return last[0] if last and last[0] in (_OF_TEXT if packed else READERS) else None


def known_kinds() -> str:
    """Return the kinds of files that can be read, for messages."""
    return f"{', '.join(READERS)}, and text packed as {', '.join(_PACKED)}"


def read(path: Path, broken: Broken | None = None) -> Iterator[PlacedRow]:
    """Yield the rows of a file of a known kind.

    Raises:
        DataError: the file cannot be read from some point on, or a row of it is broken; with the line.
    """
    reader = READERS[kind(path) or ""]
    return reader(path, broken)


def _tell(error: DataError, broken: Broken | None) -> None:
    if broken is None:
        raise error
    broken(error)


@contextmanager
def _bytes(path: Path) -> Iterator[BinaryIO]:
    try:
        # Arrow unpacks four times as fast as Python's gzip does, and it has zstd.
        with io.BufferedReader(pa.input_stream(str(path))) as stream:
            _refuse_packed(path, stream.peek(4))
            yield cast(BinaryIO, stream)
    except (pa.ArrowException, OSError) as error:
        raise unreadable(path, path.suffix.lstrip("."), error) from error


def _refuse_packed(path: Path, start: bytes) -> None:
    name, fix = next((told for magic, told in _MAGIC.items() if start.startswith(magic)), ("", ""))
    if name:
        what = f"the file is {name}, and its name ends in {path.suffix!r}"
        raise DataError(what, where=path, fix=fix.format(path.name))


def _lines(path: Path, broken: Broken | None) -> Iterator[tuple[int, str]]:
    """Yield each line with its number, decoded alone so that a bad byte is reported with its line."""
    with _bytes(path) as stream:
        for number, raw in enumerate(iter(partial(stream.readline, MAX_ROW_BYTES + 1), b""), 1):
            if len(raw) > MAX_ROW_BYTES:
                _tell(_too_long(path, number), broken)
                while raw and not raw.endswith(b"\n"):
                    raw = stream.readline(_BYTES_AT_ONCE)
                continue
            try:
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                what = f"byte {error.start + 1} of the line (0x{raw[error.start]:02x}) is not UTF-8"
                _tell(DataError(what, where=f"{path}:{number}", fix="Save the file as UTF-8."), broken)


def _too_long(path: Path, line: int) -> DataError:
    what = f"the row is longer than {MAX_ROW_BYTES // 1024**2} MiB"
    return DataError(what, where=f"{path}:{line}", fix="Split it into several rows.")


def _read_txt(path: Path, broken: Broken | None) -> Iterator[PlacedRow]:
    for number, line in _lines(path, broken):
        if text := line.rstrip():
            yield f"{path}:{number}", {"text": text}


def _read_jsonl(path: Path, broken: Broken | None) -> Iterator[PlacedRow]:
    decoder = json.JSONDecoder(object_pairs_hook=_unique)
    for number, line in _lines(path, broken):
        if text := line.rstrip():
            try:
                row = _checked(path, number, _decode(partial(decoder.decode, text), path, number, number - 1))
            except DataError as error:
                _tell(error, broken)
            else:
                yield row


def _read_json(path: Path, broken: Broken | None) -> Iterator[PlacedRow]:
    """Read an array of rows; a file that starts otherwise is taken for JSON Lines, as `datasets` does."""
    with _bytes(path) as stream:
        window = _Window(path, stream)
        start = window.next()
        if start == "[":
            yield from _read_array(window, broken)
            return
        if start == "{":
            _refuse_object(window)
    yield from _read_jsonl(path, broken)


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
        if len(rest) > MAX_ROW_BYTES:
            raise _too_long(self.path, line)
        # At least as much again as there is, so that a long row is not decoded over and over.
        raw = self._stream.read(max(_BYTES_AT_ONCE, len(rest)))
        try:
            read = self._decoder.decode(raw, final=not raw)
        except UnicodeDecodeError as error:
            line += rest.count("\n") + error.object.count(b"\n", 0, error.start)
            what = f"a byte of the line (0x{error.object[error.start]:02x}) is not UTF-8"
            raise DataError(what, where=f"{self.path}:{line}", fix="Save the file as UTF-8.") from error
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
    """Check that a file of JSON Lines does not begin with one object over many lines, as an indented file does.

    Raises:
        DataError: it does.
    """
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
    key = next((name for name, one in (value or {}).items() if isinstance(one, list)), None)
    held = "" if key is None else f", with a list under {key!r}"
    what = f"the file is one object over many lines{held}, and not rows"
    fix = "Write the list of rows alone, as [...], or each row as an object on a line of its own."
    raise DataError(what, where=f"{window.path}:{line}", fix=fix)


def _read_array(window: _Window, broken: Broken | None) -> Iterator[PlacedRow]:
    # One element at a time: only so does each row know its line, and a file larger than memory can be read.
    decoder = json.JSONDecoder(object_pairs_hook=_unique)
    window.at += 1
    following = ","
    while following == "," and window.next() not in ("]", ""):
        line = window.line()
        value = _decode(partial(window.value, decoder), window.path, line, line - 1)
        try:
            yield _checked(window.path, line, value)
        except DataError as error:
            _tell(error, broken)
        following = window.next()
        window.at += following == ","
    end, line = window.next(), window.line()
    window.at += 1
    if end != "]" or window.next():
        what = "',' or ']' is missing after a row" if end else "the array ends in the middle"
        raise DataError(what, where=f"{window.path}:{line}", fix="Write the file again, or correct it.")


def _unique(pairs: list[tuple[str, Any]]) -> Row:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} stands twice in one object")
    return found


def _decode(decode: Callable[[], Any], path: Path, line: int, lines_before: int) -> Any:
    """Decode the row that starts at `line` of `path`; `lines_before` lines of the file stand before its text."""
    fix = "Correct or remove the row."
    try:
        return decode()
    except json.JSONDecodeError as error:
        torn = error.pos >= len(error.doc) or error.msg.startswith("Unterminated")
        what = "the row ends in the middle" if torn else f"no valid JSON at column {error.colno}: {error.msg}"
        raise DataError(what, where=f"{path}:{line if torn else lines_before + error.lineno}", fix=fix) from error
    except RecursionError as error:
        raise DataError("the row is nested too deeply", where=f"{path}:{line}", fix=fix) from error
    except ValueError as error:
        raise DataError(str(error), where=f"{path}:{line}", fix=fix) from error


def _checked(path: Path, line: int, value: Any) -> PlacedRow:
    if not isinstance(value, dict):
        of = "null" if value is None else f"of type {type(value).__name__}"
        fix = 'Write each row as an object such as {"text": "..."}.'
        raise DataError(f"the row is {of}, not an object", where=f"{path}:{line}", fix=fix)
    return f"{path}:{line}", value


def _read_csv(path: Path, broken: Broken | None) -> Iterator[PlacedRow]:
    csv.field_size_limit(MAX_ROW_BYTES)
    start, length = 1, 0

    def lines() -> Iterator[str]:
        nonlocal length
        # A line that is left out would shift the numbers of those after it, and may be half of a row.
        for _, line in _lines(path, None):
            length += len(line)
            if length > MAX_ROW_BYTES:
                raise _too_long(path, start)
            yield line

    reader = csv.reader(lines(), strict=True)
    header: list[str] | None = None
    try:
        for record in reader:
            if record and header is None:
                header = _csv_header(f"{path}:{start}", record)
            elif record and header:
                try:
                    yield _csv_row(f"{path}:{start}", header, record)
                except DataError as error:
                    _tell(error, broken)
            start, length = reader.line_num + 1, 0
    except csv.Error as error:
        raise DataError(f"no valid CSV: {error}", where=f"{path}:{start}", fix="Correct the row's quotes.") from error


def _csv_header(where: str, names: list[str]) -> list[str]:
    """Return the names of the columns.

    Raises:
        DataError: a name stands twice, or something else than a comma stands between them.
    """
    other = next((mark for mark in _OTHER_SEPARATORS if len(names) == 1 and mark in names[0]), None)
    if other:
        what = f"the columns are separated by {_OTHER_SEPARATORS[other]}: {names[0]}"
        raise DataError(what, where=where, fix="Write the file again with commas between the columns.")
    refuse_twice(names, where)
    return names


def _csv_row(where: str, header: list[str], record: list[str]) -> PlacedRow:
    if len(record) != len(header):
        what = f"the row has {len(record)} fields where the header names {len(header)}: {', '.join(header)}"
        raise DataError(what, where=where, fix="Put quotes around fields that hold commas or line breaks.")
    return where, dict(zip(header, record, strict=True))


_OF_TEXT: dict[str, Callable[[Path, Broken | None], Iterator[PlacedRow]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".txt": _read_txt,
}
READERS = {**_OF_TEXT, ".parquet": read_parquet, ".arrow": read_arrow}
