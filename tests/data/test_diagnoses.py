"""Files that are nearly data: what is wrong with them is what the message says."""

from __future__ import annotations

import bz2
import gzip
import json
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tuner.data import readers
from tuner.errors import DataError

ROWS = [{"instruction": "Why?", "output": "Because."}] * 3
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def refusal(path: Path) -> DataError:
    with pytest.raises(DataError) as caught:
        list(readers.rows_of_file(path))
    return caught.value


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


_OBJECT = "the file is one object over many lines"


@pytest.mark.parametrize(
    ("name", "text", "what", "line"),
    [
        ("a.json", json.dumps({"data": ROWS}, indent=2), f"{_OBJECT}, with a list under 'data', not rows", 1),
        (
            *("a.json", json.dumps({"version": "1", "data": ROWS * 20_000}).replace("{", "{\n")),
            *(f"{_OBJECT}, with a list under 'data', not rows", 1),
        ),
        ("a.json", "\n" + json.dumps(ROWS[0], indent=2), f"{_OBJECT}, not rows", 2),
        ("a.json", '{"instruction": "Why?"\n' + LINES, "the row is not valid JSON: it ends before the closing '}'", 1),
        ("a.csv", "instruction;output\nWhy?;Because.\n", "the columns are separated by semicolons", 1),
        ("a.csv", "instruction\toutput\nWhy?\tBecause.\n", "the columns are separated by tabs", 1),
        ("a.csv", "instruction|output\nWhy?|Because.\n", "the columns are separated by vertical bars", 1),
        (
            *("a.csv", "\ninstruction,output,output\na,b,c\n"),
            *("the file has more than one column of the same name: output", 2),
        ),
    ],
    ids=[
        *("rows under a key", "many rows under a key", "one indented row", "a torn row"),
        *("semicolons", "tabs", "bars", "a column twice"),
    ],
)
def test_what_is_wrong_with_a_file_is_told_with_its_line(
    name: str, text: str, what: str, line: int, tmp_path: Path
) -> None:
    error = refusal(written(tmp_path / name, text))

    assert error.what.startswith(what) if name == "a.csv" else error.what == what
    assert error.where == f"{tmp_path}/{name}:{line}"


def test_an_indented_object_beyond_the_length_of_a_row_is_none_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.data.readers.text_files.MAX_ROW_BYTES", 1_000)
    monkeypatch.setattr("tuner.data.readers.text_files.BYTES_AT_ONCE", 100)

    assert (
        "one object over many lines"
        in refusal(written(tmp_path / "a.json", json.dumps({"data": ROWS * 50}, indent=2))).what
    )


@pytest.mark.parametrize(
    ("pack", "what", "fix"),
    [
        (gzip.compress, "compressed with gzip", "a.jsonl.gz"),
        (bz2.compress, "compressed with bzip2", "a.jsonl.bz2"),
        (lambda raw: pa.compress(raw, "zstd", asbytes=True), "compressed with zstd", "a.jsonl.zst"),
    ],
    ids=["gzip", "bzip2", "zstd"],
)
def test_a_packed_file_whose_name_does_not_say_so_is_told_as_packed(
    pack: object, what: str, fix: str, tmp_path: Path
) -> None:
    error = refusal(written(tmp_path / "a.jsonl", pack(LINES.encode())))  # type: ignore[operator]

    assert what in error.what
    assert fix in str(error.fix)


def test_an_archive_and_a_table_under_the_name_of_text_are_told(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.csv", "w") as archive:
        archive.writestr("a.txt", "b")
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.json")

    assert "a zip archive" in refusal(tmp_path / "a.csv").what
    assert "a Parquet file" in refusal(tmp_path / "a.json").what


@pytest.mark.parametrize(("text", "cell"), [("text\na;b\n", "a;b"), ("text,,\na,,\n", "a")])
def test_csv_of_one_column_is_read_also_with_empty_ones_behind_it(text: str, cell: str, tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", text)

    assert [row["text"] for _, row in readers.rows_of_file(path)] == [cell]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "stream.arrow"])
def test_two_columns_of_one_name_in_a_table_are_told_with_the_name(name: str, tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([letter]) for letter in "abc"], names=["instruction", "output", "output"])
    if name == "a.parquet":
        pq.write_table(table, tmp_path / name)
    else:
        new = pa.ipc.new_stream if name == "stream.arrow" else pa.ipc.new_file
        with pa.OSFile(str(tmp_path / name), "wb") as stream, new(stream, table.schema) as writer:
            writer.write_table(table)

    error = refusal(tmp_path / name)

    assert error.what == "the file has more than one column of the same name: output"
    assert error.where == str(tmp_path / name)
