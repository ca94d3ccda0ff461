"""No sample vanishes: what is not trained on as it is has a place, a reason and its tokens, and is counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.data.conftest import Settings, conversation
from tuner.data import outcomes
from tuner.data.prepare import describe, prepare
from tuner.data.prepared import Prepared
from tuner.data.text_encoder import TextEncoder
from tuner.errors import DataError

Write = Callable[..., Path]
LONG = " ".join(["one", "two", "three"] * 20)


def told(prepared: Prepared) -> list[tuple[str, str, str]]:
    """Return line, what and reason of each change."""
    return [(line["where"].rsplit(":")[-1], line["what"], line["reason"]) for line in prepared.changed()]


def test_each_sample_that_is_not_trained_on_whole_is_listed_with_its_reason(jsonl: Write, tokenizer: Any) -> None:
    rows = [
        conversation("one", "two"),
        conversation("one"),
        conversation("one", ""),
        conversation(LONG, "never seen"),
        conversation("one", LONG),
        {"messages": 3},
        {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two", "weight": 0}]},
    ]
    settings = Settings(str(jsonl(rows)), format="messages", max_length=32, packing=False, bad_rows=1)

    prepared = prepare(settings, TextEncoder(tokenizer), objective="sft")

    assert sorted(told(prepared)) == [
        ("2", "dropped", "there is no answer"),
        ("3", "dropped", "every answer is empty"),
        ("4", "dropped", "the answer begins beyond max_length = 32"),
        ("5", "truncated", "longer than max_length = 32"),
        ("6", "bad", "the row does not fit format 'messages': 'messages' is of type int, not a list; "
         "its columns are messages"),
        ("7", "dropped", "no token of it carries loss"),
    ]  # fmt: skip
    counts = prepared.counts
    assert (counts.kept, counts.dropped, counts.truncated, counts.bad) == (2, 4, 1, 1)
    assert sum(total.samples for total in prepared.totals if total.what != "copied") == 6
    (cut,) = [line for line in prepared.changed() if line["what"] == "truncated"]
    assert cut["tokens_after"] == 32
    assert cut["tokens_before"] - 32 == counts.truncated_tokens
    assert "\n  1 dropped: there is no answer\n" in describe(prepared)
    assert f"1 truncated: longer than max_length = 32 ({counts.truncated_tokens:,} tokens)" in describe(prepared)


def test_a_sample_that_packing_splits_is_counted_as_split_and_loses_no_token(jsonl: Write, tokenizer: Any) -> None:
    prepared = prepare(
        Settings(str(jsonl([conversation("one", LONG)])), max_length=32), TextEncoder(tokenizer), objective="sft"
    )

    (line,) = prepared.changed()
    assert (line["what"], line["tokens_before"]) == ("split", line["tokens_after"])
    assert (prepared.counts.split, prepared.counts.truncated) == (1, 0)
    assert "0 truncated, 1 split, 0 dropped" in describe(prepared)


def test_pairs_that_teach_nothing_are_told_apart(jsonl: Write, tokenizer: Any) -> None:
    pair = {"prompt": "one", "chosen": "two", "rejected": "three"}
    rows = [pair, {**pair, "rejected": "two"}, {**pair, "prompt": LONG}, {**pair, "chosen": LONG}]

    cut = prepare(Settings(str(jsonl(rows)), max_length=32), TextEncoder(tokenizer), objective="dpo")
    scored = prepare(Settings(str(jsonl(rows)), max_length=32), TextEncoder(tokenizer), objective="reward")

    assert told(cut) == [
        ("2", "dropped", "both answers are the same"),
        ("3", "dropped", "the answer begins beyond max_length = 32"),
        ("4", "truncated", "longer than max_length = 32"),
    ]
    too_long = "longer than max_length = 32, and a truncated answer cannot be scored"
    assert told(scored)[1:] == [("3", "dropped", too_long), ("4", "dropped", too_long)]


def test_the_list_is_bounded_and_the_counts_are_not(
    jsonl: Write, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcomes, "MAX_LISTED", 2)
    rows = [*(conversation(f"one {number}") for number in range(5)), conversation("one", "two")]

    prepared = prepare(Settings(str(jsonl(rows))), TextEncoder(tokenizer), objective="sft")

    assert [line for line, _, _ in told(prepared)] == ["1", "2"]
    assert [(total.what, total.samples) for total in prepared.totals] == [("dropped", 5)]


def test_data_that_leaves_nothing_says_why(jsonl: Write, tokenizer: Any) -> None:
    rows = [conversation("one")] * 2 + [conversation(LONG, "two")]

    says = r"none of the 3 rows .* max_length=24: 2 dropped: there is no answer;.*Raise dataset\.max_length"
    with pytest.raises(DataError, match=says):
        prepare(Settings(str(jsonl(rows)), max_length=24, packing=False), TextEncoder(tokenizer), objective="sft")


def test_rows_without_an_assistant_turn_are_told_so_and_not_as_too_long(jsonl: Write, tokenizer: Any) -> None:
    with pytest.raises(DataError) as caught:
        prepare(Settings(str(jsonl([conversation("one")] * 3))), TextEncoder(tokenizer), objective="sft")

    assert "none of the 3 rows has an assistant message" in str(caught.value)
    assert "End each conversation with an assistant turn." in str(caught.value)
    assert "max_length" not in str(caught.value)


def test_a_warning_tells_what_is_lost_and_is_silent_where_nothing_is(jsonl: Write, tokenizer: Any) -> None:
    whole = prepare(
        Settings(str(jsonl([conversation("one", LONG)])), max_length=32), TextEncoder(tokenizer), objective="sft"
    )
    lossy = prepare(
        Settings(str(jsonl([conversation("one"), conversation("one", "two")]))), TextEncoder(tokenizer), objective="sft"
    )

    assert outcomes.warning({"train": whole.totals}) is None
    assert outcomes.warning({"train": whole.totals, "validation": lossy.totals}) == (
        "some data is dropped or changed: validation: 1 dropped: there is no answer. data_report.jsonl lists it."
    )


def test_the_list_of_the_cache_is_the_list_of_the_first_time(jsonl: Write, tokenizer: Any) -> None:
    settings = Settings(str(jsonl([conversation("one"), conversation("one", "two")])))

    first, again = (
        prepare(settings, TextEncoder(tokenizer), objective="sft"),
        prepare(settings, TextEncoder(tokenizer), objective="sft"),
    )

    assert first.outcomes_file == again.outcomes_file
    assert list(first.changed()) == list(again.changed()) == [json.loads(first.outcomes_file.read_text())]


def test_rows_with_empty_answers_alone_are_not_told_as_too_long(jsonl: Write, tokenizer: Any) -> None:
    with pytest.raises(DataError) as caught:
        prepare(Settings(str(jsonl([conversation("one", "")] * 3))), TextEncoder(tokenizer), objective="sft")

    assert str(caught.value).endswith("to train on: 3 dropped: every answer is empty. Correct the rows.")
