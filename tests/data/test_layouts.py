"""Judged answers become rows that hold the template's own text, with loss on the judged turns alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.data.conftest import Prepare, Write
from tests.refused import refused
from tuner.data.prepare import describe
from tuner.data.sample import IGNORED
from tuner.errors import DataError

SKY = {"prompt": "Why?", "chosen": "Because the air scatters blue light.", "rejected": "One two three four."}
LONG = " ".join(["seven"] * 60)


def user(said: str) -> dict[str, str]:
    return {"role": "user", "content": said}


def assistant(said: str) -> dict[str, str]:
    return {"role": "assistant", "content": said}


def trained(tokenizer: Any, row: dict[str, Any], side: str) -> str:
    """Return a side's text that carries loss."""
    pairs = zip(row[f"{side}_ids"], row[f"{side}_labels"], strict=True)
    assert all(label in (token, IGNORED) for token, label in pairs)
    return str(tokenizer.decode([label for label in row[f"{side}_labels"] if label != IGNORED]))


@pytest.mark.parametrize("objective", ["dpo", "orpo", "reward"])
def test_both_sides_are_what_the_chat_template_renders(prepared: Prepare, tokenizer: Any, objective: str) -> None:
    [row] = prepared([SKY], objective, max_length=128).dataset

    for side in ("chosen", "rejected"):
        chat = [user(SKY["prompt"]), assistant(SKY[side])]
        assert row[f"{side}_ids"] == tokenizer.apply_chat_template(chat)["input_ids"]
        assert trained(tokenizer, row, side) == f"{SKY[side]}<|im_end|>"


def test_the_assistants_turns_of_the_prompt_carry_no_loss(prepared: Prepare, tokenizer: Any) -> None:
    begin = [user("one?"), assistant("two"), user("three?")]
    sides = {"chosen": [*begin, assistant("four")], "rejected": [*begin, assistant("nine")]}

    [row] = prepared([sides], "dpo", max_length=128).dataset

    assert trained(tokenizer, row, "chosen") == "four<|im_end|>"
    assert row["chosen_ids"] == tokenizer.apply_chat_template(sides["chosen"])["input_ids"]


def test_a_users_turn_within_a_judged_answer_carries_no_loss(prepared: Prepare, tokenizer: Any) -> None:
    more = [assistant("two"), user("and?"), assistant("three")]
    row = {"prompt": [user("one?")], "chosen": more, "rejected": [assistant("nine")]}

    [made] = prepared([row], "dpo", max_length=128).dataset

    assert trained(tokenizer, made, "chosen") == "two<|im_end|>three<|im_end|>"


def test_a_pair_is_one_good_and_one_bad_answer_to_kto(prepared: Prepare, tokenizer: Any) -> None:
    made = prepared([SKY], "kto", max_length=128)

    told = [(trained(tokenizer, row, "answer"), row["is_good"]) for row in made.dataset]
    assert told == [(f"{SKY['chosen']}<|im_end|>", True), (f"{SKY['rejected']}<|im_end|>", False)]
    assert (made.counts.read, made.counts.kept) == (1, 2)


def test_unpaired_feedback_keeps_its_label(prepared: Prepare, tokenizer: Any) -> None:
    rows = [{"prompt": "one?", "completion": "two", "label": label} for label in (True, False)]

    made = prepared(rows, "kto", max_length=128)

    assert [row["is_good"] for row in made.dataset] == [True, False]
    assert trained(tokenizer, made.dataset[0], "answer") == "two<|im_end|>"


def test_a_long_answer_is_cut_at_its_end_and_counted(prepared: Prepare) -> None:
    whole = prepared([{**SKY, "chosen": LONG}], "dpo", max_length=512)
    cut = prepared([{**SKY, "chosen": LONG}], "dpo", max_length=64)

    assert cut.dataset[0]["chosen_ids"] == whole.dataset[0]["chosen_ids"][:64]
    assert cut.dataset[0]["rejected_ids"] == whole.dataset[0]["rejected_ids"]
    assert (whole.counts.truncated, cut.counts.truncated) == (0, 1)
    assert cut.counts.truncated_tokens == whole.counts.tokens - cut.counts.tokens
    labels = [*cut.dataset[0]["chosen_labels"], *cut.dataset[0]["rejected_labels"]]
    assert cut.counts.trained_tokens == sum(label != IGNORED for label in labels)


def test_describe_counts_pairs_and_says_that_packing_does_not_apply(prepared: Prepare) -> None:
    made = prepared([SKY, {**SKY, "prompt": "How?"}], "dpo", max_length=64)

    counts = made.counts
    assert not counts.packing
    assert describe(made) == (
        "train: 2 rows of format 'preference' (detected) -> "
        "2 pairs, each side of at most 64 tokens (packing does not apply), "
        f"{counts.trained_tokens} of {counts.tokens} tokens trained, 0 truncated, 0 dropped"
    )


def test_data_of_another_kind_is_one_mistake_however_many_bad_rows_are_allowed(prepared: Prepare, jsonl: Write) -> None:
    path = jsonl([{"messages": [user("one?"), assistant("two")]}] * 3)

    with refused(DataError, f"{path}:1") as caught:
        prepared(path, "dpo", bad_rows=2)

    assert caught.value.what.startswith("format 'messages' holds conversations, and objective dpo needs")
