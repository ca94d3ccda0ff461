"""The plan foresees which conversations the chat template splits by answer, without the library that renders them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trl

from tests.data.conftest import CHATML, Write, conversation, make_tokenizer
from tuner.data import formats, token_estimate
from tuner.data.sample import Chat
from tuner.data.text_encoder import TextEncoder
from tuner.recipes.schema import Rows

FOLDER = Path(trl.__file__).parent / "chat_templates"
NAMES = (
    *("qwen3", "llama3", "qwen2_5", "gptoss", "deepseek_r1_distill"),
    *("nemotron_3_nano", "gemma3", "glm4moe", "deepseekv3", "lfm2"),
)
TEMPLATES = {
    "chatml": CHATML,
    "other end": CHATML.replace("'<|im_end|>\n' }}{% endgen", "('</s>' if loop.last else '<|im_end|>\n') }}{% endgen"),
    "after end": CHATML.replace("{% if add_gen", "{% if not add_generation_prompt %}</s>{% endif %}{% if add_gen"),
    **{name: (FOLDER / f"{name}.jinja").read_text(encoding="utf-8") for name in NAMES},
}
THOUGHT = "<think>\nfour\n</think>\n\nfive"
CHATS = {
    "one answer": conversation("one", "two"),
    "two answers": conversation("one", "two", "three", "four"),
    "thoughts": conversation("one", THOUGHT, "three", THOUGHT),
    "six answers": conversation(*(f"word {number}" for number in range(12))),
    "no loss": {"messages": [*conversation("one", "two", "three", "four")["messages"][:3], {"role": "assistant",
                             "content": "four", "weight": 0}]},
}  # fmt: skip


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_samples_of_a_conversation_are_as_many_as_training_has(template: str, jsonl: Write) -> None:
    encoder = TextEncoder(make_tokenizer(TEMPLATES[template]))
    rows = Rows(path="rows", format="messages")
    trained = [len(encoder.encode([("x", Chat(chat["messages"]))])[0]) for chat in CHATS.values()]

    file = jsonl(list(CHATS.values()))
    foreseen = token_estimate.lengths([file], rows, "sft", None, TEMPLATES[template])

    assert [len(parts) for parts in foreseen] == trained
    whole = token_estimate.lengths([file], rows, "pretrain", None, TEMPLATES[template])
    assert [len(parts) for parts in whole] == [1] * 5


@pytest.mark.parametrize("template", ["chatml", NAMES[0]])
@pytest.mark.parametrize("choice", ["last", "marked"])
def test_the_samples_of_chosen_turns_are_as_many_as_training_has(template: str, choice: Any, jsonl: Write) -> None:
    encoder, every = TextEncoder(make_tokenizer(TEMPLATES[template])), [*CHATS.values()][:4]
    chats: list[Any] = [formats.read_sample("messages", chat, "x", trained=choice) for chat in every]
    trained = [len(encoder.encode([("x", chat)])[0]) for chat in chats]
    rows = Rows(path="rows", format="messages")

    found = token_estimate.lengths([jsonl(every)], rows, "sft", None, TEMPLATES[template], trained=choice)
    of_all = token_estimate.lengths([jsonl(every)], rows, "sft", None, TEMPLATES[template], trained="everything")

    assert [len(parts) for parts in found] == trained == [1] * 4
    assert [len(parts) for parts in of_all] == [1] * 4


def test_a_row_that_is_left_out_has_no_sample(jsonl: Write) -> None:
    rows: list[Any] = [conversation("one", "two"), {**conversation("one", "two"), "train": False}]

    found = token_estimate.lengths([jsonl(rows)], Rows(path="rows", format="messages"), "sft", None, CHATML)

    assert [len(parts) for parts in found] == [1, 0]


@pytest.mark.parametrize("template", ["chatml", "after end", "glm4moe", "deepseekv3"])
def test_a_conversation_that_begins_with_the_assistant_is_estimated(template: str, jsonl: Write) -> None:
    turns = conversation("one", "two", "three", "four")["messages"][1:]
    [trained] = TextEncoder(make_tokenizer(TEMPLATES[template])).encode([("x", Chat(turns))])
    file, rows = jsonl([{"messages": turns}]), Rows(path="rows", format="messages")

    [lengths] = token_estimate.lengths([file], rows, "sft", None, TEMPLATES[template])

    assert len(lengths) == len(trained)


def test_an_answer_of_calls_alone_is_estimated_without_a_template(jsonl: Write) -> None:
    call = {"type": "function", "function": {"name": "ask", "arguments": {}}}
    file = jsonl([{"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]}])

    assert token_estimate.lengths([file], Rows(path="rows", format="messages"), "sft", None, None) == ((0,),)
