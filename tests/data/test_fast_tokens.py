"""fastokens encodes as tokenizers does, is checked while it does, and is left alone where that cannot be."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import pytest
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers, processors

from tests.data.conftest import Prepare, conversation, make_tokenizer
from tuner.data import encoding, fast_tokens, processes
from tuner.data.fast_tokens import EVERY, MAX_BYTES, Differs, FastTokens
from tuner.data.prepare import trusts_fastokens
from tuner.data.text_encoder import TextEncoder

# Of Llama 3; Qwen's differs in how many digits are one word.
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
WORDS += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
LETTERS = [
    *map(chr, range(1, 0x250)),
    *map(chr, range(0x370, 0x2100, 5)),
    *map(chr, range(0x3000, 0x9FFF, 97)),
    *["😀", "👩‍👩‍👧", "e\u0301", "ſ", "İ", "\u00a0", "\ufeff", "\u200d", "\x00"] * 20,
    *[" ", "  ", "    ", "\n", "\r\n", "\n\n\n", "\t", "'s", "'LL", "123", "4567", "the", " blue", "sky"] * 40,
    *["<s>", "<|im_start|>", "<|im_end|>", "<think>", "<mask>"] * 40,
]


BATCH_ROWS = 64


@pytest.fixture(autouse=True)
def few_rows_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start fastokens and other processes after one small batch of rows, so that the tests need fewer of them."""
    monkeypatch.setattr(processes, "ALONE", 1)
    monkeypatch.setattr(encoding, "BATCH_ROWS", BATCH_ROWS)


def plain() -> Any:
    return make_tokenizer()


def like_qwen() -> Any:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, by_bytes])
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def like_gpt2(add_prefix_space: bool = True) -> Any:
    tokenizer = make_tokenizer()
    by_bytes = processors.ByteLevel(trim_offsets=True, add_prefix_space=add_prefix_space)
    template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.backend_tokenizer.post_processor = processors.Sequence([by_bytes, template])
    return tokenizer


def with_added_tokens() -> Any:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("<mask>")])
    return tokenizer


def exact_of(tokenizer: Any, *, asked: list[str] | None = None) -> Callable[[list[str]], list[Any]]:
    def exact(texts: list[str]) -> list[Any]:
        asked.extend(texts) if asked is not None else None
        found = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
        return list(zip(found["input_ids"], found["offset_mapping"], strict=True))

    return exact


def as_lists(found: Sequence[Any]) -> list[tuple[list[int], list[tuple[int, ...]]]]:
    return [([int(number) for number in ids], [tuple(map(int, place)) for place in offsets]) for ids, offsets in found]


@pytest.mark.parametrize(
    "make", [plain, like_qwen, like_gpt2, lambda: like_gpt2(add_prefix_space=False), with_added_tokens]
)
def test_ids_and_offsets_are_those_of_tokenizers(make: Callable[[], Any]) -> None:
    tokenizer, asked = make(), list[str]()
    draw = random.Random(0)  # noqa: S311 -- data for a test
    texts = ["".join(draw.choices(LETTERS, k=draw.randint(1, 120))) for _ in range(300)]
    fast = FastTokens.of(tokenizer)
    assert fast

    fast.with_offsets(list(dict.fromkeys(LETTERS)), exact_of(tokenizer))  # so that no character is new
    found = fast.with_offsets(texts, exact_of(tokenizer, asked=asked))

    assert as_lists(found) == as_lists(exact_of(tokenizer)(texts))
    assert len(asked) < 0.7 * len(texts)  # of the tokenizer like Qwen's, texts that are not in its Unicode form too


def test_special_tokens_are_added_to_texts_as_the_tokenizer_adds_them() -> None:
    tokenizer = plain()
    fast = FastTokens.of(tokenizer)
    assert fast
    texts = [f"One two three, number {number}." for number in range(2 * EVERY)]

    found = fast.ids(texts, lambda some: tokenizer(some)["input_ids"])

    assert found == tokenizer(texts)["input_ids"]
    assert found[1][0] == tokenizer.bos_token_id


def test_a_text_with_a_character_that_was_not_compared_is_encoded_by_both() -> None:
    tokenizer, asked = plain(), list[str]()
    fast = FastTokens.of(tokenizer)
    assert fast
    texts = ["first", "second", "é", "é again", "\u180e", "é and \u180e"]

    for some in (texts, texts):
        fast.with_offsets(some, exact_of(tokenizer, asked=asked))

    assert asked == ["first", "é", "é again", "\u180e", "é and \u180e", "first"]


def test_long_texts_are_left_to_tokenizers() -> None:
    tokenizer, asked = plain(), list[str]()
    fast = FastTokens.of(tokenizer)
    assert fast
    texts = ["short", "short too", "x" * (MAX_BYTES + 1)]

    fast.with_offsets(texts, exact_of(tokenizer, asked=asked))

    assert asked == [texts[0], texts[2]]  # the first one is checked


def test_other_tokens_for_the_same_text_are_found_out() -> None:
    tokenizer = plain()
    fast = FastTokens.of(tokenizer)
    assert fast
    by_bytes = {text: [numbers[0] for numbers in tokenizer(list(text), add_special_tokens=False)["input_ids"]]
                for text in ("Why is the sky blue?",)}  # fmt: skip

    with pytest.raises(Differs):
        fast.with_offsets(list(by_bytes), lambda texts: [(by_bytes[text], []) for text in texts])


@pytest.mark.parametrize("num_proc", [1, 2])
@pytest.mark.parametrize("objective", ["sft", "pretrain"])
def test_the_rows_are_the_same_with_and_without_it(
    prepared: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_proc: int, objective: str
) -> None:
    encoded = spied(monkeypatch)

    rows = {}
    for backend in ("auto", "tokenizers"):
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / backend)
        made = prepared(many_rows(objective), objective, num_proc=num_proc, tokenizer_backend=backend)
        rows[backend] = (made.sha256, made.counts)

    assert rows["auto"] == rows["tokenizers"]
    assert bool(encoded) == (num_proc == 1)  # else they are encoded in other processes


@pytest.mark.parametrize("num_proc", [1, 2])
def test_rows_are_made_anew_by_tokenizers_where_it_gives_other_tokens(
    prepared: Prepare, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str], num_proc: int
) -> None:
    expected = prepared(many_rows(), num_proc=num_proc, tokenizer_backend="tokenizers")

    monkeypatch.setattr(FastTokens, "_encode", letter_by_letter(tokenizer))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "other")
    made = prepared(many_rows(), num_proc=num_proc)

    assert made.sha256 == expected.sha256
    assert any("fastokens gives other tokens than tokenizers" in line for line in logged)


def test_rows_that_were_encoded_before_a_difference_was_found_are_made_anew(
    prepared: Prepare, tokenizer: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, encoded = prepared(many_rows()), spied(monkeypatch)
    assert trusts_fastokens(TextEncoder(tokenizer))

    with monkeypatch.context() as wrong:
        wrong.setattr(FastTokens, "_encode", letter_by_letter(tokenizer))
        prepared(many_rows(last="other"))
    again = prepared(many_rows())

    assert not trusts_fastokens(TextEncoder(tokenizer))
    assert again.sha256 == first.sha256 and encoded == []
    assert len(list((cache / "tuner").glob("*/counts.json"))) == 3


def test_a_process_that_has_used_it_prepares_other_rows_in_several_processes(prepared: Prepare) -> None:
    first = prepared(many_rows())
    second = prepared(many_rows(last="other"), num_proc=2)

    assert first.counts.kept == second.counts.kept > 0


def test_it_is_not_loaded_for_few_rows(prepared: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FastTokens, "of", lambda tokenizer: pytest.fail("it was loaded"))

    prepared(many_rows(count=processes.ALONE * BATCH_ROWS))


def test_it_takes_no_tokenizer_that_it_cannot_be_held_to(monkeypatch: pytest.MonkeyPatch) -> None:
    by_words, with_spaces, literal = plain(), plain(), plain()
    by_words.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    with_spaces.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    literal.split_special_tokens = True

    assert [FastTokens.of(tokenizer) for tokenizer in (by_words, with_spaces, literal)] == [None, None, None]
    assert FastTokens.of(plain())
    for place in ("lstrip", "rstrip", "single_word"):
        greedy = plain()
        greedy.add_tokens([AddedToken("<mask>", **{place: True})])
        assert FastTokens.of(greedy) is None
    monkeypatch.setattr(fast_tokens.libraries, "is_installed", lambda name: False)
    assert FastTokens.of(plain()) is None


def test_a_fastokens_that_does_not_load_here_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)  # its import raises ImportError
    monkeypatch.setattr(fast_tokens.libraries, "is_installed", lambda name: True)

    assert FastTokens.of(plain()) is None


def letter_by_letter(tokenizer: Any) -> Callable[..., list[int]]:
    """Return an `_encode` that gives other tokens for the same bytes."""

    @cache
    def ids_of(letter: str) -> list[int]:
        found: list[int] = tokenizer(letter, add_special_tokens=False)["input_ids"]
        return found

    def encode(self: FastTokens, text: str, data: bytes, *, add_special_tokens: bool) -> list[int]:
        return [number for letter in text for number in ids_of(letter)]

    return encode


def many_rows(objective: str = "sft", *, count: int = 2 * BATCH_ROWS + 50, last: str = "last") -> list[Any]:
    questions = [f"Why is the sky blue {number} times? é{number}" for number in range(count)]
    if objective == "pretrain":
        return [{"text": text} for text in questions]
    return [conversation(text, f"Because {text[::-1]}", "<|im_end|>" * (not number % 9) + last, "No.")
            for number, text in enumerate(questions)]  # fmt: skip


def spied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    encoded, encode = list[int](), FastTokens._encode

    def noted(self: FastTokens, text: str, data: bytes, *, add_special_tokens: bool) -> list[int] | None:
        encoded.append(len(data))
        return encode(self, text, data, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(FastTokens, "_encode", noted)
    return encoded
