"""The reader of DeepSpeed JSON files, which remembers the line and column of every key.

It knows JSON with comments and trailing commas. `lint` knows what the keys mean.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import NoReturn

from tuner.errors import DeepSpeedConfigError
from tuner.files import read_named_text
from tuner.zero.config import Config, Document, Keys

MAX_BYTES = 1_000_000
MAX_DEPTH = 32
# No config has more than some hundred; a megabyte of `1,` would take a second.
MAX_VALUES = 5_000
_INT_LIMIT = 2**63
_MAX_DIGITS = 20
"""Longer integers do not fit in 64 bits; Python refuses to read one of thousands of digits."""

# Possessive, so that no input makes the matcher go back: a file is scanned once.
_SPACE = re.compile(r"[ \t\r\n]++|//[^\n]*+|#[^\n]*+|/\*(?s:.*?)\*/")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*+)(\.[0-9]++)?([eE][-+]?[0-9]++)?(?![\w.+-])")
_WORD = re.compile(r'"[^"\n]{0,40}"?|[^\s,:{}\[\]"#/]{1,40}')
_CHEAP_STRING = re.compile(r'"([^"\\\x00-\x1f]*+)"')
_SURROGATE = re.compile("[\ud800-\udfff]")
_STRING = json.JSONDecoder()
_WORDS = {"true": True, "false": False, "null": None}
_NEARLY = {"True": "true", "False": "false", "None": "null", "TRUE": "true", "FALSE": "false", "yes": "true"}
_STRING_FIX = 'Strings need double quotes; write \\\\ for a backslash, \\" for a quote and \\n for a new line.'
_NOT_FINITE = {"NaN", "Infinity", "-Infinity", "nan", "inf", "-inf", "+Infinity", "-NaN"}


def read(path: Path) -> Document:
    """Read a JSON file that may hold `//`, `#` and `/* */` comments and trailing commas.

    Raises:
        DeepSpeedConfigError: the file cannot be read, is larger than 1 MB or not UTF-8, is not one JSON object,
            nests deeper than 32, holds more than 5,000 values, repeats a key, or has a number that is not
            finite or does not fit into 64 bits.
    """
    fix = "Give a preset's name or the path of a JSON file."
    return parse(read_named_text(path, DeepSpeedConfigError, max_bytes=MAX_BYTES, fix=fix, name=str(path)), str(path))


def parse(text: str, name: str) -> Document:
    """Return `text` as a document called `name`; raises as `read` does."""
    parser = _Parser(text, name)
    value = parser.document()
    return Document(value, name, _positions(text, parser.offsets))


def _positions(text: str, offsets: dict[Keys, int]) -> dict[Keys, tuple[int, int]]:
    """Return line and column of offsets that ascend; the text is scanned once."""
    result, line, start, last = {}, 1, 0, 0
    for keys, offset in offsets.items():
        line += text.count("\n", last, offset)
        start = max(start, text.rfind("\n", last, offset) + 1)
        result[keys], last = (line, offset - start + 1), offset
    return result


def _shown(literal: str) -> str:
    return literal if len(literal) <= _MAX_DIGITS else f"{literal[:_MAX_DIGITS]}..."


class _Parser:
    """One pass over one text; the offset of the next character is its only changing state besides its results."""

    def __init__(self, text: str, name: str) -> None:
        self.text, self.name, self.at = text, name, 0
        self.offsets: dict[Keys, int] = {}
        self.num_values = 0

    def position(self, offset: int) -> tuple[int, int]:
        return self.text.count("\n", 0, offset) + 1, offset - self.text.rfind("\n", 0, offset)

    def fail(self, problem: str, fix: str, at: int | None = None) -> NoReturn:
        line, column = self.position(self.at if at is None else at)
        raise DeepSpeedConfigError(problem, where=f"{self.name}:{line}:{column}", fix=fix)

    def peek(self) -> str:
        """Return the next character that is neither space nor comment, or '' at the end."""
        # Not one pattern that repeats them: re of Python 3.11.2 then matches a comment that is never closed.
        while match := _SPACE.match(self.text, self.at):
            self.at = match.end()
        if self.text.startswith("/*", self.at):
            self.fail("a comment that starts with /* is never closed", "Close it with */.")
        return self.text[self.at : self.at + 1]

    def document(self) -> Config:
        first = self.peek()
        if not first:
            self.fail("the file is empty", "Write a JSON object: {...}.")
        if first != "{":
            self.fail(f"the file holds {self.next_word()}, not an object", "Write a JSON object: {...}.")
        value = self.read_object((), 1)
        if self.peek():
            self.fail(f"{self.next_word()} follows the end of the object", "Remove everything after the last }.")
        return value

    def next_word(self) -> str:
        """Return the next word or character for a message."""
        character = self.text[self.at : self.at + 1]
        if not character:
            return "the end of the file"
        word = _WORD.match(self.text, self.at)
        return repr(word.group() if word else character)

    def value(self, keys: Keys, depth: int) -> object:
        character = self.peek()
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            self.fail(f"the file holds more than {MAX_VALUES} values", "Give a DeepSpeed config, not another file.")
        if character in ("{", "["):
            if depth >= MAX_DEPTH:
                self.fail(f"the file is nested deeper than {MAX_DEPTH}", "DeepSpeed configs are nested at most 8 deep.")
            return self.read_object(keys, depth + 1) if character == "{" else self.read_array(keys, depth + 1)
        if character == '"':
            return self.string()
        if character and character in "-0123456789" and (match := _NUMBER.match(self.text, self.at)):
            return self.number(match)
        return self.word()

    def read_object(self, keys: Keys, depth: int) -> Config:
        result: Config = {}
        start, self.at = self.at, self.at + 1
        while self.peek() != "}":
            key = self.key(keys, start)
            if self.peek() != ":":
                self.fail(f"expected ':' after {key!r}, found {self.next_word()}", 'Write "key": value.')
            self.at += 1
            result[key] = self.value((*keys, key), depth)
            self.separator("}", start)
        self.at += 1
        return result

    def read_array(self, keys: Keys, depth: int) -> list[object]:
        result: list[object] = []
        start, self.at = self.at, self.at + 1
        while self.peek() != "]":
            result.append(self.value((*keys, len(result)), depth))
            self.separator("]", start)
        self.at += 1
        return result

    def key(self, keys: Keys, start: int) -> str:
        if self.peek() != '"':
            if not self.peek():
                self.truncated(start, "}")
            self.fail(f"expected a key in double quotes, found {self.next_word()}", 'Write "key": value.')
        at = self.at
        key = self.string()
        if (*keys, key) in self.offsets:
            line, column = self.position(self.offsets[(*keys, key)])
            first = f"first at {self.name}:{line}:{column}"
            self.fail(f"the key {key!r} appears a second time ({first})", "Keep one of the two.", at)
        self.offsets[(*keys, key)] = at
        return key

    def separator(self, closing: str, start: int) -> None:
        character = self.peek()
        if character == ",":
            self.at += 1
        elif not character:
            self.truncated(start, closing)
        elif character != closing:
            self.fail(f"expected ',' or '{closing}', found {self.next_word()}", "A comma may be missing.")

    def truncated(self, start: int, closing: str) -> NoReturn:
        line, column = self.position(start)
        opening = self.text[start]
        problem = f"the file ends inside the {opening!r} opened at {self.name}:{line}:{column}"
        self.fail(problem, f"Close it with {closing}; the file may be truncated.")

    def string(self) -> str:
        if cheap := _CHEAP_STRING.match(self.text, self.at):
            self.at = cheap.end()
            return cheap.group(1)
        start = self.at
        try:
            value, self.at = _STRING.raw_decode(self.text, start)
        except json.JSONDecodeError as error:
            reason = f"{error.msg[:1].lower()}{error.msg[1:]}".removesuffix(" starting at").removesuffix(" at")
            self.fail(f"invalid string: {reason}", _STRING_FIX, error.pos)
        if _SURROGATE.search(value):
            self.fail("half of a surrogate pair in a string", "Write the character itself, in UTF-8.", start)
        return str(value)

    def number(self, match: re.Match[str]) -> int | float:
        literal, start, self.at = match.group(), self.at, match.end()
        if match.group(1) or match.group(2):
            real = float(literal)
            if not math.isfinite(real):
                self.fail(f"{_shown(literal)} is too large for a number", "Write a finite number.", start)
            return real
        value = int(literal) if len(literal) <= _MAX_DIGITS else _INT_LIMIT
        if not -_INT_LIMIT <= value < _INT_LIMIT:
            self.fail(f"{_shown(literal)} does not fit in 64 bits", "Write a smaller number.", start)
        return value

    def word(self) -> bool | None:
        match = _WORD.match(self.text, self.at)
        word = match.group() if match else ""
        if word in _WORDS:
            self.at += len(word)
            return _WORDS[word]
        if word in _NOT_FINITE:
            self.fail(f"{word} is not a JSON number", "Write a finite number.")
        if word in _NEARLY:
            self.fail(f"{word} is not JSON", f"Write {_NEARLY[word]}.")
        fix = f'Write "{word.strip(chr(39))}" if it is text.' if word[:1].isalpha() or word[:1] == "'" else ""
        self.fail(
            f"expected a value, found {self.next_word()}", fix or "Write a number, a string, true, false or null."
        )
