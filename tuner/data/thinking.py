"""The thinking of answers: what the recipe wants of it, and what a chat template makes of it and of the answer.

It renders nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from tuner.data.sample import Chat, Message, Thinking, text_of

_BLOCK = re.compile(r"\A\s*<think>(.*?)</think>\s*", re.DOTALL)
_EMPTY = re.compile(r"<think>\s*</think>")
LEFT_OUT = "the chat template drops the thinking of an answer"
ADDED = "the chat template puts an empty <think></think> before an answer"
EMPTY = "an answer of the row begins with an empty <think></think>"
CHANGED = "the chat template changes the text of an answer"
STRIPPED = "the chat template strips white space off an answer"


def applied(chat: Chat, thinking: Thinking | None) -> Chat:
    """Return a conversation without thinking ('strip'), or with that of the last answer alone ('last')."""
    if thinking not in ("strip", "last"):
        return chat
    answers = [number for number, turn in enumerate(chat.messages) if turn["role"] == "assistant"]
    kept = answers[-1:] if thinking == "last" else []
    bare = set(answers) - set(kept)
    return replace(chat, messages=[shorn(turn) if at in bare else turn for at, turn in enumerate(chat.messages)])


def shorn(turn: Message) -> Message:
    """Return an answer without its thinking, whether that stands in a key of its own or before what is said."""
    rest = {key: value for key, value in turn.items() if key != "reasoning_content"}
    return {**rest, "content": _BLOCK.sub("", turn["content"])}


def differences(chat: Chat, text: str) -> list[str]:
    """Return what the text of a conversation has otherwise than its answers, each thing once."""
    return list(dict.fromkeys(_differences(chat, text)))


def _differences(chat: Chat, text: str) -> Iterator[str]:
    answers = [turn for turn in chat.messages if turn["role"] == "assistant"]
    for turn in answers:
        block = _BLOCK.match(turn["content"])
        thought = turn.get("reasoning_content") or (block[1] if block else "")
        if block and not block[1].strip():
            yield EMPTY
        if thought.strip() not in text:
            yield LEFT_OUT
        answer = turn["content"][block.end() :] if block else turn["content"]
        if answer.strip() not in text:
            yield CHANGED
        elif answer not in text:
            yield STRIPPED
    if len(_EMPTY.findall(text)) > sum(len(_EMPTY.findall(text_of(turn["content"]))) for turn in chat.messages):
        yield ADDED
