"""Calls of tools, in any tool's words, become those of chat templates, or the row is bad: none is lost or garbled."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.data.conftest import WITH_TOOLS, Prepare
from tests.refused import refused
from tuner.data import formats
from tuner.data.sample import Chat, Feedback, Message, Pair, Prompt
from tuner.errors import DataError

USER = {"role": "user", "content": "What is 1 + 2?"}
RESULT = {"role": "tool", "content": "3", "name": "add", "tool_call_id": "7"}
ANSWER = {"role": "assistant", "content": "3"}
SCHEMA = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer", "default": None}}}}
WRAPPED = {"type": "function", "function": SCHEMA}
CALL = {"name": "add", "arguments": {"a": 1}}
OTHER = {"name": "sub", "arguments": {}}


def calls(*functions: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": function} for function in functions]


def asked(turn: dict[str, Any], **columns: Any) -> Message:
    """Return the second turn of a conversation."""
    chat = formats.read_sample("messages", {"messages": [USER, turn, RESULT, ANSWER], **columns}, "x")
    assert isinstance(chat, Chat)
    return chat.messages[1]


def wrong(turn: dict[str, Any], **columns: Any) -> str:
    with refused(DataError, "x") as error:
        asked(turn, **columns)
    assert error.value.of_row
    return error.value.what


@pytest.mark.parametrize(
    "turn",
    [
        {"content": None, "tool_calls": calls(CALL)},
        {"tool_calls": calls({"name": "add", "arguments": '{"a": 1}'})},
        {"content": "", "tool_calls": [CALL]},
        {"content": "", "tool_calls": [json.dumps(CALL)]},
        {"content": "", "tool_calls": json.dumps([CALL])},
        {"content": "", "tool_calls": CALL},
        {"content": "", "tool_calls": [{"name": "add", "parameters": {"a": 1}}]},
        {"content": None, "function_call": {"name": "add", "arguments": '{"a": 1}'}},
        {"function_call": CALL, "tool_calls": None},
        {"content": "", "function_call": json.dumps(CALL), "tool_calls": []},
    ],
)
def test_a_call_is_the_same_in_the_new_and_the_old_words_of_openai(turn: dict[str, Any]) -> None:
    assert asked({"role": "assistant", **turn}) == {"role": "assistant", "content": "", "tool_calls": calls(CALL)}


@pytest.mark.parametrize("written", ["", "  ", "null", None, {}, "{}", "missing"])
def test_arguments_that_are_empty_null_or_missing_are_an_empty_object(written: Any) -> None:
    function = {"name": "sub"} if written == "missing" else {"name": "sub", "arguments": written}

    assert asked({"role": "assistant", "tool_calls": calls(function)})["tool_calls"] == calls(OTHER)
    assert asked({"role": "assistant", "function_call": function})["tool_calls"] == calls(OTHER)


@pytest.mark.parametrize("key", ["tool_calls", "function_call"])
@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": 1',
        "[1]",
        "1",
        '"a"',
        "a=1",
        [1],
        3,
        {"a": float("nan")},
        '{"a": NaN}',
        '{"a": 1, "a": 2}',
        '{"a": {"b": 1, "b": 1}}',
    ],
)
def test_arguments_that_are_no_json_object_make_the_row_bad(key: str, arguments: Any) -> None:
    function = {"name": "add", "arguments": arguments}

    assert "turn 2" in wrong({"role": "assistant", key: calls(function) if key == "tool_calls" else function})


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "tool_calls": "add(1)"},
        {"role": "assistant", "tool_calls": ["add(1)"]},
        {"role": "assistant", "tool_calls": [7]},
        {"role": "assistant", "tool_calls": calls({"arguments": {}})},
        {"role": "assistant", "tool_calls": calls({"name": "", "arguments": {}})},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": "add"}]},
        {"role": "assistant", "tool_calls": calls({"name": "add", "args": {"a": 1}})},
        {"role": "assistant", "tool_calls": [CALL], "function_call": OTHER},
        {"role": "user", "content": "q", "tool_calls": [CALL]},
        {"role": "user", "content": "q", "function_call": CALL},
        {"role": "tool_call", "content": "add(1)"},
        {"from": "function_call", "value": "Sure: " + json.dumps(CALL)},
        {"from": "function_call", "value": json.dumps(CALL)[:-2]},
        {"from": "function_call", "value": ""},
        {"from": "function_call", "value": "[]"},
        {"from": "function_call", "value": "[1]"},
        {"from": "function_call", "value": '{"name": "add", "arguments": "{"}'},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1, "a": 2}}'},
        {"from": "function_call", "value": '{"name": "add", "name": "sub"}'},
        {"role": "assistant", "tool_calls": '[{"name": "add", "arguments": {"a": 1, "a": 2}}]'},
        {"role": "assistant", "tool_calls": "[{'name': 'add', 'arguments': {'a': 1, 'a': 2}}]"},
    ],
)
def test_what_is_no_call_makes_the_row_bad(turn: dict[str, Any]) -> None:
    assert "turn 2" in wrong(turn)


@pytest.mark.parametrize("words", [("from", "value", "function_call"), ("role", "content", "tool_call")])
@pytest.mark.parametrize(
    ("value", "content", "functions"),
    [
        (json.dumps(CALL), "", [CALL]),
        (json.dumps({**CALL, "arguments": json.dumps(CALL["arguments"])}), "", [CALL]),
        (json.dumps([CALL, OTHER]), "", [CALL, OTHER]),
        ([CALL, OTHER], "", [CALL, OTHER]),
        (CALL, "", [CALL]),
        (f"{json.dumps(CALL)}\n{json.dumps(OTHER)}", "", [CALL, OTHER]),
        (f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>\n<tool_call>\n{json.dumps(OTHER)}\n</tool_call>", "",
         [CALL, OTHER]),
        (f"<think>\nA sum.\n</think>\n\n{json.dumps(CALL)}", "<think>\nA sum.\n</think>", [CALL]),
        (f"<think>A sum: {{</think>{json.dumps([CALL, OTHER])}", "<think>A sum: {</think>", [CALL, OTHER]),
        ('{"name": "sub", "arguments": ""}', "", [OTHER]),
        ('{"name": "sub"}', "", [OTHER]),
        (json.dumps(calls(CALL)), "", [CALL]),
    ],
)  # fmt: skip
def test_a_turn_of_calls_becomes_all_of_its_calls(
    words: tuple[str, str, str], value: Any, content: str, functions: list[dict[str, Any]]
) -> None:
    role, text, caller = words

    turn = asked({role: caller, text: value})

    assert turn == {"role": "assistant", "content": content, "tool_calls": calls(*functions)}


def test_turns_of_calls_join_the_turn_of_the_assistant_before_them() -> None:
    turns = [
        {"from": "human", "value": "q"},
        {"from": "gpt", "value": "I look it up."},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "function_call", "value": json.dumps(OTHER)},
        {"from": "observation", "value": '["3", "0"]'},
        {"from": "gpt", "value": "3"},
    ]

    chat = formats.read_sample("sharegpt", {"conversations": turns, "tools": json.dumps([SCHEMA])}, "x")

    assert isinstance(chat, Chat)
    assert chat.tools == [WRAPPED]
    assert [turn["role"] for turn in chat.messages] == ["user", "assistant", "tool", "assistant"]
    assert chat.messages[1] == {"role": "assistant", "content": "I look it up.", "tool_calls": calls(CALL, OTHER)}
    assert chat.messages[2]["content"] == '["3", "0"]'


def test_a_turn_of_sharegpt_may_have_openai_s_keys() -> None:
    turns = [
        {"from": "human", "value": "q"},
        {"from": "gpt", "value": None, "tool_calls": [CALL], "reasoning_content": "A sum."},
        {"from": "tool", "value": "3", "tool_call_id": "7", "name": "add"},
        {"from": "gpt", "value": "3"},
    ]

    chat = formats.read_sample("sharegpt", {"conversations": turns}, "x")

    assert isinstance(chat, Chat)
    thought = {"role": "assistant", "content": "", "tool_calls": calls(CALL), "reasoning_content": "A sum."}
    assert chat.messages[1:3] == [thought, RESULT]


@pytest.mark.parametrize("key", ["tools", "functions"])
@pytest.mark.parametrize(
    "written",
    [[WRAPPED], [SCHEMA], json.dumps([SCHEMA]), json.dumps(SCHEMA), [json.dumps(WRAPPED)], SCHEMA, repr([WRAPPED])],
)
def test_tools_are_read_in_every_spelling(key: str, written: Any) -> None:
    chat = formats.read_sample("messages", {"messages": [USER, ANSWER], key: written}, "x")

    assert isinstance(chat, Chat)
    assert chat.tools == [WRAPPED]


@pytest.mark.parametrize("columns", [{"tools": "add"}, {"tools": 3}, {"tools": ["add"]}, {"functions": [3]}])
def test_tools_that_are_no_schemas_make_the_row_bad(columns: dict[str, Any]) -> None:
    assert "JSON" in wrong(ANSWER, **columns)
    assert "functions" in wrong(ANSWER, tools=[SCHEMA], functions=[SCHEMA])


@pytest.mark.parametrize(
    "turn", [{"role": "assistant", "function_call": CALL}, {"from": "function_call", "value": json.dumps(CALL)}]
)
def test_pairs_feedback_and_prompts_have_the_calls_too(turn: dict[str, Any]) -> None:
    history = [USER, turn, RESULT]
    called = {"role": "assistant", "content": "", "tool_calls": calls(CALL)}

    pair = formats.read_sample(
        "preference", {"prompt": [USER], "chosen": [turn], "rejected": [ANSWER], "functions": [SCHEMA]}, "x"
    )
    judged = formats.read_sample(
        "feedback", {"prompt": [USER], "completion": [turn], "label": True, "functions": [SCHEMA]}, "x"
    )
    prompt = formats.read_sample("prompt", {"prompt": history, "functions": [SCHEMA]}, "x")

    assert pair == Pair([USER], [called], [ANSWER], [WRAPPED])
    assert judged == Feedback([USER], [called], True, [WRAPPED])
    assert isinstance(prompt, Prompt)
    assert (prompt.prompt, prompt.tools) == ([USER, called, RESULT], [WRAPPED])


def test_a_prompt_that_the_model_answers_shows_the_tools(prepared: Prepare, tokenizer: Any) -> None:
    tokenizer.chat_template = WITH_TOOLS
    rows = [{"prompt": [USER], "tools": [SCHEMA]}]

    made = prepared(rows, "grpo", max_length=512, packing=False)

    text = tokenizer.decode(made.dataset[0]["prompt_ids"])
    assert json.dumps(WRAPPED["function"]["name"]) in text
    assert text.endswith("<|im_start|>assistant\n")
