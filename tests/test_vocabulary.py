"""How many tokens a folder's tokenizer can give, read from its files alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tuner import vocabulary


def folder(path: Path, vocab: Any, added: tuple[dict[str, Any], ...] = (), **files: Any) -> Path:
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": added}))
    for stem, content in files.items():
        (path / f"{stem}.json").write_text(json.dumps(content))
    return path


def last(place: Path, template: str | None = None) -> tuple[str, int] | None:
    found = vocabulary.read_vocabulary(place, template)
    assert found is not None
    return found.last


@pytest.mark.parametrize("vocab", [{"a": 0, "c": 2, "b": 1}, [["a", -1.0], ["b", -2.0], ["c", -3.0]]])
def test_words_count_whether_they_are_named_or_listed(vocab: Any, tmp_path: Path) -> None:
    assert last(folder(tmp_path, vocab)) == ("c", 2)


def test_tokens_that_were_added_count_wherever_they_are_written(tmp_path: Path) -> None:
    word = {"id": 5, "content": "<tool>", "special": False}
    later = {"9": {"content": "<later>", "special": False}}

    assert last(folder(tmp_path, {"a": 0}, (word,))) == ("<tool>", 5)
    assert last(folder(tmp_path, {"a": 0}, added_tokens={"<old>": 7})) == ("<old>", 7)
    assert last(folder(tmp_path, {"a": 0}, tokenizer_config={"added_tokens_decoder": later})) == ("<later>", 9)


def test_a_named_token_that_the_vocabulary_lacks_counts_as_the_library_adds_it(tmp_path: Path) -> None:
    named = {"pad_token": "[PAD]", "eos_token": {"content": "</s>"}, "bos_token": "a"}

    assert last(folder(tmp_path, {"a": 0, "b": 1}, tokenizer_config=named)) == ("[PAD]", 3)


def test_a_special_token_counts_if_the_tokenizer_or_its_template_uses_it(tmp_path: Path) -> None:
    mark = {"id": 5, "content": "<mark>", "special": True}
    template = "<mark>{{ messages }}"

    assert last(folder(tmp_path, {"a": 0}, (mark,))) == ("a", 0)
    assert last(folder(tmp_path, {"a": 0}, (mark,)), template) == ("<mark>", 5)
    assert last(folder(tmp_path, {"a": 0}, (mark,), tokenizer_config={"pad_token": "<mark>"})) == ("<mark>", 5)
    assert last(folder(tmp_path, {"a": 0}, (mark,), tokenizer_config={"chat_template": "<mark>"})) == ("<mark>", 5)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": {"vocab": 3}}', '{"model": {"vocab": [1]}}'])
def test_a_file_that_is_no_tokenizer_says_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text)

    assert vocabulary.read_vocabulary(tmp_path) is None
