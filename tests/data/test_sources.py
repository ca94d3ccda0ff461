"""A path or a hub id becomes the rows of its files, whatever stands there."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import datasets
import pytest

from tests.data.conftest import read_rows as read
from tests.data.conftest import zst
from tests.refused import refused
from tuner import assets
from tuner.data import sources
from tuner.errors import DataError, MachineError


def test_a_missing_file_names_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}", encoding="utf-8")

    with pytest.raises(DataError, match=r"Did you mean 'train\.jsonl'\?"):
        read(tmp_path / "trian.jsonl")


def test_a_pattern_gives_the_files_that_match_in_their_order(tmp_path: Path) -> None:
    for name in ("b/2.jsonl", "b/10.jsonl", "a/3.jsonl", "a/4.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}), encoding="utf-8")

    assert [row["text"] for _, row in read(tmp_path / "*/*.jsonl")] == ["a/3.jsonl", "b/10.jsonl", "b/2.jsonl"]
    assert [row["text"] for _, row in read(tmp_path / "**/*.json")] == ["a/4.json"]
    with pytest.raises(DataError, match="there is no file or folder"):
        read(tmp_path / "*.jsonl")


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "a[1].jsonl").write_text('{"text": "a"}', encoding="utf-8")

    assert len(read(tmp_path / "a[1].jsonl")) == 1


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("train[:10%]", [0, 1]),
        ("train[15:]", [15, 16, 17, 18, 19]),
        ("train[50%:60%]", [10, 11]),
        ("train[:99]", [*range(20)]),
    ],
)
def test_a_part_of_a_split_is_read_of_files_too(tmp_path: Path, split: str, expected: list[int]) -> None:
    """The whole file was read, whatever part was named."""
    (tmp_path / "a.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(20)), encoding="utf-8")

    assert [row["n"] for _, row in read(tmp_path / "a.jsonl", split)] == expected
    assert [row["n"] for _, row in read(tmp_path, split)] == expected


@pytest.mark.parametrize("split", ["train[", "train[:x]", "train[:3][:2]", "train[1:]", "train[:0]", "train[5:2]"])
def test_a_malformed_or_empty_part_of_a_split_is_refused(tmp_path: Path, split: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": 1}', encoding="utf-8")

    with pytest.raises(DataError):
        read(tmp_path / "a.jsonl", split)


def test_a_folder_gives_the_files_of_the_split_in_order(tmp_path: Path) -> None:
    for name in ("train-2.jsonl", "train-1.jsonl", "validation.jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": name}), encoding="utf-8")
    (tmp_path / "README.md").write_text("about", encoding="utf-8")

    assert [row["text"] for _, row in read(tmp_path)] == ["train-1.jsonl", "train-2.jsonl"]
    assert [row["text"] for _, row in read(tmp_path, "validation")] == ["validation.jsonl"]
    with refused(DataError, str(tmp_path)):
        read(tmp_path, "test")


def test_a_folder_of_packed_files_is_read(tmp_path: Path) -> None:
    (tmp_path / "train-1.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}'))
    (tmp_path / "train-2.jsonl.zst").write_bytes(zst(b'{"text": "b"}'))

    assert [row["text"] for _, row in read(tmp_path)] == ["a", "b"]


def test_the_splits_and_files_of_save_to_disk_are_those_that_it_lists(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"text": ["a", "b"]})
    datasets.DatasetDict(train_sft=rows, test_sft=rows.select([1])).save_to_disk(str(tmp_path))
    saved = datasets.load_from_disk(str(tmp_path))
    saved["test_sft"].map(lambda row: {"text": row["text"] * 2})  # writes cache-*.arrow beside the rows

    assert list((tmp_path / "test_sft").glob("cache-*.arrow"))
    assert [row for _, row in sources.find(str(tmp_path), split="test_sft").read()] == [{"text": "b"}]
    with refused(DataError, str(tmp_path)):
        sources.find(str(tmp_path))


def test_a_folder_of_save_to_disk_is_read(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["a", "b"]}).save_to_disk(str(tmp_path / "saved"))

    assert [row["text"] for _, row in read(tmp_path / "saved")] == ["a", "b"]


MALFORMED = [
    ("state.json", "not JSON", "not valid JSON"),
    ("state.json", '{"_data_files": {"filename": "a"}}', "not a list"),
    ("state.json", '{"_data_files": [{}]}', "not the name of a file"),
    ("state.json", '{"_data_files": ["a", 3]}', "not the name of a file"),
    ("state.json", '{"_data_files": [{"filename": "../secret.arrow"}]}', "not the name of a file"),
    ("state.json", '{"_data_files": [{"filename": "/secret.arrow"}]}', "not the name of a file"),
    ("state.json", '{"_data_files": [], "x": %s}' % ("[" * 100_000), "not valid JSON"),
    ("dataset_dict.json", '{"splits": [["train"]]}', "not the name of a file"),
    ("dataset_dict.json", '{"splits": ["train", "../other"]}', "not the name of a file"),
    ("dataset_dict.json", '{"splits": "train"}', "not a list"),
    ("dataset_dict.json", "x" * 4_000_001, "larger than"),
]


@pytest.mark.parametrize(("name", "text", "what"), MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_list_of_saved_files_is_refused_with_its_place(
    tmp_path: Path, name: str, text: str, what: str
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")

    with pytest.raises(DataError, match=what) as caught:
        sources.find(str(tmp_path))

    assert str(caught.value.where).endswith(name)
    assert "save_to_disk" in str(caught.value.fix)


def test_a_folder_without_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("x", encoding="utf-8")

    with refused(DataError, str(tmp_path)):
        read(tmp_path)


def test_the_hub_without_a_network_is_the_machines_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    for path in ("owner/name", "hf://datasets/owner/name/*.jsonl"):
        with pytest.raises(MachineError, match=f"'{re.escape(path)}' is not a local file or folder"):
            read(path)


def test_a_path_may_start_in_the_package_or_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}', encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path))

    assert read("~/a.jsonl") == read("~/*.jsonl") == [(f"{tmp_path}/a.jsonl:1", {"text": "a"})]
    (shipped, _), *_ = read("package:sample/train.jsonl")
    assert shipped == f"{assets.asset('package:sample/train.jsonl')}:1"


def test_files_of_a_url_are_read_through_datasets(tmp_path: Path) -> None:
    for name in ("a1.jsonl", "a2.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": name}), encoding="utf-8")

    source = sources._files_of_url(f"file://{tmp_path}/a*.jsonl")

    assert [row["text"] for _, row in source.read()] == ["a1.jsonl", "a2.jsonl"]
    with pytest.raises(DataError, match="have an unsupported file type"):
        sources._files_of_url("hf://datasets/owner/name/a.zip")


def test_a_data_set_that_is_a_script_is_refused_with_the_way_round_it() -> None:
    with pytest.raises(DataError, match=r"is a loading script.*hf://datasets/") as caught:
        sources._loaded("owner/name", "script.py")

    assert isinstance(caught.value.__cause__, RuntimeError)


def test_the_fingerprint_follows_the_content(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}', encoding="utf-8")
    before = sources.find(str(path)).fingerprint()
    path.write_text('{"text": "b"}', encoding="utf-8")

    assert sources.find(str(path)).fingerprint() != before
