"""Tokens of two tokenizers are told apart by the text that they stand for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.data.conftest import make_tokenizer
from tuner.data.token_bytes import MOST_TOKENS, Span, same_tokens, spans, special_tokens, token_bytes

PIECES: dict[str, Any] = {
    "model": {
        "type": "BPE",
        "byte_fallback": True,
        "vocab": {"<s>": 0, "<0x0A>": 1, "<0xC3>": 2, "\u2581the": 3, "é": 4, "a": 5, "<0x61>": 6, "<think>": 7},
    },
    "pre_tokenizer": None,
    "decoder": {"type": "Sequence", "decoders": [{"type": "Replace"}, {"type": "ByteFallback"}]},
    "added_tokens": [{"id": 0, "content": "<s>", "special": True}, {"id": 7, "content": "<think>", "special": False}],
}


@pytest.mark.parametrize("text", ["One dog.", "  Zwei\n\tHütten", "\N{GRINNING FACE} 漢字\x00"])
def test_the_bytes_of_a_byte_level_tokenizers_tokens_are_those_of_the_text(text: str) -> None:
    tokenizer = make_tokenizer()
    known = token_bytes(json.loads(tokenizer.backend_tokenizer.to_str()))

    ids = tokenizer(text, add_special_tokens=False)["input_ids"]

    assert known is not None and b"".join(known[token] for token in ids) == text.encode()
    assert tokenizer.eos_token_id not in known


def test_pieces_have_spaces_and_single_bytes_and_special_tokens_are_no_text() -> None:
    assert token_bytes(PIECES) == {
        **{1: b"\n", 2: b"\xc3", 3: b" the", 4: "é".encode(), 5: b"a", 6: b"a"},
        7: b"<think>",
    }
    assert special_tokens(PIECES) == {"<s>": 0}


def test_tokens_that_stand_for_no_known_text_are_not_guessed() -> None:
    assert token_bytes({"model": {"type": "WordPiece", "vocab": {"a": 0, "##b": 1}}, "decoder": None}) is None


def test_a_span_ends_where_tokens_of_both_end() -> None:
    found = spans([b"he", b"llo", b" wor", b"ld"], [b"hello", b" ", b"w", b"orld"])

    assert found == [Span((0, 2), (0, 1)), Span((2, 4), (1, 4))]


def test_spans_end_where_the_texts_differ() -> None:
    assert spans([b"a", b"bc"], [b"a", b"b", b"d"]) == [Span((0, 1), (0, 1))]
    assert spans([b"a"], [b"b"]) == spans([], [b"b"]) == []


def test_a_span_in_which_the_tokenizers_have_lost_each_other_is_left_out() -> None:
    letters = [b"ab"] * (MOST_TOKENS + 1)
    other = [b"a", *[b"ba"] * MOST_TOKENS, b"b"]

    assert spans([*letters, b"c"], [*other, b"c"]) == [
        Span((len(letters), len(letters) + 1), (len(other), len(other) + 1))
    ]


def test_the_same_tokens_are_those_with_the_same_bytes() -> None:
    assert same_tokens({0: b"a", 1: b"b", 2: b"a"}, {5: b"c", 6: b"a"}) == [(2, 6)]
