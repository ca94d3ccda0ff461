"""The reader of DeepSpeed JSON files, which remembers the line and column of every key.

Python's own reader reads them, without their comments and trailing commas. `lint` knows what the keys mean.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from tuner.errors import DeepSpeedConfigError
from tuner.files import dump_json, is_writable, load_json, read_named_text
from tuner.zero.config import Document, Keys

MAX_BYTES = 1_000_000
MAX_PLACES = 5_000
"""Keys, brackets, commas and texts: no config has more than some hundred, and each unknown key takes milliseconds."""
MAX_DEPTH = 32
"""DeepSpeed's configs are at most 8 deep; code that walks through a value calls itself at each depth."""
_FIX = "Write a JSON object: names and texts in double quotes; it may have comments and trailing commas."

# Possessive, and with strings that never end, so that no input makes the matcher go back: a file is scanned once.
_STRING = r'"(?:[^"\\\n]|\\.)*+"?'
_COMMENTS = re.compile(rf"{_STRING}|(//[^\n]*+|#[^\n]*+|/\*(?s:.*?)\*/)|/\*(?s:.*)")
_LAST_COMMAS = re.compile(rf"{_STRING}|[\[{{,:]\s*+,|(,)(?=\s*+[\]}}])")
_KEYS_AND_BRACKETS = re.compile(rf"({_STRING})(\s*+:)?|[\[\]{{}},]")
_NUMBERS = re.compile(rf"{_STRING}|(-?(?:\d[\d.eE+-]*+|Infinity)|NaN)")


def read_json_config(path: Path) -> Document:
    """Read a JSON file that may hold `//`, `#` and `/* */` comments and trailing commas.

    Raises:
        DeepSpeedConfigError: the file cannot be read, is larger than 1 MB or not UTF-8, is not one JSON object,
            nests deeper than 32, holds too much, repeats a key, or has a number that is not finite or does not fit into
            64 bits.
    """
    fix = "Give a preset's name or the path of a JSON file."
    return parse(read_named_text(path, DeepSpeedConfigError, max_bytes=MAX_BYTES, fix=fix, name=str(path)), str(path))


def parse(text: str, name: str) -> Document:
    """Return `text` as a document called `name`; raises as `read_json_config` does."""
    plain = _without(_without(text, _COMMENTS), _LAST_COMMAS)
    try:
        value = load_json(plain)
    except json.JSONDecodeError as error:
        problem = f"no JSON: {error.msg[:1].lower()}{error.msg[1:]}"
        raise DeepSpeedConfigError(problem, where=f"{name}:{error.lineno}:{error.colno}", fix=_FIX) from error
    except ValueError as error:
        raise DeepSpeedConfigError(f"no JSON: {error}", where=_of_number(plain, name), fix=_FIX) from error
    if not isinstance(value, dict):
        raise DeepSpeedConfigError("the file holds no object", where=name, fix=_FIX)
    positions = _positions(plain, name)
    if not is_writable(dump_json(value)):
        fix = "Write the character itself, in UTF-8."
        raise DeepSpeedConfigError("half of a surrogate pair in a string", where=name, fix=fix)
    return Document(value, name, positions)


def _without(text: str, pattern: re.Pattern[str]) -> str:
    """Return the text with spaces in place of what the group of a pattern matches: all else stays at its place."""
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[1]) if match[1] else match[0], text)


def _of_number(text: str, name: str) -> str:
    """Return the place of the first number that JSON cannot hold, or the name alone."""
    for match in _NUMBERS.finditer(text):
        try:
            load_json(match[1] or "0")
        except json.JSONDecodeError:
            break  # the reader came no further
        except ValueError:
            before = text[: match.start()]
            return f"{name}:{before.count(chr(10)) + 1}:{match.start() - before.rfind(chr(10))}"
    return name


def _positions(text: str, name: str) -> dict[Keys, tuple[int, int]]:
    """Return line and column of each key in the text of an object."""
    positions: dict[Keys, tuple[int, int]] = {}
    path: list[str | int] = []  # of each open object the last key, of each open list the index
    line, start, last = 1, 0, 0
    for number, match in enumerate(_KEYS_AND_BRACKETS.finditer(text)):
        line += text.count("\n", last, match.start())
        start = max(start, text.rfind("\n", last, match.start()) + 1)
        last = match.start()
        place = line, last - start + 1
        where = f"{name}:{place[0]}:{place[1]}"
        if number >= MAX_PLACES:
            problem = f"the file holds more than {MAX_PLACES:,} keys, brackets, commas and texts"
            raise DeepSpeedConfigError(problem, where=where, fix="Give a DeepSpeed config, not another file.")
        if match[2]:
            path[-1] = json.loads(match[1])
            if first := positions.get(tuple(path)):
                problem = f"the key {path[-1]!r} appears a second time (first at {name}:{first[0]}:{first[1]})"
                raise DeepSpeedConfigError(problem, where=where, fix="Keep one of the two.")
            positions[tuple(path)] = place
        elif match[0] in ("{", "["):
            path.append("" if match[0] == "{" else 0)
            if len(path) > MAX_DEPTH:
                raise DeepSpeedConfigError(f"the file is nested deeper than {MAX_DEPTH}", where=where, fix=_FIX)
        elif match[0] in ("}", "]"):
            path.pop()
        elif match[0] == "," and isinstance(path[-1], int):
            path[-1] += 1
    return positions
