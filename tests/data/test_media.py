"""What means a picture, a film or a sound is refused; what only speaks of one is text."""

from __future__ import annotations

from typing import Any

import pytest

from tests.refused import refused
from tuner.data import formats
from tuner.errors import DataError

ALPACA = {"instruction": "What is it?", "output": "A dog."}


def chat(said: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": said}, {"role": "assistant", "content": "A dog."}]}


@pytest.mark.parametrize(
    "more",
    [{"image_path": "dog.png"}, {"videos": [None, "dog.mp4"]}, {"audio": {"array": [0.1], "sampling_rate": 16000}}],
)
def test_a_column_of_media_with_content_is_refused_with_the_place(more: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=rf"the column '{next(iter(more))}' holds") as caught:
        formats.read_sample("alpaca", {**ALPACA, **more}, "rows.jsonl:7")

    assert (caught.value.where, caught.value.of_row) == ("rows.jsonl:7", True)


@pytest.mark.parametrize(
    ("column", "value"),
    [("imags", ["dogs/a.PNG"]), ("img", "dog.jpg"), ("pictures", [{"bytes": b"x", "path": None}]), ("photo", b"x")],
)
def test_images_below_another_name_are_refused_with_the_setting_that_reads_them(column: str, value: object) -> None:
    with refused(DataError, "rows.jsonl:7", column, "dataset.columns.images"):
        formats.read_sample("alpaca", {**ALPACA, column: value}, "rows.jsonl:7")


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [("images", ["dog.png"], "into a column 'images'"), ("image", b"x", "'images'"), ("videos", ["a.mp4"], "video")],
)
def test_media_beside_the_text_of_a_turn_are_refused(key: str, value: object, fix: str) -> None:
    row = chat("What is it?")
    row["messages"][0][key] = value

    with pytest.raises(DataError, match=f"turn 1 has the key '{key}'") as caught:
        formats.read_sample("messages", row, "rows.jsonl:7")

    assert fix in caught.value.fix
    row["messages"][0][key] = None  # Parquet gives every turn the keys of all turns
    assert formats.read_sample("messages", row, "rows.jsonl:7")


@pytest.mark.parametrize(
    "more",
    [{"images": []}, {"image": None}, {"videos": [None]}, {"audio": ""}, {"imagery": "x"}, {"picture": "A dog."}],
)
def test_a_column_of_media_without_content_says_nothing(more: dict[str, Any]) -> None:
    assert formats.read_sample("alpaca", {**ALPACA, **more}, "rows.jsonl:7")


@pytest.mark.parametrize(
    "said", ["<image>\nWhat is it?", "<image>What is it?", "What is it?\n<image>", "Look.\n<video>\nWhat happens?"]
)
def test_a_placeholder_in_a_question_is_refused(said: str) -> None:
    kind = "video" if "video" in said else "image"

    with pytest.raises(DataError, match=f"turn 1 has the placeholder '<{kind}>'"):
        formats.read_sample("messages", chat(said), "rows.jsonl:7")
    with pytest.raises(DataError, match="placeholder"):
        formats.read_sample(
            "sharegpt", {"conversations": [{"from": "human", "value": said}, {"from": "gpt", "value": "a"}]}, ""
        )
    with pytest.raises(DataError, match="placeholder"):
        formats.read_sample("preference", {"prompt": said, "chosen": "a", "rejected": "b"}, "rows.jsonl:7")


@pytest.mark.parametrize(
    "said",
    [
        "How is the <video> element closed?",
        "Explain `<image>`",
        "Mend this:\n<video>\n<source src=a.mp4>\n</video>",
        "What is an image?",
    ],
)
def test_text_that_speaks_of_media_is_text(said: str) -> None:
    assert formats.read_sample("messages", chat(said), "rows.jsonl:7")


def test_a_placeholder_in_a_plain_text_is_a_word() -> None:
    assert formats.read_sample("text", {"text": "<image>\nA caption."}, "rows.jsonl:7") == "<image>\nA caption."


def test_a_column_that_the_user_names_as_text_is_text() -> None:
    row = {"image": "A dog on a lawn.", "output": "A dog."}

    assert formats.read_sample("alpaca", row, "rows.jsonl:7", columns={"instruction": "image"})
