"""Readers of the row formats of two collections in which the assistant uses tools by words of its own.

They know no other format than their own; `formats` names and chooses them.
"""

from __future__ import annotations

import re
from typing import Any

from tuner.data.formats import cells, chats
from tuner.data.formats.cells import Misfit, Row
from tuner.data.sample import Chat, Message

_MOSS_MARKS = re.compile(r"\A\s*<\|[^|]*\|>:\s?|\s*<eo\w>\s*\Z")
_EXECUTED = re.compile(r"(<\|startofexec\|>.*?<\|endofexec\|>)", re.DOTALL)


def read_moss(row: Row) -> Chat:
    """Read MOSS's `chat` of numbered turns; what a tool returned is the user's turn, so that any template takes it."""
    dialog = cells.column(row, "chat")
    if not isinstance(dialog, dict):
        raise Misfit(f"'chat' is {cells.kind(dialog)}, not an object")
    named = ((name, turn) for number in range(1, len(dialog) + 1) if (turn := dialog.get(name := f"turn_{number}")))
    messages: list[Message] = []
    if system := cells.text(row.get("meta_instruction") or "", "meta_instruction").strip():
        messages.append({"role": "system", "content": system})
    for name, turn in named:
        messages += _moss_turn(turn, name)
    return chats.chat(messages, row)


def _moss_turn(turn: Any, name: str) -> list[Message]:
    if not isinstance(turn, dict):
        raise Misfit(f"{name} is {cells.kind(turn)}, not an object")
    texts = {key: cells.text(turn.get(key) or "", f"{key} of {name}").strip() for key in _MOSS_KEYS}
    question, thoughts, commands, results, answer = (
        text if _unmarked(text) not in ("", "None") else "" for text in texts.values()
    )
    messages = [chats.user(_unmarked(question))]
    if commands:
        # Its marks are kept: they tell a program which part of the answer to run.
        messages += [chats.answer(_lines(thoughts, commands)), chats.user(results)]
        thoughts = ""
    return [*messages, chats.answer(_lines(thoughts, _unmarked(answer)))]


_MOSS_KEYS = ("Human", "Inner Thoughts", "Commands", "Tool Responses", "MOSS")


def _unmarked(text: str) -> str:
    return _MOSS_MARKS.sub("", text).strip()


def _lines(*parts: str) -> str:
    return "\n".join(part for part in parts if part)


def read_msagent(row: Row) -> Chat:
    """Read ShareGPT turns whose answers hold what a tool returned; that part becomes the user's turn, without loss."""
    whole = chats.read_sharegpt(row)
    messages: list[Message] = []
    for turn in whole.messages:
        messages += _without_results(turn) if turn["role"] == "assistant" else [turn]
    return Chat(messages, whole.tools)


def _without_results(turn: Message) -> list[Message]:
    parts = [part.strip() for part in _EXECUTED.split(turn["content"])]
    # A result that nothing follows has no answer to teach.
    parts = parts if parts[-1] else parts[:-2]
    return [chats.user(part) if _EXECUTED.match(part) else chats.answer(part) for part in parts if part]
