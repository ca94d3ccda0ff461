from __future__ import annotations

import bz2
import gzip
import json
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.conftest import read_rows as read
from tests.data.conftest import zst
from tests.refused import refused
from tuner.data import readers
from tuner.errors import DataError

# Where a row starts, and what it holds: behind the first row of a line its number is told too.
READ: list[tuple[str, bytes, dict[str, dict[str, str]]]] = [
    ("a.jsonl", b'\xef\xbb\xbf{"text": "a"}\r\n\n{"text": "\xc3\xa9"}', {":1": {"text": "a"}, ":3": {"text": "é"}}),
    (
        *("a.json", b'[\n {"text":\n  "a]},["},\n\n {"text": "b"}, {"text": "c"}\n]\n'),
        {":2": {"text": "a]},["}, ":5": {"text": "b"}, ":5, row 3": {"text": "c"}},
    ),
    ("lines.json", b'\n{"text": "a"}\n{"text": "b"}\n', {":2": {"text": "a"}, ":3": {"text": "b"}}),
    (
        *("a.csv", b'instruction,output\n"two\nlines",x\n\nlast,y\n'),
        {":2": {"instruction": "two\nlines", "output": "x"}, ":5": {"instruction": "last", "output": "y"}},
    ),
    ("a.txt", b"one text\n\n  other\r\n", {":1": {"text": "one text"}, ":3": {"text": "  other"}}),
]


@pytest.mark.parametrize(("name", "content", "rows"), READ, ids=[name for name, *_ in READ])
def test_rows_carry_the_line_they_start_on(
    tmp_path: Path, name: str, content: bytes, rows: dict[str, dict[str, str]]
) -> None:
    path = tmp_path / name
    path.write_bytes(content)

    assert read(path) == [(f"{path}{at}", row) for at, row in rows.items()]


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        (b'[{"text": "a"},\n{"text": "b"', 2, "it ends before the closing '}'"),
        (b'[{"text": "a"}\n', 2, "array is truncated"),
        (b'[{"text": "a"}\n{"text": "b"}]', 2, "',' or ']' is missing"),
        (b'[{"text": "a"},\n3]', 2, "of type int"),
        (b'[{"text": "a"},\n{"text":\n oops}]', 3, "column 2"),
        (b'[{"text": "a"}]\n!', 1, "is missing"),
        (b'[{"text": "a"},\n\n{"text": "b', 3, "it ends before the closing '\"'"),
        (b'[{"text": "a"},\n{"text": "b", "text": "c"}]', 2, "appears twice"),
        (b'[{"text": "a"},\n{"text": "\n"}]', 2, "control character"),
        (b'[\n{"text": "a"},\n{"text": "\xff"}]', 3, "0xff"),
    ],
)
@pytest.mark.parametrize("size", [1, 5, 1 << 20])
def test_a_bad_json_array_is_refused_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes, line: int, says: str, size: int
) -> None:
    monkeypatch.setattr("tuner.data.readers.text_files.BYTES_AT_ONCE", size)
    path = tmp_path / "a.json"
    path.write_bytes(text)

    with refused(DataError, f"{path}:{line}") as caught:
        read(path)

    assert says in str(caught.value)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 33, *range(60, 90)])
def test_a_json_array_is_the_same_wherever_its_text_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    made = [
        {"text": "é\u2028 \n \\"},
        {"n": [1.5e10, -0.25, None, True, False, 10**20] * 9, "o": {"p": "x" * 90}},
        {},
        {"e": "😀"},
    ]
    path = tmp_path / "a.json"
    path.write_bytes(b"\xef\xbb\xbf\n[" + ",\n ".join(json.dumps(row, ensure_ascii=False) for row in made[:3]).encode())
    with path.open("a") as stream:
        stream.write("\n,\n" + json.dumps(made[3]) + " ] \n")

    monkeypatch.setattr("tuner.data.readers.text_files.BYTES_AT_ONCE", size)

    assert read(path) == [(f"{path}:{line}", row) for line, row in zip((2, 3, 4, 6), made, strict=True)]


@pytest.mark.parametrize(("text", "says"), [("a,b\n1,2\n1,2,3\n", "3 fields"), ('a,b\n1,2\n"x,y\n', "invalid CSV:")])
def test_a_bad_csv_row_is_refused_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(DataError, match=says) as caught:
        read(path)

    assert caught.value.where == f"{path}:3"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", '{"text": "a"}\n\n{"text": "b"}\n'),
        ("a.json", '[{"text": "a"},\n\n{"text": "b"}]'),
        ("a.csv", "text\n\na\n\nb\n"),
        ("a.txt", "a\n\nb\n"),
    ],
)
def test_packed_text_is_read_as_what_it_holds(tmp_path: Path, name: str, text: str) -> None:
    plain = tmp_path / name
    plain.write_text(text, encoding="utf-8")

    for suffix, pack in ((".gz", gzip.compress), (".zst", zst), (".bz2", bz2.compress)):
        path = tmp_path / f"{name}{suffix}"
        path.write_bytes(pack(text.encode()))
        assert read(path) == [(place.replace(str(plain), str(path)), row) for place, row in read(plain)]


def test_a_packed_file_of_several_parts_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n') + gzip.compress(b'{"text": "b"}\n'))

    assert [row["text"] for _, row in read(path)] == ["a", "b"]


@pytest.mark.parametrize("name", ["a.jsonl", "pretty.json", "one_line.json", "a.csv", "a.txt", "a.jsonl.gz"])
def test_a_file_is_never_in_memory_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("tuner.data.readers.text_files.BYTES_AT_ONCE", 1 << 16)
    path, row = tmp_path / name, {"text": "x" * 1_000}
    kinds = {
        "pretty.json": json.dumps([row] * 2_000, indent=1),
        "one_line.json": json.dumps([row] * 2_000),
        "a.csv": "text\n" + ("x" * 1_000 + "\n") * 2_000,
    }
    data = kinds.get(name, (json.dumps(row) + "\n") * 2_000).encode()
    path.write_bytes(gzip.compress(data, 1) if name.endswith(".gz") else data)

    tracemalloc.start()
    number = sum(1 for _ in readers.rows_of_file(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert number == 2_000
    assert peak < len(data) / 4


def test_a_row_group_as_large_as_its_file_is_not_in_memory_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"text": ["x" * 1_000] * 4_000})
    pq.write_table(table, path, compression="none", use_dictionary=False, data_page_size=1 << 16)
    del table

    before = pa.total_allocated_bytes()
    peak = max(pa.total_allocated_bytes() - before for _ in readers.rows_of_file(path))

    assert peak < path.stat().st_size / 2


def test_parquet_and_arrow_rows_carry_their_number(tmp_path: Path) -> None:
    table = pa.table({"text": ["a", "b"]})
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_stream(str(tmp_path / "stream.arrow"), table.schema) as writer:
        writer.write_table(table)
    with pa.ipc.new_file(str(tmp_path / "file.arrow"), table.schema) as writer:
        writer.write_table(table)

    for name in ("a.parquet", "stream.arrow", "file.arrow"):
        path = tmp_path / name
        assert read(path) == [(f"{path}, row 1", {"text": "a"}), (f"{path}, row 2", {"text": "b"})]


CUT = gzip.compress(b'{"text": "a"}\n' * 100, mtime=0)[:-20]


@pytest.mark.parametrize(
    ("name", "content"), [("a.parquet", b"no table"), ("a.arrow", b"no table"), ("a.jsonl.gz", CUT)]
)
def test_a_broken_binary_file_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)

    with pytest.raises(DataError, match="cannot read the"):
        read(tmp_path / name)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_an_empty_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("\n", encoding="utf-8")

    with pytest.raises(DataError, match="it has no rows"):
        read(tmp_path / name)
