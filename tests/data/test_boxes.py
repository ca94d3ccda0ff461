"""XTuner's rows of RefCOCO become questions for a box, or for its description, with the box in hundredths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.each import each
from tuner.data import formats, mixing
from tuner.data.formats.image_places import ImagePaths
from tuner.data.sample import Chat
from tuner.errors import DataError
from tuner.recipes.schema import Dataset

ROW = {"id": "x", "image": "a.jpg", "sents": "left {cup}", "bbox": [10, 20.5, 30, 40], "height": 100, "width": 64}
ANSWER = "{<15><20><62><60>}"


def turns(name: str, row: dict[str, Any]) -> tuple[list[Any], str]:
    """Return the parts of the question and the answer."""
    chat = formats.read_sample(name, row, "f:1", images=ImagePaths(Path()))
    assert isinstance(chat, Chat)
    question, answer = chat.messages
    return question["content"], answer["content"]


@each([("refcoco", "left {cup}", ANSWER), ("inv_refcoco", ANSWER, "left {cup}")])
def test_a_row_asks_for_the_box_or_for_its_description(name: str, asked: str, answer: str) -> None:
    (image, text), reply = turns(name, ROW)

    assert image["type"] == "image" and asked in text["text"] and text["text"].startswith("[")
    assert reply == answer


def test_the_seven_forms_follow_from_the_row() -> None:
    questions = [turns("refcoco", ROW | {"sents": f"cup {number:03}"})[0][1]["text"] for number in range(100)]

    assert len({text.replace(f"cup {number:03}", "") for number, text in enumerate(questions)}) == 7
    assert turns("refcoco", dict(ROW)) == turns("refcoco", dict(ROW))


BAD = [
    ({"bbox": [1, 2, 3]}, "four numbers"),
    ({"bbox": [1, 2, "3", 4]}, "number of pixels"),
    ({"bbox": [1, 2, 3, float("nan")]}, "number of pixels"),
    ({"bbox": [60, 2, 30, 4]}, "not inside an image of 64 x 100"),
    ({"bbox": [-1, 2, 30, 4]}, "number of pixels"),
    ({"bbox": [1, 2, 0, 4]}, "not inside"),
    ({"width": 0}, "not inside"),
    ({"height": True}, "number of pixels"),
    ({"image": None}, "no image"),
    ({"sents": ["a", "b"]}, "sents"),
]


@each(BAD)
def test_a_row_that_is_wrong_is_refused_with_its_place(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        turns("refcoco", ROW | change)

    assert error.value.where == "f:1"


def test_xtuner_s_file_is_read_as_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / "train.json"
    file.write_text(json.dumps([ROW | {"sents": str(number)} for number in range(8)], indent=4), encoding="utf-8")
    shares = [{"path": str(file), "format": name, "weight": 0.5} for name in ("refcoco", "inv_refcoco")]
    rows = list(mixing.find(Dataset(path=None, mixture=shares, max_length=8, packing=False)).read())

    assert [of.format for of, _ in rows].count("inv_refcoco") == 4 and len(rows) == 8
    assert formats.detect([ROW], "f") == "refcoco"
