"""What is trained follows what a server renders, by the model's own template, for every family and kind of turn."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.data.test_masks_families import (
    ANSWER,
    CALLING,
    FILES,
    LAST,
    MORE,
    NO_SYSTEM,
    RESULT,
    SYSTEM,
    TOOL,
    TOOLED,
    USER,
    template_of,
)
from tests.each import each
from tuner.data import rendering, thinking
from tuner.data.rendering import Rendered, Template
from tuner.data.sample import Chat, Message

THIRD: Message = {"role": "user", "content": "askedthree"}
END: Message = {"role": "assistant", "content": "saidthree."}


def thinks(turn: Message, thought: str) -> Message:
    return {**turn, "reasoning_content": thought}


def inline(turn: Message, thought: str) -> Message:
    return {**turn, "content": f"<think>\n{thought}\n</think>\n\n{turn['content']}"}


PLAIN = {
    "one": [USER, ANSWER],
    "three": [USER, ANSWER, MORE, LAST, THIRD, END],
    "after a system turn": [SYSTEM, USER, ANSWER, MORE, LAST],
}
THINKING = {
    "of all": [USER, thinks(ANSWER, "thoughtone"), MORE, thinks(LAST, "thoughttwo")],
    "of the first": [USER, thinks(ANSWER, "thoughtone"), MORE, LAST, THIRD, END],
    "in the text": [USER, inline(ANSWER, "thoughtone"), MORE, inline(LAST, "thoughttwo")],
}
WITH_TOOLS = {
    "a call": [USER, CALLING, RESULT, ANSWER, MORE, LAST],
    "two calls": [USER, CALLING, RESULT, CALLING, RESULT, ANSWER],
    "a call at the end": [USER, ANSWER, MORE, CALLING],
    "a call of a thinker": [USER, thinks(CALLING, "thoughtone"), RESULT, thinks(ANSWER, "thoughttwo"), MORE, LAST],
}
# The header of its turn is not marked as the assistant's, and its own prompt after a tool's result lacks it.
MARKS_LESS = {"trl/diffusion_gemma_training"}
CASES = [
    (name, kind)
    for kinds, names in ((PLAIN, FILES.keys()), (THINKING, FILES.keys()), (WITH_TOOLS, TOOLED - MARKS_LESS))
    for name, kind in itertools.product(sorted(names), kinds)
    if not (name in NO_SYSTEM and kind == "after a system turn")
]
TURNS_OF = PLAIN | THINKING | WITH_TOOLS


def served(template: Template, turns: list[Message], tools: Any, **options: Any) -> str:
    """Return what transformers renders with the tokenizer's own template, as a server does."""
    if template.moves_thoughts:  # a server takes them off an answer, and gives them back in a key of their own
        turns = [thinking.apart(turn) if turn["role"] == "assistant" else turn for turn in turns]
    if template.in_parts:
        turns = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in turns]
    text: str = template.tokenizer.apply_chat_template(turns, tools=tools, tokenize=False, **options)
    return text


def trained_in(text: Rendered, number: int) -> tuple[str, str]:
    """Return the text before an answer, and the answer."""
    [spans_of_answer] = [spans for at, spans in _spans_by_answer(text) if at == number]
    return text.text[: spans_of_answer[0][0]], text.text[spans_of_answer[0][0] : spans_of_answer[-1][1]]


def _spans_by_answer(text: Rendered) -> list[tuple[int, list[tuple[int, int]]]]:
    joined: list[list[tuple[int, int]]] = []
    for span in text.spans:
        if joined and joined[-1][-1][1] == span[0]:
            joined[-1].append(span)
        else:
            joined.append([span])
    return list(zip(text.answers, joined, strict=True))


@each(CASES, every=3)
def test_each_answer_follows_what_a_server_renders_before_it(name: str, kind: str) -> None:
    template, turns = template_of(name), TURNS_OF[kind]
    tools = [TOOL] if kind in WITH_TOOLS else None

    texts = rendering.texts_of(template, Chat(turns, tools))

    answers = [at for at, turn in enumerate(turns) if turn["role"] == "assistant"]
    assert [at for text in texts for at in text.answers] == answers
    for text in texts:
        for at in text.answers:
            before, answer = trained_in(text, at)
            prompt = served(template, turns[:at], tools, add_generation_prompt=True)
            if before != prompt:  # a thought needs a server that lets the model think
                prompt = served(template, turns[:at], tools, add_generation_prompt=True, enable_thinking=True)
            assert before == prompt
            assert turns[at]["content"].rpartition("\n")[2] in answer
            whole = served(template, turns[: at + 1], tools)
            if whole.startswith(prompt):
                assert answer.startswith(whole[len(prompt) :].rstrip().removesuffix(template.after_end))


@each(sorted(FILES))
def test_history_that_does_not_change_is_rendered_once(name: str) -> None:
    template = template_of(name)
    turns = PLAIN["three"]
    ended = [served(template, turns[:end], None).removesuffix(template.after_end).rstrip() for end in (2, 4)]
    prompts = [served(template, turns[:end], None, add_generation_prompt=True) for end in (1, 3, 5)]
    whole = served(template, turns, None)

    texts = rendering.texts_of(template, Chat(turns))

    is_kept = all(whole.startswith(text) for text in [*ended, *prompts])
    assert len(texts) == (1 if is_kept else 3)


@pytest.mark.parametrize(("name", "parts"), [("trl/qwen3", 2), ("trl/qwen3_instruct_2507", 1), ("trl/gptoss", 2)])
def test_what_qwen_3_and_gpt_oss_change_in_the_history_is_split(name: str, parts: int) -> None:
    texts = rendering.texts_of(template_of(name), Chat([USER, ANSWER, MORE, LAST]))

    assert len(texts) == parts
    assert [text.text.count("<think>") for text in texts] == ([1, 1] if name == "trl/qwen3" else [0] * parts)


@pytest.mark.parametrize("name", ["trl/gptoss", "trl/qwen3_8", "trl/gemma4_v5", "trl/qwen3", "trl/deepseek_r1_distill"])
def test_thinking_in_the_text_of_an_answer_is_trained_as_that_of_a_key_of_its_own(name: str) -> None:
    template = template_of(name)

    inside, other = (
        "".join(rendering.texts_of(template, Chat([USER, answer]))[0].text.split())
        for answer in (inline(ANSWER, "thoughtone"), thinks(ANSWER, "thoughtone"))
    )

    assert inside == other and "thoughtone" in inside


def test_an_empty_thought_in_the_text_of_an_answer_is_no_empty_channel() -> None:
    [text] = rendering.texts_of(template_of("trl/gptoss"), Chat([USER, inline(ANSWER, "")]))

    assert "analysis<|message|>" not in text.text and "<think>" not in text.text
