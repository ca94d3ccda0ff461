"""The thinking of answers: what the recipe wants of it, and what a chat template makes of it and of the answer.

It renders nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from tuner.data.sample import Chat, Message, Thinking, rewritten, text_of

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
    bare = set(answers[:-1] if thinking == "last" else answers)
    return replace(chat, messages=[shorn(turn) if at in bare else turn for at, turn in enumerate(chat.messages)])


def shorn(turn: Message) -> Message:
    """Return an answer without its thinking, whether that stands in a key of its own or before what is said."""
    other_keys = {key: value for key, value in turn.items() if key != "reasoning_content"}
    content = _BLOCK.sub("", turn["content"])
    return rewritten(other_keys, content, lambda at: max(0, at - len(turn["content"]) + len(content)))


def thought_of(turn: Message) -> str:
    """Return the thinking of an answer, whether it stands in a key of its own or before what is said; empty if none."""
    block = _BLOCK.match(text_of(turn["content"]))
    return str(turn.get("reasoning_content") or (block[1] if block else ""))


def apart(turn: Message) -> Message:
    """Return an answer with its thinking under `reasoning_content` alone."""
    thought = thought_of(turn).strip("\n")
    return {**shorn(turn), "reasoning_content": thought} if thought.strip() else shorn(turn)


def is_kept(turns: Sequence[Message], text: str) -> bool:
    """Return whether a text holds the thinking of every answer of these turns."""
    return all(thought_of(turn).strip() in text for turn in turns if turn["role"] == "assistant")


def differences(turns: Sequence[Message], trained: Collection[int], text: str) -> Iterator[str]:
    """Yield what a text of some turns has otherwise than they have; `trained` are the answers in it.

    An answer that is history in a text, and trained in another, is judged there.
    """
    for number, turn in enumerate(turns):
        if turn["role"] != "assistant" or not (number in trained or turn.get("weight") == 0):
            continue
        content = text_of(turn["content"])
        block = _BLOCK.match(content)
        if block and not block[1].strip():
            yield EMPTY
        if thought_of(turn).strip() not in text:
            yield LEFT_OUT
        answer = content[block.end() :] if block else content
        if answer.strip() not in text:
            yield CHANGED
        elif answer not in text:
            yield STRIPPED
    if len(_EMPTY.findall(text)) > sum(len(_EMPTY.findall(text_of(turn["content"]))) for turn in turns):
        yield ADDED
