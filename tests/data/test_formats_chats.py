from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy
import pytest

from tests.refused import refused
from tuner.data import formats
from tuner.data.sample import Chat, Pair, Prompt, lacks
from tuner.errors import DataError


def said(*turns: str) -> list[dict[str, Any]]:
    """Return turns of 'role: content'."""
    return [dict(zip(("role", "content"), turn.split(": ", 1), strict=True)) for turn in turns]


def read(name: str, row: dict[str, Any]) -> Chat:
    chat = formats.read_sample(name, row, "")
    assert isinstance(chat, Chat)
    return chat


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("instruction", "output"),
        ("instruction", "response"),
        ("query", "response"),
        ("prompt", "response"),
        ("question", "answer"),
        ("problem", "solution"),
    ],
)
def test_alpaca_joins_question_and_input_by_a_line_break(question: str, answer: str) -> None:
    row = {question: "Add.", "input": "1 2", answer: "3", "system": "Be brief."}

    assert read("alpaca", row) == Chat(said("system: Be brief.", "user: Add.\n1 2", "assistant: 3"))


@pytest.mark.parametrize("extra", [{}, {"input": ""}, {"input": None}])
def test_alpaca_without_input_is_the_question_alone(extra: dict[str, Any]) -> None:
    assert read("alpaca", {"instruction": "Go.", "output": "Gone.", **extra}) == Chat(
        said("user: Go.", "assistant: Gone.")
    )


@pytest.mark.parametrize(
    ("shape", "row", "key"),
    [
        ("alpaca", {"instruction": "Double it.", "input": 0, "output": "0"}, "input"),
        ("alpaca", {"instruction": "q", "output": "a", "system": False}, "system"),
        ("alpaca", {"instruction": "q", "output": "a", "history": 0}, "history"),
        ("preference", {"prompt": "Double it.", "input": 0.0, "chosen": "0", "rejected": "1"}, "input"),
        ("rounds", {"conversation": [{"human": 0, "output": "a"}]}, "human"),
        ("moss", {"chat": {"turn_1": {"Human": 0, "MOSS": "a"}}}, "Human"),
        ("moss", {"chat": {"turn_1": {"Human": "q", "MOSS": "a"}}, "meta_instruction": 0}, "meta_instruction"),
    ],
)
def test_a_number_is_no_text_and_not_nothing(shape: str, row: dict[str, Any], key: str) -> None:
    with refused(DataError, "x:1", key):
        formats.read_sample(shape, row, "x:1")


@pytest.mark.parametrize("nothing", [None, "", [], {}])
def test_a_column_without_content_is_as_if_it_were_not_there(nothing: object) -> None:
    row = {"instruction": "q", "output": "a", "input": nothing, "system": nothing, "history": nothing}

    assert read("alpaca", row) == Chat(said("user: q", "assistant: a"))


def test_alpaca_has_a_history_of_questions_and_answers() -> None:
    row = {"instruction": "q3", "output": "a3", "history": [["q1", "a1"], ["q2", "a2"]]}

    turns = ["user: q1", "assistant: a1", "user: q2", "assistant: a2", "user: q3", "assistant: a3"]
    assert read("alpaca", row) == Chat(said(*turns))


def test_alpaca_s_mark_for_no_answer_is_none() -> None:
    assert lacks(read("alpaca", {"instruction": "q", "output": "<nooutput>"}))


@pytest.mark.parametrize("prompt", ["q", [{"role": "user", "content": "q"}]])
@pytest.mark.parametrize("completion", ["a", [{"role": "assistant", "content": "a"}]])
def test_prompt_and_completion_are_texts_or_turns(prompt: Any, completion: Any) -> None:
    row = {"prompt": prompt, "completion": completion, "system": "s"}

    assert read("prompt_completion", row) == Chat(said("system: s", "user: q", "assistant: a"))


@pytest.mark.parametrize(
    "answer",
    [
        '[{"name": "add", "arguments": {}}]',
        '[{"from": "Rome", "value": 3}]',
        '[{"role": ["user"], "content": "q"}]',
        '[{"role": "user"}, 7]',
        '[{"role": "user", "content": "q"}] is a list of turns',
    ],
)
def test_an_answer_that_spells_another_list_stays_text(answer: str) -> None:
    assert read("prompt_completion", {"prompt": "[1]", "completion": answer}).messages[1]["content"] == answer


@pytest.mark.parametrize("write", [json.dumps, str])
def test_turns_written_as_text_are_turns(write: Callable[[Any], str]) -> None:
    prompt, reply = write(said("user: q")), write([{"from": "gpt", "value": "a"}])
    whole = write(said("user: q", "assistant: a"))

    assert read("prompt_completion", {"prompt": prompt, "completion": reply}) == Chat(said("user: q", "assistant: a"))
    for chosen in (whole, reply):
        pair = formats.read_sample("preference", {"prompt": prompt, "chosen": chosen, "rejected": chosen}, "")
        assert pair == Pair(said("user: q"), said("assistant: a"), said("assistant: a"))
    asked = formats.read_sample("prompt", {"prompt": prompt}, "")
    assert asked == Prompt(said("user: q"), {}, None)


def test_the_text_of_an_array_of_turns_is_no_answer() -> None:
    text = str(numpy.array([{"content": "q", "role": "user"}, {"content": "a", "role": "assistant"}], dtype=object))

    for shape, name in (("prompt_completion", "completion"), ("preference", "rejected"), ("prompt", "prompt")):
        with refused(DataError, "x:1", name):
            formats.read_sample(
                shape, {"prompt": "q", "completion": "a", "chosen": "b", "rejected": "c", name: text}, "x:1"
            )


def test_oasst1_keeps_headings_in_answers_and_drops_a_last_question() -> None:
    text = "### Human: q1### Assistant: # A\n### Steps\n### 1. Go###\n### Human: q2### Assistant: b ### Human: q3"

    turns = ["user: q1", "assistant: # A\n### Steps\n### 1. Go###", "user: q2", "assistant: b"]
    assert read("oasst1", {"text": text}) == Chat(said(*turns))


def test_a_conversation_without_an_answer_teaches_nothing() -> None:
    rows = {
        "messages": {"messages": said("user: q")},
        "sharegpt": {"conversations": []},
        "oasst1": {"text": "### Human: q"},
    }

    assert all(lacks(read(name, row)) for name, row in rows.items())


def test_sharegpt_roles_become_the_template_s_roles() -> None:
    turns = [("system", "s"), ("human", "q"), ("gpt", "a"), ("observation", "t"), ("gpt", "b")]
    row = {"conversations": [{"from": who, "value": text} for who, text in turns]}

    assert read("sharegpt", row) == Chat(said("system: s", "user: q", "assistant: a", "tool: t", "assistant: b"))


def test_sharegpt_may_call_its_key_role() -> None:
    row = {"conversation": [{"role": "human", "value": "q"}, {"role": "gpt", "value": "a"}]}

    assert read("sharegpt", row) == Chat(said("user: q", "assistant: a"))


def test_sharegpt_turns_before_the_first_question_are_left_out() -> None:
    turns = [("system", "s"), ("gpt", "x"), ("gpt", "y"), ("human", "q"), ("gpt", "a")]
    row = {"conversations": [{"from": who, "value": text} for who, text in turns]}

    assert read("sharegpt", row) == Chat(said("system: s", "user: q", "assistant: a"))


@pytest.mark.parametrize("spelt", ['[{"from": "human", "value": "q"}, {"from": "gpt", "value": "a\\n"}]', None])
def test_turns_spelt_as_text_are_read(spelt: str | None) -> None:
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a\n"}]

    assert read("sharegpt", {"conversations": spelt or repr(turns)}) == Chat(said("user: q", "assistant: a\n"))


def test_a_turn_keeps_the_call_that_it_answers_and_no_name_that_is_null() -> None:
    asked, answered = said("user: q", "assistant: a"), said("tool: 1", "assistant: b")
    answered[0]["tool_call_id"] = "7"

    assert read("messages", {"messages": [{**asked[0], "name": None}, asked[1], *answered]}) == Chat(
        [*asked, *answered]
    )


def test_content_in_text_parts_is_joined_and_a_developer_is_a_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    row = {"messages": [{"role": "developer", "content": parts}, *said("user: q", "assistant: a")]}

    assert read("messages", row).messages[0] == {"role": "system", "content": "ab"}


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_kept_under_one_name(key: str) -> None:
    row = {"messages": [*said("user: q"), {"role": "assistant", "content": "a", key: "hm"}]}

    assert read("messages", row).messages[1] == {"role": "assistant", "content": "a", "reasoning_content": "hm"}


def test_the_row_s_system_gives_way_to_the_conversation_s() -> None:
    own = {"messages": said("system: mine", "user: q", "assistant: a"), "system": "row's"}
    none = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "row's"}

    assert read("messages", own).messages[0]["content"] == "mine"
    assert read("sharegpt", none).messages[0] == {"role": "system", "content": "row's"}


def test_rounds_are_questions_and_answers_with_a_system_turn_of_their_own() -> None:
    row = {
        "conversation": [
            {"system": "s", "input": "q1", "output": "a1", "output_with_loss": False},
            {"system": "", "input": "q2", "output": "a2"},
            {"input": "", "output": "a3"},
        ]
    }

    turns = said("system: s", "user: q1", "assistant: a1", "user: q2", "assistant: a2", "assistant: a3")
    turns[2]["weight"] = 0
    assert read("rounds", row) == Chat(turns)
    assert read("rounds", {"conversation": [{"human": "q", "assistant": "a"}]}) == Chat(said("user: q", "assistant: a"))


def test_moss_shows_what_a_tool_returned_as_the_user_s_turn() -> None:
    none = {"Inner Thoughts": "<|Inner Thoughts|>: None<eot>\n", "Commands": "<|Commands|>: None<eoc>\n"}
    row = {
        "meta_instruction": "You are an assistant.\n",
        "num_turns": 2,
        "chat": {
            "turn_1": {"Human": "<|Human|>: Hi<eoh>\n", **none, "MOSS": "<|MOSS|>: Hello<eom>\n"},
            "turn_2": {
                "Human": "<|Human|>: 1+1?<eoh>\n",
                "Inner Thoughts": "<|Inner Thoughts|>: A sum.<eot>\n",
                "Commands": '<|Commands|>: Calculate("1+1")<eoc>\n',
                "Tool Responses": "<|Results|>:\n2\n<eor>\n",
                "MOSS": "<|MOSS|>: Two.<eom>\n",
            },
            "turn_3": None,
        },
    }

    assert read("moss", row) == Chat(
        said(
            "system: You are an assistant.",
            "user: Hi",
            "assistant: Hello",
            "user: 1+1?",
            'assistant: <|Inner Thoughts|>: A sum.<eot>\n<|Commands|>: Calculate("1+1")<eoc>',
            "user: <|Results|>:\n2\n<eor>",
            "assistant: Two.",
        )
    )


def test_msagent_answers_are_split_where_a_tool_returned_something() -> None:
    think = '<|startofthink|>```JSON\n{"api_name": "f"}```<|endofthink|>'
    turns = [
        {"from": "system", "value": "s"},
        {"from": "user", "value": "q"},
        {"from": "assistant", "value": f"{think}<|startofexec|>7<|endofexec|>It is 7."},
        {"from": "user", "value": "r"},
        {"from": "assistant", "value": f"{think}<|startofexec|>8<|endofexec|>"},
    ]

    assert read("msagent", {"conversations": str(turns)}) == Chat(
        said(
            "system: s",
            "user: q",
            f"assistant: {think}",
            "user: <|startofexec|>7<|endofexec|>",
            "assistant: It is 7.",
            "user: r",
            f"assistant: {think}",
        )
    )


@pytest.mark.parametrize(
    "cell", ['[{"role": "user", "content": "a", "content": "b"}]', "[{'role': 'user', 'role': 'x'}]"]
)
def test_a_key_that_stands_twice_in_the_turns_of_a_csv_cell_makes_the_row_bad(cell: str) -> None:
    assert formats.detect([{"messages": cell}], "x") == "messages"

    with pytest.raises(DataError, match="twice"):
        formats.read_sample("messages", {"messages": cell}, "x")
