from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.data.conftest import CHATML, Write, make_tokenizer
from tuner.data import sources
from tuner.data.inspection import bad_rows, histogram, view
from tuner.data.text_encoder import TextEncoder
from tuner.errors import DataError
from tuner.files import sha256
from tuner.recipes.schema import Dataset, MixtureEntry

GOOD = {"instruction": "Why is it so?", "output": "It is so because it is so."}
MISSING = {"instruction": "Why?"}


def dataset(path: Path | None, **settings: Any) -> Dataset:
    return Dataset(path=path and str(path), **{"max_length": 64, "packing": False, **settings})


def wrong(dataset: Dataset, tokenizer: Any) -> list[str]:
    return [str(error.where).rsplit("/")[-1] for error in bad_rows(dataset, TextEncoder(tokenizer), "sft")]


def of_words() -> PreTrainedTokenizerFast:
    """A tokenizer like SentencePiece's: a token holds the space before it, which the start of a text leaves out."""
    words = ["</s>", "▁user", "▁assistant", *(f"▁{word}" for text in GOOD.values() for word in text.split())]
    backend = Tokenizer(models.WordLevel({word: at for at, word in enumerate(dict.fromkeys(words))}))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **{"eos_token": "</s>"})
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }} {% if m['role'] == 'assistant' %}{% generation %}"
        "{{ m['content'] + '</s>' }}{% endgeneration %}{% else %}{{ m['content'] }} {% endif %}{% endfor %}"
    )
    return tokenizer


def test_the_pieces_of_a_sample_are_its_whole_text_with_every_space(jsonl: Write) -> None:
    (sample,) = view(dataset(jsonl([GOOD])), TextEncoder(of_words()), "sft", 1).samples

    before, answer = sample.parts["text"]
    assert before == ("user Why is it so? assistant", False)
    assert answer == (" It is so because it is so.</s>", True)


def test_a_file_is_hashed_once_for_its_rows_and_its_samples(jsonl: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[bytes | Path] = []
    monkeypatch.setattr(sources, "sha256", lambda data: hashed.append(data) or sha256(data))
    path = jsonl([GOOD])

    assert view(dataset(path), TextEncoder(make_tokenizer()), "sft", 1).samples
    assert [data for data in hashed if isinstance(data, Path)] == [path]


def test_no_sample_is_shown_where_none_is_asked_for(jsonl: Write) -> None:
    assert view(dataset(jsonl([GOOD])), TextEncoder(make_tokenizer()), "sft", 0).samples == []


@pytest.mark.parametrize(
    ("lengths", "bars"),
    [
        ([1], [(0, 1, 1)]),
        ([2, 3, 4, 5], [(2, 2, 1), (3, 4, 2), (5, 8, 1)]),
        ([8, 9, 64], [(5, 8, 1), (9, 16, 1), (17, 32, 0), (33, 64, 1)]),
    ],
)
def test_a_bar_holds_both_its_ends(lengths: list[int], bars: list[tuple[int, int, int]]) -> None:
    assert histogram(np.array(lengths)) == bars


def test_bad_rows_come_in_the_order_of_reading_and_once(jsonl: Write) -> None:
    first = jsonl([MISSING, GOOD, MISSING], "first.jsonl")
    second = jsonl([GOOD, MISSING], "second.jsonl")
    shares = (
        MixtureEntry(path=str(first), format="alpaca", weight=2.0),
        MixtureEntry(path=str(second), format="alpaca"),
    )

    found = wrong(dataset(None, mixture=shares), make_tokenizer())

    assert sorted(found) == ["first.jsonl:1", "first.jsonl:3", "second.jsonl:2"]


def test_rows_beyond_max_rows_are_not_looked_at(jsonl: Write) -> None:
    path = jsonl([GOOD, MISSING, MISSING])

    assert wrong(dataset(path, max_rows=2), make_tokenizer()) == ["rows.jsonl:2"]


@pytest.mark.parametrize(
    ("name", "content", "lines"),
    [
        ("a.jsonl", b'{"instruction": 1\n[]\n{"instruction": "a", "output": "b"}\n"\xff"\n{}\n', ["1", "2", "4", "5"]),
        ("a.json", b'[{"instruction": "a", "output": "b"},\n3,\n{"instruction": "a"}]', ["2", "3"]),
        ("a.json", b'[{"instruction": "a", "output": "b"},\n3,\n{"instruction": "a"', ["2", "3"]),
        ("a.csv", b"instruction,output\na,b\na\na,b\na,b,c\n", ["3", "5"]),
        ("a.csv", b'instruction,output\na\na,b\na,"b\n', ["2", "4"]),
        ("a.txt", b"\xff\ngood\n\xfe\n", ["1", "3"]),
    ],
)
def test_rows_that_cannot_be_read_hide_no_others(tmp_path: Path, name: str, content: bytes, lines: list[str]) -> None:
    (tmp_path / name).write_bytes(content)
    objective = "pretrain" if name.endswith(".txt") else "sft"

    found = [str(error.where) for error in bad_rows(dataset(tmp_path / name), TextEncoder(make_tokenizer()), objective)]

    assert found == [f"{tmp_path / name}:{line}" for line in lines]


@pytest.mark.parametrize(
    ("settings", "template", "says"), [({}, None, "chat template"), ({"format": "alpcaa"}, CHATML, "'alpcaa'")]
)
def test_an_unknown_format_and_a_missing_template_are_no_fault_of_the_rows(
    jsonl: Write, settings: dict[str, str], template: str | None, says: str
) -> None:
    with pytest.raises(DataError, match=says):
        wrong(dataset(jsonl([GOOD, MISSING]), **settings), make_tokenizer(template))
