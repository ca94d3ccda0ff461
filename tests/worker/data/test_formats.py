from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tuner.errors import DataError
from tuner.worker.data import formats
from tuner.worker.data.formats import Chat

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"messages": [USER, ANSWER]}, "messages"),
        ({"conversations": [USER, ANSWER]}, "messages"),
        ({"messages": None}, "messages"),
        ({"conversations": [{"from": "human", "value": "q"}]}, "sharegpt"),
        ({"text": "### Human: q### Assistant: a"}, "oasst1"),
        ({"text": "plain"}, "text"),
        ({"instruction": "q", "input": "", "output": "a", "text": "all of it"}, "alpaca"),
    ],
)
def test_the_format_is_detected_from_columns_and_first_words(row: dict[str, Any], name: str) -> None:
    assert formats.detect([row], "here") == name


def test_a_text_column_is_oasst1_only_if_every_first_row_is() -> None:
    assert formats.detect([{"text": "### Human: q### Assistant: a"}, {"text": "plain"}], "here") == "text"


def test_unknown_columns_are_listed_with_the_known_formats() -> None:
    with pytest.raises(DataError, match="columns question, answer") as caught:
        formats.detect([{"question": "q", "answer": "a"}], "here")

    assert all(repr(name) in str(caught.value) for name in formats.FORMATS)


def test_alpaca_joins_instruction_and_input_by_a_line_break() -> None:
    row = {"instruction": "Add.", "input": "1 2", "output": "3", "system": "Be brief."}

    assert formats.read("alpaca", row, "") == Chat(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Add.\n1 2"},
            {"role": "assistant", "content": "3"},
        ]
    )


@pytest.mark.parametrize("extra", [{}, {"input": ""}, {"input": None}])
def test_alpaca_without_input_is_the_instruction_alone(extra: dict[str, Any]) -> None:
    chat = formats.read("alpaca", {"instruction": "Go.", "output": "", **extra}, "")

    assert chat == Chat([{"role": "user", "content": "Go."}, {"role": "assistant", "content": ""}])


def test_oasst1_keeps_headings_in_answers_and_drops_a_last_question() -> None:
    text = "### Human: q1### Assistant: # A\n### Steps\n### 1. Go###\n### Human: q2### Assistant: b ### Human: q3"

    assert formats.read("oasst1", {"text": text}, "") == Chat(
        [
            {"role": "user", "content": "q1"},
            {"role": "assistant", "content": "# A\n### Steps\n### 1. Go###"},
            {"role": "user", "content": "q2"},
            {"role": "assistant", "content": "b"},
        ]
    )


def test_sharegpt_roles_become_the_template_s_roles() -> None:
    turns = [("system", "s"), ("human", "q"), ("gpt", "a"), ("tool", "t"), ("gpt", "b")]
    row = {"conversations": [{"from": who, "value": said} for who, said in turns]}

    chat = formats.read("sharegpt", row, "")

    assert isinstance(chat, Chat)
    roles = ["system", "user", "assistant", "tool", "assistant"]
    assert [(message["role"], message["content"]) for message in chat.messages] == [
        (role, said) for role, (_, said) in zip(roles, turns, strict=True)
    ]


def test_messages_keep_tool_calls_with_their_arguments_as_an_object() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    row = {
        "messages": [
            {**USER, "name": None},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "1", "tool_call_id": "7"},
            ANSWER,
        ],
        "tools": '[{"type": "function"}]',
    }

    chat = formats.read("messages", row, "")

    assert isinstance(chat, Chat)
    assert chat.tools == [{"type": "function"}]
    assert chat.messages[0] == USER
    assert chat.messages[1]["content"] == ""
    assert chat.messages[1]["tool_calls"] == [{"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}]
    assert chat.messages[2] == {"role": "tool", "content": "1", "tool_call_id": "7"}


def test_content_in_text_parts_is_joined_and_a_developer_is_a_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    row = {"messages": [{"role": "developer", "content": parts}, USER, ANSWER]}

    chat = formats.read("messages", row, "")

    assert isinstance(chat, Chat)
    assert chat.messages[0] == {"role": "system", "content": "ab"}


@pytest.mark.parametrize(
    ("name", "row", "says"),
    [
        ("messages", {"messages": []}, "is an empty list"),
        ("messages", {"messages": None}, "'messages' is null, not a list"),
        ("messages", {"messages": "hi"}, "of type str, not a list"),
        ("messages", {"messages": [USER, "hi"]}, "turn 2 is of type str"),
        ("messages", {"messages": [USER]}, "no assistant turn"),
        ("messages", {"messages": [USER, {"role": "asistant", "content": "a"}]}, "did you mean 'assistant'?"),
        ("messages", {"messages": [USER, {"role": "assistant", "content": None}]}, "content of turn 2 is null"),
        ("messages", {"messages": [USER, {"role": "assistant"}]}, "turn 2 has no 'content', only role"),
        ("messages", {"messages": [USER, {**ANSWER, "weight": 0}]}, "weight 0"),
        ("messages", {"messages": [{**USER, "content": [{"type": "image_url"}]}, ANSWER]}, "'image_url'"),
        ("messages", {"messages": [{**USER, "content": "\ud83d"}, ANSWER]}, "surrogate"),
        ("messages", {"messages": [USER, ANSWER], "tools": "{"}, "tools are text that is not JSON"),
        ("messages", {"message": [USER, ANSWER]}, "no column 'messages' (did you mean 'message'?)"),
        ("sharegpt", {"conversations": [{"from": "martian", "value": "a"}]}, "unknown role 'martian' (known: "),
        ("alpaca", {"instruction": "q", "output": None}, "output is null, not text"),
        ("alpaca", {"instruction": 3, "output": "a"}, "instruction is of type int"),
        ("oasst1", {"text": "Hello ### Human: q### Assistant: a"}, "does not start with '### Human:'"),
        ("oasst1", {"text": "### Human: q"}, "no assistant turn"),
        ("text", {"text": None}, "text is null"),
    ],
)
def test_a_row_without_its_format_s_shape_is_refused_with_its_place(name: str, row: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError) as caught:
        formats.read(name, row, "rows.jsonl:7")

    assert caught.value.where == "rows.jsonl:7"
    assert says in str(caught.value)
    assert f"its columns are {', '.join(row)}" in str(caught.value)


def test_a_misfit_names_the_format_that_would_fit() -> None:
    with pytest.raises(DataError, match="Set format='sharegpt', which fits this row"):
        formats.read(
            "messages", {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, "x"
        )


def test_an_unknown_format_names_the_nearest() -> None:
    with pytest.raises(DataError, match=r"Did you mean 'alpaca'\?"):
        formats.read("alpacca", {}, "x")


def test_text_that_looks_like_code_stays_text() -> None:
    text = "{{ 7 * 7 }} {% raise %} __import__('os')"

    assert formats.read("text", {"text": text}, "") == text


def test_a_function_of_the_users_reads_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_of_tests.py").write_text(
        "def chat(row): return [{'role': 'user', 'content': row['q']}, {'role': 'assistant', 'content': row['a']}]\n"
        "def text(row): return row['q']\n"
        "def wrong(row): return 7\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    row = {"q": "Why?", "a": "Because."}

    assert formats.read("mine_of_tests:chat", row, "my.jsonl:1") == Chat(
        [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]
    )
    assert formats.read("mine_of_tests:text", row, "my.jsonl:1") == "Why?"
    for name, told in {
        "mine_of_tests:wrong": "returned no sample.*my.jsonl:1",
        "mine_of_tests:gone": "has no function 'gone'",
        "no_such_module_of_mine:chat": "cannot import 'no_such_module_of_mine'",
    }.items():
        with pytest.raises(DataError, match=told):
            formats.read(name, row, "my.jsonl:1")
