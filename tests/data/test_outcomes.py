"""No sample vanishes: what is not trained on as it is has a place, a reason and its tokens, and is counted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.data.conftest import Prepare, conversation
from tuner.data import outcomes
from tuner.data.prepare import describe
from tuner.data.prepared import Prepared
from tuner.errors import DataError

LONG = " ".join(["one", "two", "three"] * 20)


def told(prepared: Prepared) -> list[tuple[str, str, str]]:
    """Return line, what and reason of each change."""
    return [(line["where"].rsplit(":")[-1], line["what"], line["reason"]) for line in prepared.changed()]


def test_each_sample_that_is_not_trained_on_whole_is_listed_with_its_reason(prepared: Prepare) -> None:
    rows = [
        conversation("one", "two"),
        conversation("one"),
        conversation("one", ""),
        conversation(LONG, "never seen"),
        conversation("one", LONG),
        {"messages": 3},
        {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two", "weight": 0}]},
    ]

    made = prepared(rows, format="messages", max_length=32, packing=False, bad_rows=1)

    assert sorted(told(made)) == [
        ("2", "dropped", "there is no answer"),
        ("3", "dropped", "every answer is empty"),
        ("4", "dropped", "the answer begins beyond max_length = 32"),
        ("5", "truncated", "longer than max_length = 32"),
        ("6", "bad", "the row does not fit format 'messages': 'messages' is of type int, not a list; "
         "its columns are messages"),
        ("7", "dropped", "no token of it carries loss"),
    ]  # fmt: skip
    counts = made.counts
    assert (counts.kept, counts.dropped, counts.truncated, counts.bad) == (2, 4, 1, 1)
    assert sum(total.samples for total in made.data.changes if total.what != "copied") == 6
    (cut,) = [line for line in made.changed() if line["what"] == "truncated"]
    assert cut["tokens_after"] == 32
    assert cut["tokens_before"] - 32 == counts.truncated_tokens
    assert "\n  1 dropped: there is no answer\n" in describe(made)
    assert f"1 truncated: longer than max_length = 32 ({counts.truncated_tokens:,} tokens)" in describe(made)


def test_a_sample_that_packing_splits_is_counted_as_split_and_loses_no_token(prepared: Prepare) -> None:
    made = prepared([conversation("one", LONG)], max_length=32)

    (line,) = made.changed()
    assert (line["what"], line["tokens_before"]) == ("split", line["tokens_after"])
    assert (made.counts.split, made.counts.truncated) == (1, 0)
    assert "0 truncated, 1 split, 0 dropped" in describe(made)


def test_pairs_that_teach_nothing_are_told_apart(prepared: Prepare) -> None:
    pair = {"prompt": "one", "chosen": "two", "rejected": "three"}
    rows = [pair, {**pair, "rejected": "two"}, {**pair, "prompt": LONG}, {**pair, "chosen": LONG}]
    alike = {"prompt": "one", "chosen": f"{LONG} one", "rejected": f"{LONG} two"}

    cut = prepared([*rows, alike], "dpo", max_length=32)
    scored = prepared(rows, "reward", max_length=32)

    assert told(cut) == [
        ("2", "dropped", "both answers are the same"),
        ("3", "dropped", "the answer begins beyond max_length = 32"),
        ("4", "truncated", "longer than max_length = 32"),
        ("5", "dropped", "both answers are the same within max_length = 32"),
    ]
    assert (cut.counts.read, cut.counts.kept, cut.counts.dropped, len(cut.dataset)) == (5, 2, 3, 2)
    too_long = "longer than max_length = 32, and a truncated answer cannot be scored"
    assert told(scored)[1:] == [("3", "dropped", too_long), ("4", "dropped", too_long)]


def test_the_list_is_bounded_and_the_counts_are_not(prepared: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes, "MAX_LISTED", 2)
    rows = [*(conversation(f"one {number}") for number in range(5)), conversation("one", "two")]

    made = prepared(rows)

    assert [line for line, _, _ in told(made)] == ["1", "2"]
    assert [(total.what, total.samples) for total in made.data.changes] == [("dropped", 5)]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [conversation("one")] * 2 + [conversation(LONG, "two")],
            r"none of the 3 rows .* max_length=24: 2 dropped: there is no answer;.*Raise dataset\.max_length",
        ),
        ([conversation("one")] * 3, r"^(?!.*max_length).*none of the 3 rows has an assistant message.*End each conv"),
        ([conversation("one", "")] * 3, r"^(?!.*max_length).*rows\.jsonl.*every answer is empty"),
    ],
)
def test_data_that_leaves_nothing_says_why(prepared: Prepare, rows: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(DataError, match=said):
        prepared(rows, max_length=24, packing=False)


def test_a_warning_tells_what_is_lost_and_is_silent_where_nothing_is(prepared: Prepare) -> None:
    whole = prepared([conversation("one", LONG)], max_length=32)
    lossy = prepared([conversation("one"), conversation("one", "two")])

    assert outcomes.warning({"train": whole.data.changes}) is None
    assert outcomes.warning({"train": whole.data.changes, "validation": lossy.data.changes}) == (
        "some data is dropped or changed: validation: 1 dropped: there is no answer. data_report.jsonl lists it."
    )


def test_the_list_of_the_cache_is_the_list_of_the_first_time(prepared: Prepare) -> None:
    first, again = (prepared([conversation("one"), conversation("one", "two")]) for _ in range(2))

    assert first.outcomes_file == again.outcomes_file
    assert list(first.changed()) == list(again.changed()) == [json.loads(first.outcomes_file.read_text())]
