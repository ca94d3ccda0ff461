"""Which turns carry loss, and how much of it: what the recipe chooses, and what turns and spans of them say."""

from __future__ import annotations

import json
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import pytest

from tests.data.conftest import CHATML, WITH_TOOLS, Prepare, Settings, Write, make_tokenizer
from tests.data.test_masks import family
from tuner.data import formats
from tuner.data.encoder import Part
from tuner.data.pipeline import Pipeline
from tuner.data.sample import Chat
from tuner.data.text_encoder import TextEncoder
from tuner.errors import DataError

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def said(*turns: str, **marks: dict[str, Any]) -> dict[str, Any]:
    """Return a row of turns such as 'user: Hi'; `t1={...}` are further keys of the second one."""
    split = [turn.partition(": ") for turn in turns]
    return {
        "messages": [
            {"role": who, "content": text, **marks.get(f"t{at}", {})} for at, (who, _, text) in enumerate(split)
        ]
    }


TALK = ("user: one", "assistant: two", "user: three", "assistant: four")


def parts_of(row: dict[str, Any], trained: Any = "all", template: str = CHATML, **options: Any) -> list[Part]:
    chat = formats.read_sample("messages", row, "here:1", trained=trained)
    return TextEncoder(make_tokenizer(template)).encode([("here:1", chat)], **options)[0]


def runs(row: dict[str, Any], trained: Any = "all", template: str = CHATML, **options: Any) -> list[tuple[str, float]]:
    """Return the text of each run of tokens of one weight above 0, of all parts, and that weight."""
    tokenizer, found = make_tokenizer(template), []
    for part in parts_of(row, trained, template, **options):
        ids, labels = part.labelled
        assert (labels[labels != -100] == ids[labels != -100]).all()
        weights = (labels != -100).astype(np.float32) if part.weights is None else part.weights
        assert ((weights > 0) == (labels != -100)).all()
        for weight, some in groupby(zip(ids.tolist(), weights.tolist(), strict=True), lambda token: token[1]):
            text = tokenizer.decode([token for token, _ in some])
            found += [(text, round(weight, 6))] if weight else []
    return found


END = "<|im_end|>"


@pytest.mark.parametrize(
    ("trained", "marks", "expected"),
    [
        ("all", {}, [(f"two{END}", 1), (f"four{END}", 1)]),
        ("all", {"t1": {"loss": 0}}, [(f"four{END}", 1)]),
        ("all", {"t1": {"weight": 0.5}}, [(f"two{END}", 0.5), (f"four{END}", 1)]),
        ("last", {}, [(f"four{END}", 1)]),
        ("last", {"t1": {"weight": 1}}, [(f"four{END}", 1)]),
        ("last", {"t3": {"weight": 0.25}}, [(f"four{END}", 0.25)]),
        ("last", {"t3": {"train": False}}, []),
        ("last", {"t1": {"spans": [[0, 3, 1]]}}, [(f"four{END}", 1)]),
        ("marked", {"t1": {"train": True}}, [(f"two{END}", 1)]),
        ("marked", {"t1": {"loss": 0.5}, "t3": {"weight": 0}}, [(f"two{END}", 0.5)]),
        ("marked", {"t3": {"spans": [[0, 1, 1]]}}, [("f", 1)]),
        (
            "marked",
            {"t3": {"train_detail": [{"begin_offset": 0, "end_offset": 0, "train": True}]}},
            [("f", 1), (END, 1)],
        ),
        ("marked", {}, []),
    ],
)
def test_the_recipe_chooses_turns_and_a_turn_says_how_much(
    trained: str, marks: dict[str, Any], expected: list[tuple[str, float]]
) -> None:
    assert runs(said(*TALK, **marks), trained) == expected


def test_everything_trains_prompts_too_and_refuses_other_weights(prepared: Prepare) -> None:
    rows = prepared([said(*TALK, t0={"train": True})], trained_turns="everything").dataset

    assert rows[0]["labels"] == [-100, *rows[0]["input_ids"][1:]]
    for marks in ({"weight": 0}, {"weight": 0.5}, {"spans": [[0, 1, 1]]}):
        with pytest.raises(DataError, match="everything") as error:
            formats.read_sample("messages", said(*TALK, t1=marks), "x", trained="everything")
        assert error.value.of_row


def test_the_last_answer_of_a_tool_loop_is_whole() -> None:
    row = said("user: hi", "assistant: yes", "user: sum", "assistant: ", "tool: 3", "assistant: 3")
    row["messages"][3]["tool_calls"] = [CALL]

    assert [text for text, _ in runs(row, "last", WITH_TOOLS)] == [f'add({{"a": 1}}){END}', f"3{END}"]


MOSS = {"Human": "sum", "Commands": "<|Commands|>: Calc(1)<eoc>", "Tool Responses": "1", "MOSS": "1"}
MSAGENT = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b<|startofexec|>c<|endofexec|>d"}]


@pytest.mark.parametrize(
    ("name", "row"), [("moss", {"chat": {"turn_1": MOSS}}), ("msagent", {"conversations": MSAGENT})]
)
def test_a_result_that_becomes_a_turn_of_the_user_begins_no_answer(name: str, row: dict[str, Any]) -> None:
    chat = formats.read_sample(name, row, "x", trained="last")

    assert all("weight" not in turn and "is_result" not in turn for turn in chat.messages)  # type: ignore[union-attr]


@pytest.mark.parametrize("template", [CHATML, family("qwen2_5"), family("llama3_1"), family("gemma")])
def test_spans_weigh_the_tokens_of_their_characters(template: str) -> None:
    marks = {"spans": [[5, 8, 0.5], [9, 13, 0]]}

    found = runs(said("user: q", "assistant: some big words 🙂 end", t1=marks), template=template)

    end = "<|im_end|>" if "im_end" in template else "<|eot_id|>" if "eot" in template else "<end_of_turn>"
    assert found == [("some ", 1), ("big", 0.5), (" ", 1), ("s 🙂 end" + end, 1)]


def test_a_token_belongs_to_the_span_of_its_first_letter() -> None:
    found = runs(said("user: q", "assistant: one two", t1={"spans": [[0, 4, 0.5]]}))

    assert found == [("one", 0.5), (f" two{END}", 1)]


@pytest.mark.parametrize("template", [CHATML, family("qwen3")])
def test_a_thought_weighs_what_its_span_says(template: str) -> None:
    thought, marks = "<think>\nhm\n</think>\n\n", {"spans": [[0, 21, 0.25], [23, 26, 0]]}

    found = runs(said("user: q", f"assistant: {thought}so on", t1=marks), template=template)

    assert found == [(thought, 0.25), ("so", 1), (END, 1)]


def test_a_span_in_text_that_is_not_rendered_makes_the_row_bad() -> None:
    content = "<think>\nhm\n</think>\n\nso on"
    row = said("user: q", f"assistant: {content}", t1={"spans": [[0, 10, 0]]})
    drops = CHATML.replace("message['content']", "message['content'].split('</think>')[-1].lstrip()")
    assert drops != CHATML

    with pytest.raises(DataError) as error:
        runs(row, template=drops)
    assert error.value.of_row
    with pytest.raises(DataError, match="strip") as error:
        runs(row, thinking="strip")
    assert error.value.of_row
    row["messages"][1]["spans"] = [[21, 23, 0]]
    assert [text for text, _ in runs(row, thinking="strip")] == [f" on{END}"]


def test_a_span_where_the_template_writes_other_text_makes_the_row_bad() -> None:
    changed = CHATML.replace("message['content']", "message['content'] | replace('so on', 'so off')")
    assert changed != CHATML

    whole, inside = (said("user: q", "assistant: so on", t1={"spans": [span]}) for span in ([0, 5, 0.5], [1, 4, 0.5]))

    assert runs(whole, template=changed)[0] == ("so off", 0.5)
    with pytest.raises(DataError) as error:
        runs(inside, template=changed)
    assert error.value.of_row


@pytest.mark.parametrize("marked", [1, 2])
def test_a_mark_of_calls_that_join_a_turn_is_one_of_the_whole_turn(marked: int) -> None:
    turns = [
        {"from": "human", "value": "q"},
        {"from": "gpt", "value": "I look it up."},
        {"from": "function_call", "value": '{"name": "add", "arguments": {}}'},
        {"from": "gpt", "value": "3"},
    ]
    turns[marked]["loss"] = True  # type: ignore[assignment]

    chat = formats.read_sample("sharegpt", {"conversations": turns}, "x", trained="marked")

    assert isinstance(chat, Chat) and [turn.get("weight", 1) for turn in chat.messages[1:]] == [1, 0]


def test_spans_stay_where_they_are_beside_special_tokens_that_stay_text() -> None:
    content = f"a {END} b c{END}"

    found = runs(said("user: q", f"assistant: {content}", t1={"spans": [[0, 2, 0.5], [13, 14, 0]]}))

    assert "".join(text for text, weight in found if weight == 1).replace(" ", "") == f"{END}c{END}"
    assert found[0][1] == 0.5
    assert "b" not in "".join(text for text, _ in found)


def test_calls_of_tools_weigh_as_their_turn_beside_a_span_of_its_text() -> None:
    row = said("user: q", "assistant: let me", "tool: 1", "assistant: 1", t1={"weight": 0.5, "spans": [[0, 3, 1]]})
    row["messages"][1]["tool_calls"] = [CALL]

    found = runs(row, template=WITH_TOOLS)

    assert found == [("let", 1), (f' meadd({{"a": 1}}){END}', 0.5), (f"1{END}", 1)]


@pytest.fixture
def prepared(prepared: Prepare) -> Prepare:
    return partial(prepared, packing=False, max_length=512)


def length(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


HALF = said(*TALK, t1={"weight": 0.5})


def test_rows_of_whole_weights_have_no_column_of_them(prepared: Prepare) -> None:
    plain, marked = said(*TALK), said(*TALK, t1={"weight": 1}, t3={"spans": [[0, 4, 1]], "loss": True})

    first, second = (prepared([row]) for row in (plain, marked))

    assert first.dataset.column_names == ["input_ids", "labels", "seq_lengths"]
    assert first.sha256 == second.sha256


@pytest.mark.parametrize("packing", [False, True])
def test_weights_follow_their_tokens_into_rows(prepared: Prepare, tokenizer: Any, packing: bool) -> None:
    rows = [said(*TALK)] * 600 + [HALF] * 600  # more than one table

    result = prepared(rows, packing=packing, max_length=96)

    weights = np.concatenate([row["token_weights"] for row in result.dataset])
    labels = np.concatenate([row["labels"] for row in result.dataset])
    assert [len(row["token_weights"]) for row in result.dataset] == [len(row["labels"]) for row in result.dataset]
    first, last = (1_200 * length(tokenizer, f"{text}{END}") for text in ("two", "four"))
    assert (weights == 0.5).sum() == first / 2
    assert result.counts.trained_tokens == (labels != -100).sum() == first + last


def test_a_turn_that_carries_a_part_counts_as_trained_and_a_row_without_loss_is_named(
    prepared: Prepare, tokenizer: Any
) -> None:
    result = prepared([HALF, said("user: five", *TALK[1:])], trained_turns="marked")

    assert (result.counts.kept, result.counts.dropped) == (1, 1)
    assert [total.reason for total in result.data.changes] == ["no token of it carries loss"]
    assert result.counts.trained_tokens == length(tokenizer, f"two{END}")


def test_the_choice_of_turns_is_in_the_key_of_the_cache(prepared: Prepare) -> None:
    counts = [
        prepared([said(*TALK)], trained_turns=trained).counts.trained_tokens
        for trained in ("all", "last", "everything")
    ]

    assert len({*counts}) == 3


def test_a_row_with_two_weights_is_one_question_and_answer(prepared: Prepare) -> None:
    result = prepared([HALF, said(*TALK)])

    assert [(total.what, total.samples) for total in result.data.changes] == [("copied", 2)]


PAIR = {"prompt": [{"role": "user", "content": "q"}], "rejected": "no"}


@pytest.mark.parametrize(
    ("objective", "row"),
    [
        ("dpo", {**PAIR, "chosen": [{"role": "assistant", "content": "yes", "weight": 0.5}]}),
        ("dpo", {**PAIR, "chosen": [{"role": "assistant", "content": "yes", "spans": [[0, 1, 0]]}]}),
        ("reward", {**PAIR, "chosen": [{"role": "assistant", "content": "yes", "weight": 0.5}]}),
        ("kto", {"prompt": "q", "completion": [{"role": "assistant", "content": "yes", "weight": 0.5}], "label": True}),
        ("pretrain", HALF),
        ("pretrain", said(*TALK, t1={"train": False})),
        ("pretrain", said(*TALK, t1={"spans": [[0, 1, 1]]})),
    ],
)
def test_objectives_that_know_no_part_of_a_turn_refuse_it(
    prepared: Prepare, objective: str, row: dict[str, Any]
) -> None:
    with pytest.raises(DataError) as error:
        prepared([row], objective)
    assert error.value.of_row


def test_marks_of_a_prompt_are_named_and_kept_from_rewards(prepared: Prepare) -> None:
    result = prepared([said(*TALK, t1={"weight": 0.5}), said(*TALK)], "grpo")

    assert [(unread.owner, unread.key, unread.rows) for unread in result.data.unread] == [("turn", "weight", 1)]
    assert all("weight" not in turn for row in result.dataset for turn in json.loads(row["row"])["prompt"])


def test_a_row_of_text_has_no_turns_to_choose(jsonl: Write) -> None:
    pipeline = Pipeline(Settings(str(jsonl([{"text": "one"}])), trained_turns="last"), "pretrain")  # type: ignore[arg-type]

    assert [sample for _, sample in pipeline.samples(pipeline.tally(), lambda error: None)] == ["one"]
