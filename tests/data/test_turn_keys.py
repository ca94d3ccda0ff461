"""What a turn says about its own training is done or refused, and a key that nothing is made of is named."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.data.conftest import WITH_TOOLS, Prepare
from tuner.data import formats
from tuner.data.outcomes import unread_warning
from tuner.data.prepare import describe
from tuner.data.sample import Chat, Feedback, Pair
from tuner.errors import DataError

USER = {"role": "user", "content": "one"}
FIRST = {"role": "assistant", "content": "two"}
MORE = {"role": "user", "content": "three"}
LAST = {"role": "assistant", "content": "four"}

LEAVES_OUT: list[dict[str, Any]] = [
    {"train": False},
    {"training": False},
    {"trained": False},
    {"trainable": False},
    {"loss": False},
    {"loss": 0},
    {"loss_scale": 0.0},
    {"weight": 0},
    {"weight": 0.0},
    {"loss_weight": 0.0},
    {"loss_mask": 0},
    {"step_loss_mask": 0},
    {"masked": True},
    {"mask": True},
    {"train": False, "weight": 0, "masked": True},
]
TRAINS: list[dict[str, Any]] = [
    {"train": True},
    {"loss": 1},
    {"weight": 1.0},
    {"masked": False},
    {"mask": False},
    {"train": None, "weight": None},
    {"train_detail": []},
]
REFUSED: list[dict[str, Any]] = [
    {"loss_weight": 1.1},
    {"loss_scale": 2},
    {"loss": -1},
    {"weight": float("nan")},
    {"train": "false"},
    {"train": []},
    {"mask": 1},
    {"mask": 0},
    {"masked": 0.5},
    {"train": True, "weight": 0},
    {"train": True, "masked": True},
    {"weight": 0.5, "loss": 0.4},
    {"loss_mask": 0.5, "train": True},
    {"spans": [[0, 4, 1]]},
    {"spans": [[2, 2, 1]]},
    {"spans": [[-1, 2, 1]]},
    {"spans": [[0, 1, 1], [0, 2, 0]]},
    {"spans": [[0, 2, 1.5]]},
    {"spans": [[0, 2, "1"]]},
    {"spans": [[0, 2]]},
    {"spans": [[0, True, 1]]},
    {"spans": [[0, 1.5, 1]]},
    {"spans": [[0, float("inf"), 1]]},
    {"spans": {"0": 2}},
    {"spans": [[0, 1, 1]], "train_detail": [{"begin_offset": 0, "end_offset": 1, "train": True}]},
    {"train_detail": [{"begin_offset": 0, "end_offset": 3, "train": False}]},
    {"train_detail": [{"begin_offset": 0, "end_offset": 1}]},
    {"train_detail": "all"},
]
WEIGHED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"weight": 0.5}, {"weight": 0.5}),
    ({"loss": 0.25, "train": 0.25}, {"weight": 0.25}),
    ({"loss_scale": 0.1}, {"weight": 0.1}),
    ({"weight": 1, "spans": [[1, 3, False]]}, {"spans": [(1, 3, 0)]}),
    ({"weight": 0, "spans": [[2, 3, 1], [0, 1, 0.5]]}, {"weight": 0, "spans": [(0, 1, 0.5), (2, 3, 1)]}),
    ({"spans": [[0.0, 1.0, 0.5]]}, {"spans": [(0, 1, 0.5)]}),
    ({"train": False, "train_detail": [{"begin_offset": 0, "end_offset": 1, "train": True}]}, {"weight": 0}),
    # Axolotl's: the end belongs to a span, and what no span holds is not trained.
    (
        {"train_detail": [{"begin_offset": 1, "end_offset": 1, "train": True}]},
        {"spans": [(0, 1, 0), (1, 2, 1), (2, 3, 0)]},
    ),
    ({"training_detail": [{"begin_offset": 0, "end_offset": 2, "train": False}]}, {"spans": [(0, 3, 0)]}),
]


def messages(keys: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [USER, {**FIRST, **keys}, MORE, LAST]}


def sharegpt(keys: dict[str, Any]) -> dict[str, Any]:
    names = {"user": "human", "assistant": "gpt"}
    turns = [{"from": names[turn["role"]], "value": turn["content"]} for turn in (USER, FIRST, MORE, LAST)]
    turns[1] |= keys
    return {"conversations": turns}


def rounds(keys: dict[str, Any]) -> dict[str, Any]:
    return {"conversation": [{"input": "one", "output": "two", **keys}, {"input": "three", "output": "four"}]}


SHAPES = {"messages": messages, "sharegpt": sharegpt, "rounds": rounds}


@pytest.fixture(params=SHAPES)
def read(request: pytest.FixtureRequest) -> Callable[[dict[str, Any]], Chat]:
    def of_keys(keys: dict[str, Any]) -> Chat:
        chat = formats.read_sample(request.param, SHAPES[request.param](keys), "x")
        assert isinstance(chat, Chat)
        return chat

    return of_keys


@pytest.mark.parametrize(
    ("keys", "marks"), [*((keys, {"weight": 0}) for keys in LEAVES_OUT), *((keys, {}) for keys in TRAINS), *WEIGHED]
)
def test_a_turn_has_the_weight_that_its_keys_say_and_spans_have_their_own(
    read: Callable[[dict[str, Any]], Chat], keys: dict[str, Any], marks: dict[str, Any]
) -> None:
    assert read(keys).messages == [USER, {**FIRST, **marks}, MORE, LAST]


@pytest.mark.parametrize("keys", REFUSED)
def test_what_no_turn_can_have_makes_the_row_bad(read: Callable[[dict[str, Any]], Chat], keys: dict[str, Any]) -> None:
    with pytest.raises(DataError) as error:
        read(keys)
    assert error.value.of_row
    assert next(iter(keys)) in error.value.what


@pytest.mark.parametrize("key", ["train", "loss", "weight"])
def test_only_the_assistant_s_turns_are_trained(key: str) -> None:
    with pytest.raises(DataError, match="user") as error:
        formats.read_sample("messages", {"messages": [{**USER, key: True}, FIRST]}, "x")
    assert error.value.of_row
    chat = formats.read_sample("messages", {"messages": [{**USER, key: False}, FIRST]}, "x")
    assert isinstance(chat, Chat)
    assert chat.messages[1] == FIRST


def test_answers_of_pairs_and_judged_answers_say_so_too() -> None:
    turns = [{**FIRST, "train": False}, MORE, LAST]

    pair = formats.read_sample("preference", {"prompt": [USER], "chosen": turns, "rejected": [LAST]}, "x")
    judged = formats.read_sample("feedback", {"prompt": [USER], "completion": turns, "label": True}, "x")

    assert isinstance(pair, Pair)
    assert isinstance(judged, Feedback)
    assert pair.chosen == judged.completion == [{**FIRST, "weight": 0}, MORE, LAST]


@pytest.fixture
def prepared(prepared: Prepare) -> Prepare:
    return partial(prepared, packing=False, max_length=512)


def test_a_reward_model_refuses_a_turn_that_is_not_to_be_trained(prepared: Prepare) -> None:
    pair = {"prompt": [USER], "chosen": [FIRST, MORE, LAST], "rejected": [LAST]}
    untrained = {**pair, "chosen": [{**FIRST, "train": False}, MORE, LAST]}

    assert prepared([pair, untrained], "reward", bad_rows=1).counts.bad == 1
    assert prepared([pair, untrained], "dpo", bad_rows=1).counts.bad == 0


def test_a_turn_of_calls_that_joins_another_is_trained_as_that_one_is() -> None:
    call = {"from": "function_call", "value": '{"name": "f"}'}
    before = [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two", "loss": False}]

    with pytest.raises(DataError, match="turn 3"):
        formats.read_sample("sharegpt", {"conversations": [*before, call]}, "x")
    joined = formats.read_sample("sharegpt", {"conversations": [*before, {**call, "loss": False}]}, "x")
    assert isinstance(joined, Chat)
    assert joined.messages[1]["weight"] == 0


def test_a_part_of_a_turn_cannot_be_left_out_alone() -> None:
    parts = [{"type": "text", "text": "two", "train": False}, {"type": "text", "text": "three"}]

    with pytest.raises(DataError, match="turn 2"):
        formats.read_sample("messages", {"messages": [USER, {**FIRST, "content": parts}]}, "x")


def test_a_key_that_nothing_is_made_of_is_named_with_its_rows(prepared: Prepare, tokenizer: Any) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {}}, "index": 3}
    rows = [
        {**messages({"emotion": "calm", "id": 7, "audio": None, "tags": []}), "source": "forum", "weight": 72.5},
        {**messages({"emotion": "calm", "tool_calls": [call]}), "system": "", "messages_count": 4},
        {"messages": [{**USER, "content": [{"type": "text", "text": "one", "cache": True}]}, LAST], "source": "wiki"},
        {"messages": [{"role": "system", "content": "s"}, USER, LAST], "system": "another"},
    ]

    tokenizer.chat_template = WITH_TOOLS

    result = prepared(rows)

    assert {
        (unread.owner, unread.key): (unread.rows, unread.first.rsplit(":")[-1]) for unread in result.data.unread
    } == {
        ("turn", "emotion"): (2, "1"),
        ("turn", "id"): (1, "1"),
        ("column", "source"): (2, "1"),
        ("loss column", "weight"): (1, "1"),
        ("column", "messages_count"): (1, "2"),
        ("call", "index"): (1, "2"),
        ("part", "cache"): (1, "3"),
        ("column", "system"): (1, "4"),
    }
    assert result.data.unread[0].rows == 2
    assert "'emotion'" in describe(result)


TURNS: list[dict[str, Any]] = [FIRST, USER, LAST, MORE]
SHAREGPT = [{"from": "human" if turn["role"] == "user" else "gpt", "value": turn["content"]} for turn in TURNS]
BEFORE, AFTER = "of the assistant before the first question", "after the last answer"
EXECUTED = {"from": "gpt", "value": "<|startofthink|>{}<|endofthink|><|startofexec|>7<|endofexec|>"}


@pytest.mark.parametrize(
    ("shape", "row", "left_out"),
    [
        ("messages", {"messages": TURNS}, [AFTER]),
        ("sharegpt", {"conversations": SHAREGPT}, [BEFORE, AFTER]),
        ("msagent", {"conversations": [SHAREGPT[1], EXECUTED]}, ["of tools that no answer follows"]),
        ("prompt_completion", {"prompt": "one", "completion": [LAST, MORE]}, [AFTER]),
        ("oasst1", {"text": "### Human: one### Assistant: four### Human: three"}, [AFTER]),
        ("preference", {"prompt": "one", "chosen": [LAST, MORE], "rejected": [FIRST]}, [AFTER]),
        ("feedback", {"messages": [USER, LAST, MORE], "label": True}, [AFTER]),
        ("messages", {"messages": [USER]}, []),
        ("sharegpt", {"conversations": SHAREGPT[:1]}, []),
    ],
)
def test_turns_that_nothing_is_made_of_are_named(shape: str, row: dict[str, Any], left_out: list[str]) -> None:
    unread: list[tuple[str, str]] = []

    formats.read_sample(shape, row, "x", on_unread=unread.append)

    assert unread == [("conversation", turns) for turns in left_out]


def test_turns_that_are_left_out_are_counted_and_told(prepared: Prepare) -> None:
    result = prepared([{"messages": TURNS}, {"messages": [USER, LAST]}])

    assert [(unread.owner, unread.key, unread.rows) for unread in result.data.unread] == [("conversation", AFTER, 1)]
    assert "the turns after the last answer (1 row" in describe(result)
    assert AFTER in str(unread_warning({"train": result.data.unread}))


ROWS: dict[str, dict[str, Any]] = {
    "messages": {"messages": [USER, LAST]},
    "sharegpt": {"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "four"}]},
    "rounds": {"conversation": [{"input": "one", "output": "four"}]},
    "alpaca": {"instruction": "one", "output": "four"},
    "prompt_completion": {"prompt": "one", "completion": "four"},
}
OF_ROWS: list[dict[str, Any]] = [{"sample_weight": 0}, {"weight": "0"}, {"train": "false"}, {"loss_weight": "0.0"}]


@pytest.mark.parametrize("shape", ROWS)
def test_a_row_that_is_not_to_be_trained_is_dropped_with_a_count(prepared: Prepare, shape: str) -> None:
    rows = [{**ROWS[shape], **keys} for keys in [*LEAVES_OUT, *OF_ROWS]]

    result = prepared([*rows, ROWS[shape]])

    assert (result.counts.kept, result.counts.dropped, result.counts.bad) == (1, len(rows), 0)
    assert result.data.unread == []
    assert all("leaves it out" in total.reason for total in result.data.changes)


@pytest.mark.parametrize("keys", [*TRAINS[:5], {"train": None, "weight": ""}, {"loss_weight": float("nan")}])
def test_a_row_that_is_to_be_trained_is(prepared: Prepare, keys: dict[str, Any]) -> None:
    result = prepared([{**row, **keys} for row in ROWS.values()][:1])

    assert (result.counts.kept, result.data.unread) == (1, [])


@pytest.mark.parametrize(
    "keys",
    [
        {"weight": 0.5},
        {"loss": 0.25},
        {"weight": "0.5"},
        {"mask": 1},
        {"sample_weight": 2},
        {"loss_weight": 72.5},
        {"loss_mask": [0, 1]},
        {"loss_scale": "last_round"},
        {"train": True, "weight": 0},
        {"train": True, "masked": True},
    ],
)
@pytest.mark.parametrize("shape", ROWS)
def test_a_row_that_asks_for_a_part_of_the_loss_is_bad(shape: str, keys: dict[str, Any]) -> None:
    with pytest.raises(DataError) as error:
        formats.read_sample(shape, {**ROWS[shape], **keys}, "x", on_left_out=lambda _: None)
    assert error.value.of_row
    assert next(iter(keys)) in error.value.what


def test_a_row_that_is_left_out_and_has_a_turn_that_is_trained_is_bad() -> None:
    row = {"messages": [USER, {**LAST, "train": True}], "weight": 0}

    with pytest.raises(DataError, match="contradict"):
        formats.read_sample("messages", row, "x", on_left_out=lambda _: None)


@pytest.mark.parametrize(
    "keys", [{"weight": 72.5}, {"weight": "heavy"}, {"loss": 1.7}, {"train": "ICE 4"}, {"mask": [0, 1]}, {"margin": 0}]
)
def test_a_column_of_data_is_named_and_its_row_is_trained(prepared: Prepare, keys: dict[str, Any]) -> None:
    result = prepared([{**ROWS["alpaca"], **keys}])

    assert result.counts.kept == 1
    assert [(unread.owner, unread.key) for unread in result.data.unread] == [("loss column", next(iter(keys)))]


def test_texts_pairs_and_judged_answers_are_left_out_too(prepared: Prepare) -> None:
    pair = {"prompt": "one", "chosen": "two", "rejected": "four"}
    rows = {"pretrain": {"text": "one"}, "dpo": pair, "reward": pair, "kto": {**ROWS["prompt_completion"], "label": 1}}

    for objective, row in rows.items():
        counts = prepared([row, {**row, "train": False}], objective).counts
        assert (counts.read, counts.dropped) == (2, 1), objective


def test_rewards_get_a_column_that_would_leave_a_row_out(prepared: Prepare) -> None:
    counts = prepared([{"prompt": "one", "weight": 0, "loss": 0.5}], "grpo").counts

    assert (counts.kept, counts.dropped) == (1, 0)


def test_rows_that_are_read_whole_name_nothing(prepared: Prepare, tokenizer: Any) -> None:
    rows = [
        {**messages({"name": "bot", "reasoning_content": "hm", "train": True}), "tools": [{"name": "f"}]},
        {**messages({"content": None, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}}]})},
    ]

    tokenizer.chat_template = WITH_TOOLS

    result = prepared(rows)

    assert result.data.unread == []
    assert "not read" not in describe(result)


def test_columns_that_rewards_get_are_not_named_but_keys_of_turns_are(prepared: Prepare) -> None:
    rows = [{"prompt": [{**USER, "mood": "calm"}], "solution": "2"}]

    assert [(unread.owner, unread.key) for unread in prepared(rows, "grpo").data.unread] == [("turn", "mood")]


def test_many_processes_count_as_one_does(prepared: Prepare) -> None:
    rows = [messages({"emotion": "calm"} if at % 3 == 0 else {}) for at in range(1_100)]

    by_one, by_two = (prepared(rows, num_proc=number) for number in (1, 2))

    assert [(key.key, key.rows) for key in by_one.data.unread] == [("emotion", 367)]
    assert by_one.data.unread == by_two.data.unread


def test_a_file_of_any_number_of_keys_is_counted_in_little_memory(prepared: Prepare) -> None:
    result = prepared([messages({f"key{at}": 1}) for at in range(300)])

    assert len(result.data.unread) == 201
    assert sum(unread.rows for unread in result.data.unread) == 300
    assert len(describe(result)) < 1_000
