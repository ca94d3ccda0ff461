from __future__ import annotations

import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tuner.errors import DataError, MachineError
from tuner.worker.data import rows


def read(path: Path | str, split: str = "train") -> list[tuple[str, dict[str, object]]]:
    return list(rows.find(str(path), None, split, None).read())


def test_jsonl_rows_carry_their_line_also_after_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\n{"text": "\xc3\xa9"}')

    assert read(path) == [(f"{path}:1", {"text": "a"}), (f"{path}:3", {"text": "é"})]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"text": "a', "ends in the middle"),
        (b'{"text": ', "ends in the middle"),
        (b'{"text": "\xff"}', "byte 11 of the line (0xff) is not UTF-8"),
        (b"null", "is null"),
        (b'["a"]', "of type list"),
        (b'{"text": "a", "text": "b"}', "'text' stands twice"),
        (b'{"text": "a"} {"text": "b"}', "column 15"),
        (b'{"text": nope}', "column 10"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"n": ' + b"9" * 5000 + b"}", "digits"),
    ],
)
def test_a_bad_line_is_refused_with_file_and_line(tmp_path: Path, line: bytes, says: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b'\n{"text": "good"}\n')

    with pytest.raises(DataError) as caught:
        read(path)

    assert caught.value.where == f"{path}:2"
    assert says in str(caught.value)


def test_json_array_rows_carry_the_line_they_start_on(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[\n {"text":\n  "a]},["},\n\n {"text": "b"}, {"text": "c"}\n]\n', encoding="utf-8")

    assert read(path) == [
        (f"{path}:2", {"text": "a]},["}),
        (f"{path}:5", {"text": "b"}),
        (f"{path}:5", {"text": "c"}),
    ]


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ('[{"text": "a"},\n{"text": "b"', 2, "ends in the middle"),
        ('[{"text": "a"}\n', 2, "array ends in the middle"),
        ('[{"text": "a"}\n{"text": "b"}]', 2, "',' or ']' is missing"),
        ('[{"text": "a"},\n3]', 2, "of type int"),
        ('[{"text": "a"},\n{"text":\n oops}]', 3, "column 2"),
        ('[{"text": "a"}]\n!', 1, "is missing"),
    ],
)
def test_a_bad_json_array_is_refused_with_its_line(tmp_path: Path, text: str, line: int, says: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(DataError) as caught:
        read(path)

    assert caught.value.where == f"{path}:{line}"
    assert says in str(caught.value)


def test_json_that_is_no_array_is_read_as_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('\n{"text": "a"}\n{"text": "b"}\n', encoding="utf-8")

    assert [row["text"] for _, row in read(path)] == ["a", "b"]


def test_csv_rows_carry_their_first_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('instruction,output\n"two\nlines",x\n\nlast,y\n', encoding="utf-8")

    assert read(path) == [
        (f"{path}:2", {"instruction": "two\nlines", "output": "x"}),
        (f"{path}:5", {"instruction": "last", "output": "y"}),
    ]


@pytest.mark.parametrize(("text", "says"), [("a,b\n1,2\n1,2,3\n", "3 fields"), ('a,b\n1,2\n"x,y\n', "no valid CSV")])
def test_a_bad_csv_row_is_refused_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(DataError, match=says) as caught:
        read(path)

    assert caught.value.where == f"{path}:3"


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


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_broken_binary_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"not a table at all")

    with pytest.raises(DataError, match="no readable"):
        read(tmp_path / name)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_an_empty_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("\n", encoding="utf-8")

    with pytest.raises(DataError, match="not one row"):
        read(tmp_path / name)


def test_a_missing_file_names_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}", encoding="utf-8")

    with pytest.raises(DataError, match=r"Did you mean 'train\.jsonl'\?"):
        read(tmp_path / "trian.jsonl")


def test_an_unknown_kind_of_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.xlsx").write_text("x", encoding="utf-8")

    with pytest.raises(DataError, match=r"Known kinds: \.jsonl"):
        read(tmp_path / "a.xlsx")


def test_a_relative_path_starts_from_base(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}', encoding="utf-8")

    assert rows.find("a.jsonl", None, "train", tmp_path).place == str(tmp_path / "a.jsonl")


def test_a_folder_gives_the_files_of_the_split_in_order(tmp_path: Path) -> None:
    for name in ("train-2.jsonl", "train-1.jsonl", "validation.jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": name}), encoding="utf-8")
    (tmp_path / "README.md").write_text("about", encoding="utf-8")

    assert [row["text"] for _, row in read(tmp_path)] == ["train-1.jsonl", "train-2.jsonl"]
    assert [row["text"] for _, row in read(tmp_path, "validation")] == ["validation.jsonl"]
    with pytest.raises(DataError, match="no split 'test', only train, validation"):
        read(tmp_path, "test")


def test_a_folder_of_save_to_disk_is_read(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["a", "b"]}).save_to_disk(str(tmp_path / "saved"))

    assert [row["text"] for _, row in read(tmp_path / "saved")] == ["a", "b"]


def test_a_folder_without_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("x", encoding="utf-8")

    with pytest.raises(DataError, match="no data file"):
        read(tmp_path)


def test_the_hub_without_a_network_is_the_machines_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    with pytest.raises(MachineError, match="'owner/name' is no file or folder here"):
        read("owner/name")


def test_the_fingerprint_follows_the_content(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}', encoding="utf-8")
    before = rows.find(str(path), None, "train", None).fingerprint
    path.write_text('{"text": "b"}', encoding="utf-8")

    assert rows.find(str(path), None, "train", None).fingerprint != before
