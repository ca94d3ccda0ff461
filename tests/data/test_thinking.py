"""What a template makes of thinking and of turns is told, chosen by a key, and set beside the text of serving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trl

from tests.data.conftest import CHATML, Settings, Write, conversation, make_tokenizer
from tests.refused import refused
from tuner.data import encoding, masks, thinking
from tuner.data.inspection import template_check
from tuner.data.prepare import prepare
from tuner.data.prepared import Prepared
from tuner.data.text_encoder import TextEncoder
from tuner.errors import DataError

QWEN3 = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text(encoding="utf-8")
ANSWER = "{% generation %}{{ message['content']"
DROPS = CHATML.replace(ANSWER, f"{ANSWER}.split('</think>')[-1].lstrip()")
THOUGHT = "<think>\nfour\n</think>\n\nfive"


def prepared_of(path: Path, template: str, **settings: Any) -> Prepared:
    whole: Any = Settings(str(path), **{"max_length": 256, "packing": False, **settings})
    return prepare(whole, TextEncoder(make_tokenizer(template)), objective="sft")


def texts(path: Path, template: str, **settings: Any) -> list[str]:
    """Return the text of each sample."""
    tokenizer = make_tokenizer(template)
    return [tokenizer.decode(row["input_ids"]) for row in prepared_of(path, template, **settings).dataset]


def said(path: Path, template: str, **settings: Any) -> tuple[list[str], str]:
    """Return the reasons for which rows are told as changed, and the text of the first sample."""
    reasons = [line["reason"] for line in prepared_of(path, template, **settings).changed()]
    return reasons, texts(path, template, **settings)[0]


def test_a_conversation_that_the_template_leaves_as_it_is_is_not_told(jsonl: Write) -> None:
    assert said(jsonl([conversation("one", THOUGHT)]), CHATML)[0] == []


@pytest.mark.parametrize(
    ("template", "answer", "reason"),
    [
        (DROPS, THOUGHT, thinking.LEFT_OUT),
        (CHATML, "<think>\n\n</think>\n\nfive", thinking.EMPTY),
        (QWEN3, "five", thinking.ADDED),
        (CHATML.replace("message['content'] +", "message['content'] | trim +"), "five\n", thinking.STRIPPED),
        (
            CHATML.replace("message['content'] +", "message['content'] | replace('five', 'six') +"),
            "five",
            thinking.CHANGED,
        ),
    ],
)
def test_what_the_template_changes_is_told_with_its_reason(
    jsonl: Write, template: str, answer: str, reason: str
) -> None:
    assert said(jsonl([conversation("one", answer)]), template)[0] == [reason]


SYSTEM, QUESTION, ANSWER_TURN = ({"role": role, "content": role} for role in ("system", "user", "assistant"))
LATER = {"role": "system", "content": "later"}
CALLS = {**ANSWER_TURN, "content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
RESULT = {"role": "tool", "content": '{"a": "b"}\n"c"', "name": "f"}
SYSTEM_LOST, NAME_LOST = masks.UNWRITTEN.format("system"), masks.NO_NAME


@pytest.mark.parametrize(
    ("template", "turns", "reasons"),
    [
        ("deepseek_r1_distill", [SYSTEM, LATER, QUESTION, ANSWER_TURN], [SYSTEM_LOST]),
        ("gptoss", [SYSTEM, QUESTION, ANSWER_TURN, LATER, QUESTION, ANSWER_TURN], [SYSTEM_LOST]),
        ("qwen3_vl", [QUESTION, LATER, QUESTION, ANSWER_TURN], [SYSTEM_LOST]),
        ("gemma4_v5", [QUESTION, RESULT, ANSWER_TURN], [masks.UNWRITTEN.format("tool")]),
        ("qwen2_5", [{**QUESTION, "name": "Bob"}, {**ANSWER_TURN, "name": "Ann"}], [NAME_LOST]),
        ("qwen2_5", [SYSTEM, LATER, QUESTION, QUESTION, CALLS, RESULT, ANSWER_TURN], []),
        ("gptoss", [SYSTEM, QUESTION, CALLS, RESULT, ANSWER_TURN], []),
        ("llama3_1", [SYSTEM, QUESTION, CALLS, RESULT, ANSWER_TURN], []),
    ],
)
def test_a_text_that_the_template_leaves_out_is_told(
    jsonl: Write, template: str, turns: list[dict[str, Any]], reasons: list[str]
) -> None:
    text = (Path(trl.__file__).parent / "chat_templates" / f"{template}.jinja").read_text(encoding="utf-8")

    changes = said(jsonl([{"messages": turns}]), text, max_length=2048)[0]

    assert [reason for reason in changes if "leaves out" in reason] == reasons


def test_a_text_that_the_template_leaves_out_of_a_prompt_is_told(jsonl: Write) -> None:
    text = (Path(trl.__file__).parent / "chat_templates" / "gptoss.jinja").read_text(encoding="utf-8")
    rows = [{"prompt": [SYSTEM, LATER, {**QUESTION, "name": "Bob"}]}, {"prompt": [SYSTEM, QUESTION]}]
    whole: Any = Settings(str(jsonl(rows)), max_length=2048, packing=False)

    changed = [*prepare(whole, TextEncoder(make_tokenizer(text)), objective="grpo").changed()]

    assert [(line["where"][-1], line["reason"]) for line in changed] == [("1", SYSTEM_LOST), ("1", NAME_LOST)]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [QUESTION], "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
        {"prompt": [QUESTION, CALLS, RESULT]},
    ],
)
def test_a_prompt_of_which_the_template_leaves_out_tools_is_bad(jsonl: Write, row: dict[str, Any]) -> None:
    path = jsonl([{"prompt": [QUESTION]}, row])
    whole: Any = Settings(str(path), packing=False)

    with refused(DataError, f"{path}:2"):
        prepare(whole, TextEncoder(make_tokenizer(CHATML)), objective="grpo")


def test_thinking_is_stripped_or_left_in_the_last_answer_alone(jsonl: Write) -> None:
    path = jsonl([conversation("one", THOUGHT.replace("four", "seven"), "two", THOUGHT)])

    assert [word in said(path, CHATML)[1] for word in ("seven", "four")] == [True, True]
    assert [word in said(path, CHATML, thinking="keep")[1] for word in ("seven", "four")] == [True, True]
    assert [word in said(path, CHATML, thinking="last")[1] for word in ("seven", "four")] == [False, True]
    assert [word in said(path, CHATML, thinking="strip")[1] for word in ("seven", "four", "think")] == [False] * 3


def test_thinking_in_a_key_of_its_own_is_stripped_too(jsonl: Write) -> None:
    row = conversation("one", "five")
    row["messages"][1]["reasoning_content"] = "four"

    assert "four" in said(jsonl([row]), QWEN3)[1]
    assert "four" not in said(jsonl([row]), QWEN3, thinking="strip")[1]


def test_a_template_without_marks_that_drops_the_thinking_of_the_history_is_trained_and_told(jsonl: Write) -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{% if loop.last %}{{ m['content'] }}{% else %}{{ m['content'].split('</think>')[-1].lstrip() }}{% endif %}"
        "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    path = jsonl([conversation("one", THOUGHT.replace("four", "seven"), "two", THOUGHT)])

    first, last = texts(path, template)

    assert said(path, template)[0] == [encoding.SPLIT]
    assert "seven" in first and "four" not in first
    assert "four" in last and "seven" not in last
    assert said(path, template, thinking="last")[0] == []
    with refused(DataError, f"{path}:1"):
        said(path, template, thinking="keep")


def test_thinking_that_is_to_be_kept_and_is_not_is_refused_with_the_place(jsonl: Write) -> None:
    path = jsonl([conversation("one", "two"), conversation("one", THOUGHT)])

    with refused(DataError, f"{path}:2"):
        said(path, DROPS, thinking="keep")


def test_qwen3_is_trained_as_it_is_served(jsonl: Write) -> None:
    rows = [conversation("one", THOUGHT), conversation("one", THOUGHT, "three", THOUGHT), conversation(*"abcd")]
    settings: Any = Settings(str(jsonl(rows)))

    assert list(template_check(settings, TextEncoder(make_tokenizer(QWEN3)), "sft")) == []


def test_an_empty_thought_of_qwen3_is_in_the_last_answer_of_a_sample_and_never_in_its_history(jsonl: Write) -> None:
    path = jsonl([conversation("one", "two", "three", "four")])
    tokenizer = make_tokenizer(QWEN3)
    turns = conversation("one", "two", "three", "four")["messages"]

    assert texts(path, QWEN3) == [tokenizer.apply_chat_template(turns[:end], tokenize=False) for end in (2, 4)]
    assert said(path, QWEN3)[0] == [thinking.ADDED, encoding.SPLIT]


def test_thinking_that_qwen3_would_drop_from_the_history_is_not_kept(jsonl: Write) -> None:
    path = jsonl([conversation("one", THOUGHT, "three", THOUGHT.replace("four", "seven"))])

    with refused(DataError, f"{path}:1"):
        said(path, QWEN3, thinking="keep")
    assert "four" in said(jsonl([conversation("one", THOUGHT)], "one.jsonl"), QWEN3, thinking="keep")[1]


def test_a_template_that_reads_alike_has_no_difference(jsonl: Write) -> None:
    settings: Any = Settings(str(jsonl([conversation("one", "two", "three", "four")])))

    assert list(template_check(settings, TextEncoder(make_tokenizer()), "sft")) == []
