from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refused import refused
from tuner.errors import DeepSpeedConfigError
from tuner.zero.config import Document
from tuner.zero.jsonfile import MAX_BYTES, MAX_DEPTH, parse, read_json_config

DATA = Path(__file__).parent / "data"

REFUSED: dict[str, str] = {
    "": ":1:1",
    "// nothing\n": ":2:1",
    "[1]": "",
    '{"a": 1} x': ":1:10",
    '{\n "zero_optimization": {"stage": 2': ":2:34",
    '{"a": [1, 2': ":1:12",
    '{"a":': ":1:6",
    "{": ":1:2",
    '{"a": "abc': ":1:7",
    '{"a": 1} /* open': ":1:10",
    '{"a": 1,\n "b": {"a": 2},\n "a": 3}': ":3:2",
    '{"a": 1, "\\u0061": 2}': ":1:10",
    '{"a": NaN}': ":1:7",
    '{"NaN": "NaN", // NaN\n "b": [1, -Infinity]}': ":2:11",
    '{"a": 1e999}': ":1:7",
    '{"a": 9223372036854775808}': ":1:7",
    '{"a": -9223372036854775809}': ":1:7",
    '{"a": ' + "9" * 5000 + "}": ":1:7",
    "{a: 1}": ":1:2",
    "{'a': 1}": ":1:2",
    '{"a": True}': ":1:7",
    '{"a": 1 "b": 2}': ":1:9",
    '{"a": 1,, "b": 2}': ":1:9",
    '{"a" 1}': ":1:6",
    '{"a": [,]}': ":1:8",
    '{"a": "one\ntwo"}': ":1:11",
    '{"a": "\x00"}': ":1:8",
    '{"a": "\\ud800"}': "",
    '{"\\udc00": 1}': "",
    '{"a": ' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}": ":1:38",
}
"""The place of what is wrong: line and column, and none of a character that JSON cannot hold."""


@pytest.mark.parametrize("text", REFUSED)
def test_a_wrong_file_is_refused_with_its_line_and_column(text: str) -> None:
    with refused(DeepSpeedConfigError, f"my.json{REFUSED[text]}"):
        parse(text, "my.json")


def test_comments_and_trailing_commas_are_read() -> None:
    text = '{ // one\n "a": 5e8, # two\n /* three\n */ "b": [1, 2,], "url": "http://x#y/*z*/",\n}'

    document = parse(text, "my.json")

    assert document.value == {"a": 5e8, "b": [1, 2], "url": "http://x#y/*z*/"}
    assert isinstance(document.value["a"], float)


def test_the_least_number_of_64_bits_is_read() -> None:
    assert parse('{"a": -9223372036854775808}', "my.json").value == {"a": -(2**63)}


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    path = tmp_path / "bom.json"
    path.write_bytes(b'\xef\xbb\xbf{\r\n  "a": 1\r\n}\r\n')

    document = read_json_config(path)

    assert document.value == {"a": 1}
    assert document.where(("a",)) == f"{path}:2:3"


def test_where_names_the_nearest_key_around() -> None:
    document = parse('{\n  "a": {\n    "b": [{"c": 1}]\n  }\n}', "my.json")

    assert document.where(("a", "b", 0, "c")) == "my.json:3:12"
    assert document.where(("a", "b", 0)) == "my.json:3:5"
    assert document.where(("a", "missing")) == "my.json:2:3"
    assert document.where(("missing",)) == "my.json"
    assert Document({"a": 1}, "preset zero2").where(("a",)) == "preset zero2"


UNREADABLE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "nothing": ("there is no file", lambda path: None),
    "a directory": ("is a directory", Path.mkdir),
    "a pipe, which may never end": ("not a regular file", os.mkfifo),
    "a path through a file": ("cannot be read: Not a directory", lambda path: path.parent.write_text("{}")),
    "UTF-16": ("UTF-16", lambda path: path.write_text("{}", encoding="utf-16")),
    "more than a megabyte": ("larger than 1,000,000 bytes", lambda path: path.write_bytes(b"[" * (MAX_BYTES + 1))),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_what_cannot_be_read_is_told(what: str, tmp_path: Path) -> None:
    told, put = UNREADABLE[what]
    path = tmp_path / "folder" / "my.json"
    if what != "a path through a file":
        path.parent.mkdir()
    put(path)

    with pytest.raises(DeepSpeedConfigError, match=told):
        read_json_config(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission_is_unreadable(tmp_path: Path) -> None:
    path = tmp_path / "secret.json"
    path.write_text("{}")
    path.chmod(0)

    with pytest.raises(DeepSpeedConfigError, match="cannot be read: Permission denied"):
        read_json_config(path)


def test_bytes_that_are_not_utf8_are_refused_with_their_place() -> None:
    with refused(DeepSpeedConfigError, "latin1.json:2:16", "byte 0xfc"):
        read_json_config(DATA / "latin1.json")


HOSTILE = {
    "brackets": '{"a": ' + "[" * (MAX_BYTES - 6),
    "quotes": "{" + '"' * (MAX_BYTES - 1),
    "backslashes": '{"' + "\\" * (MAX_BYTES - 2),
    "one long string": '{"' + "a" * (MAX_BYTES - 2),
    "digits": '{"a": ' + "9" * (MAX_BYTES - 7) + "}",
    "exponent": '{"a": 1e' + "9" * (MAX_BYTES - 9) + "}",
    "comments": "/**/" * (MAX_BYTES // 4),
    "half comments": "{" + "/*" * (MAX_BYTES // 2 - 1),
    "line comments": "//\n" * (MAX_BYTES // 3),
    "new lines": "\n" * MAX_BYTES,
    "keys, each of which would be compared with all that DeepSpeed has": json.dumps(
        dict.fromkeys(map(str, range(9_999)))
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_quickly(name: str) -> None:
    start = time.process_time()

    with pytest.raises(DeepSpeedConfigError):
        parse(HOSTILE[name], "my.json")

    # 0.3 s at most where this was written; a quadratic parser takes minutes.
    assert time.process_time() - start < 3


_numbers = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_values = st.recursive(
    st.none() | st.booleans() | _numbers | _texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_texts, inner, max_size=4),
    max_leaves=20,
)
_comments = st.sampled_from(["", " ", "\n", "// x {\n", "# ' \"\n", "/* ] */", "/**/", "/* // */ # \\\n"])


def _write(value: Any, draw: Any, ascii_only: bool) -> str:
    """Write JSON as `json.dumps` does, with comments and trailing commas drawn between its tokens."""

    def space() -> str:
        return str(draw(_comments))

    def items(parts: list[str], opening: str, closing: str) -> str:
        comma = "," if parts and draw(st.booleans()) else ""
        return space() + opening + ",".join(parts) + space() + comma + space() + closing + space()

    if isinstance(value, dict):
        pairs = [
            f"{space()}{json.dumps(key, ensure_ascii=ascii_only)}{space()}:{_write(item, draw, ascii_only)}"
            for key, item in value.items()
        ]
        return items(pairs, "{", "}")
    if isinstance(value, list):
        return items([_write(item, draw, ascii_only) for item in value], "[", "]")
    return space() + json.dumps(value, ensure_ascii=ascii_only) + space()


@given(st.dictionaries(_texts, _values, max_size=5), st.booleans(), st.data())
def test_any_json_reads_back_with_comments_and_trailing_commas(value: Any, ascii_only: bool, data: Any) -> None:
    text = _write(value, data.draw, ascii_only)

    document = parse(text, "my.json")

    assert document.value == json.loads(json.dumps(value))
    assert repr(document.value) == repr(value)


@given(st.dictionaries(_texts, _values, min_size=1, max_size=5), st.integers(0, 2))
def test_every_position_is_the_place_of_its_key(value: Any, indent: int) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=False)

    document = parse(text, "my.json")

    lines = text.split("\n")
    assert {keys[0] for keys in document.positions} == set(value)
    for keys, (line, column) in document.positions.items():
        assert lines[line - 1][column - 1 :].startswith(json.dumps(keys[-1], ensure_ascii=False))
