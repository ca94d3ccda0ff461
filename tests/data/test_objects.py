"""Rows that a program holds become a file that is named by its content."""

from __future__ import annotations

import datetime
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import PIL.Image
import pytest

from tests.refused import refused
from tuner.data import formats, sources
from tuner.data.formats.image_places import of_data_uri
from tuner.data.images import load
from tuner.data.sample import Chat, images_of
from tuner.data.sources import file_of_rows
from tuner.errors import DataError

ROWS = [
    {"messages": [{"role": "user", "content": "Grüße?"}, {"role": "assistant", "content": "Ja — 你好"}]},
    {"messages": [{"role": "user", "content": "b"}, {"role": "assistant", "content": "B"}]},
]


def read(path: Path | None) -> list[Any]:
    assert path is not None
    return [row for _, row in sources.find(str(path)).read()]


@pytest.mark.parametrize("rows", [ROWS, tuple(ROWS), datasets.Dataset.from_list(ROWS), pd.DataFrame(ROWS)])
def test_rows_of_every_kind_come_back_as_they_are_and_the_same_rows_are_the_same_file(
    rows: Any, tmp_path: Path
) -> None:
    first, second = file_of_rows(rows, "data", tmp_path / "rows"), file_of_rows(rows, "data", tmp_path / "rows")

    assert read(first) == ROWS
    assert first == second
    assert [path for path in (tmp_path / "rows").iterdir() if first and path.suffix == first.suffix] == [first]


def test_other_rows_are_another_file(tmp_path: Path) -> None:
    assert file_of_rows(ROWS, "data", tmp_path) != file_of_rows(ROWS[:1], "data", tmp_path)


def test_a_file_that_was_damaged_is_written_again(tmp_path: Path) -> None:
    path = file_of_rows(ROWS, "data", tmp_path)
    assert path is not None
    path.write_text("{}\n")

    assert read(file_of_rows(ROWS, "data", tmp_path)) == ROWS


def test_a_missing_value_of_a_data_frame_is_null_and_a_date_a_text(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {"text": ["a", None], "weight": [0.1 + 0.2, float("nan")], "day": [pd.Timestamp(2024, 1, 2)] * 2}
    )

    path = file_of_rows(frame, "data", tmp_path)

    assert path is not None
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[1] == {"text": None, "weight": None, "day": "2024-01-02T00:00:00.000"}
    assert lines[0]["weight"] == pytest.approx(0.3, rel=1e-14)


def test_images_of_pil_and_bytes_in_a_list_of_dicts_become_images_of_the_row(tmp_path: Path) -> None:
    red, cmyk = PIL.Image.new("RGB", (3, 2), "red"), PIL.Image.new("CMYK", (5, 4))
    file = BytesIO()
    red.save(file, "JPEG")
    turns = [
        {"role": "user", "content": [{"type": "image", "image": cmyk}, {"type": "text", "text": "And <image>?"}]},
        {"role": "assistant", "content": "Red."},
    ]

    rows = [{"messages": turns, "images": [red]}, {"messages": [], "image": file.getvalue()}]

    path = file_of_rows(rows, "data", tmp_path)

    assert path is not None
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    sample = formats.read_sample("messages", first, str(path))
    assert isinstance(sample, Chat)
    assert [load(image).size for image in images_of(sample.messages)] == [(5, 4), (3, 2)]
    image = of_data_uri(second["image"])
    assert image is not None and image.data == file.getvalue()


@pytest.mark.parametrize(
    "value", ["rows.jsonl", Path("rows.jsonl"), ["a.jsonl", Path("b.jsonl")], None, {"text": "a"}, 3]
)
def test_what_is_no_rows_is_left_to_whoever_knows_it(value: Any, tmp_path: Path) -> None:
    assert file_of_rows(value, "data", tmp_path) is None


@pytest.mark.parametrize(
    ("value", "what", "where"),
    [
        ([], "data has no rows", None),
        (pd.DataFrame(), "data has no rows", None),
        (datasets.Dataset.from_list([]), "data has no rows", None),
        ([{"text": "a"}, "b.jsonl"], "'b.jsonl' is not a dict", "data[1]"),
        ([{"day": datetime.date(2024, 1, 2)}], "JSON has no form for this row: Object of type date", "data[0]"),
        ([{"weight": float("nan")}], "JSON has no form for this row: Out of range float", "data[0]"),
        ([{"text": "\ud800"}], "a row holds half a character", None),
        (datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)), "data is a DatasetDict of 'train'", None),
        (datasets.Dataset.from_list(ROWS).to_iterable_dataset(), "data is an IterableDataset", None),
    ],
)
def test_rows_that_cannot_be_written_are_refused_by_their_number(
    value: Any, what: str, where: str | None, tmp_path: Path
) -> None:
    with refused(DataError, where) as caught:
        file_of_rows(value, "data", tmp_path / "rows")

    assert caught.value.what.startswith(what)
    assert not [*(tmp_path / "rows").glob("*")]
