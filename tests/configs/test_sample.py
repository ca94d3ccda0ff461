"""The sample data set and the tiny tokenizer: held out honestly, marked exactly."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

ASSETS = Path(__file__).parents[2] / "tuner" / "configs" / "assets"
SAMPLE = ASSETS / "sample"
TINY = ASSETS / "tiny"
SPECIAL_TOKENS = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<|bos|>")
VOCAB_SIZE = 2048
ADDED = {"Be cheerful.": " Have a great day!", "Be polite.": " You are welcome."}
"""What a system turn adds to every answer."""
END_OF_TURN = "<|im_end|>"
CONVERSATION = [
    {"role": "system", "content": "Be polite."},
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "The sum 2 + 3 is 5."},
    {"role": "user", "content": "And 1 + 1?"},
    {"role": "assistant", "content": "The sum 1 + 1 is 2."},
]


@cache
def _rows(split: str) -> list[list[dict[str, str]]]:
    lines = (SAMPLE / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["messages"] for line in lines]


def _said(split: str, role: str) -> list[str]:
    return [message["content"] for row in _rows(split) for message in row if message["role"] == role]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(TINY)


def test_the_files_are_small() -> None:
    assert sum(path.stat().st_size for path in SAMPLE.iterdir()) <= 1_500_000
    assert (TINY / "tokenizer.json").stat().st_size <= 150_000
    assert sorted(path.name for path in SAMPLE.iterdir()) == ["train.jsonl", "validation.jsonl"]


def test_no_preference_is_held_out_whose_question_is_asked_in_training() -> None:
    train, validation = (_preferences(split) for split in ("train", "validation"))

    assert not {row["prompt"] for row in train} & {row["prompt"] for row in validation}
    assert len(train) >= 800 and len(validation) == 100


def test_a_right_answer_is_preferred_to_a_wrong_or_rude_one() -> None:
    rows = _preferences("train") + _preferences("validation")
    often = [number for number in Counter(row["rejected"] for row in rows).values() if number >= 100]

    assert all(row["chosen"] != row["rejected"] for row in rows)
    assert len(often) == 6 and 0.6 < sum(often) / len(rows) < 0.73  # what is rude answers any question


def _preferences(split: str) -> list[dict[str, str]]:
    text = (ASSETS / "sample_preferences" / f"{split}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_no_validation_prompt_is_asked_in_training() -> None:
    assert set(_said("validation", "user")) & set(_said("train", "user")) == set()


@pytest.mark.parametrize("split", ["train", "validation"])
def test_every_row_is_a_conversation_that_ends_with_an_answer(split: str) -> None:
    for row in _rows(split):
        roles = [message["role"] for message in row]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2)
        assert turns
        assert all(message["content"] == message["content"].strip() != "" for message in row)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_some_rows_have_a_system_turn_and_some_several_turns(split: str) -> None:
    kinds = Counter((row[0]["role"], sum(message["role"] == "user" for message in row) > 1) for row in _rows(split))

    assert min(kinds[role, several] for role in ("system", "user") for several in (False, True)) >= 5


def test_the_first_rows_are_of_different_topics() -> None:
    assert len({row[-1]["content"].split()[-1] for row in _rows("validation")[:8]}) > 4


def test_a_question_has_one_right_answer() -> None:
    answers: dict[str, set[str]] = {}
    for row in [*_rows("train"), *_rows("validation")]:
        said = [message["content"] for message in row if message["role"] != "system"]
        system = row[0]["content"] if row[0]["role"] == "system" else ""
        for i in range(0, len(said), 2):
            answer = said[i + 1].removesuffix(ADDED.get(system, ""))
            answers.setdefault(said[i] if i == 0 else f"{said[i - 2]}\n{said[i]}", set()).add(answer)

    assert {question: found for question, found in answers.items() if len(found) > 1} == {}


def test_every_text_comes_back_from_its_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    texts = {
        text
        for split in ("train", "validation")
        for role in ("system", "user", "assistant")
        for text in _said(split, role)
    }
    texts |= {"naïve café, Πειραιάς, 東京, 🙂", "\t two  spaces \n", "".join(map(chr, range(32, 127)))}

    for text in texts:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_tokenizer_has_the_special_tokens_and_no_more_words_than_the_model(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    config = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    ids = [tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS]

    assert ids == [0, 1, 2, 3]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 2, 3)
    assert [config[f"{name}_token_id"] for name in ("pad", "eos", "bos")] == [0, 2, 3]
    assert len(tokenizer) <= config["vocab_size"] <= VOCAB_SIZE
    assert not any(token in SPECIAL_TOKENS for token in tokenizer.tokenize("".join(_said("validation", "user")[:20])))


def _marked(tokenizer: PreTrainedTokenizerBase, conversation: list[dict[str, str]]) -> list[str]:
    """Return the runs of text that the template's mask marks."""
    encoded: Any = tokenizer.apply_chat_template(conversation, return_dict=True, return_assistant_tokens_mask=True)
    runs, mask = [], [0, *encoded["assistant_masks"]]
    for (before, now), token in zip(pairwise(mask), encoded["input_ids"], strict=True):
        if now and not before:
            runs.append([])
        if now:
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]


def test_the_mask_holds_exactly_the_answers_and_their_end(tokenizer: PreTrainedTokenizerBase) -> None:
    for row in [CONVERSATION, *_rows("validation")]:
        answers = [message["content"] + END_OF_TURN for message in row if message["role"] == "assistant"]
        assert _marked(tokenizer, row) == answers


def test_the_template_writes_chatml(tokenizer: PreTrainedTokenizerBase) -> None:
    turns = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in CONVERSATION)

    assert tokenizer.apply_chat_template(CONVERSATION, tokenize=False) == turns


def test_a_prompt_for_generation_is_the_beginning_of_the_training_text(tokenizer: PreTrainedTokenizerBase) -> None:
    prompt = tokenizer.apply_chat_template(CONVERSATION[:-1], add_generation_prompt=True)["input_ids"]
    whole = tokenizer.apply_chat_template(CONVERSATION)["input_ids"]

    assert whole[: len(prompt)] == prompt
    assert tokenizer.decode(whole[len(prompt) :]) == "The sum 1 + 1 is 2.<|im_end|>\n"
