"""What one row becomes: a conversation, a text, a pair of answers or a judged answer.

It reads no rows: `formats` makes samples, `masks` turns them into tokens, `sample_kinds` chooses them for an objective.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Message = dict[str, Any]
"""A turn in the words of chat templates: role, content, perhaps tool_calls, reasoning_content ...

`weight`, 0 to 1, is the part of its loss that an assistant's turn carries, with the token that ends it; without the key
all of it. `spans` are `Mark`s in its content with other weights.
"""
Mark = tuple[int, int, float]
"""The first character of a span, the one after its last, and the weight of its tokens."""
_MARKS = ("weight", "spans", "is_result")
TrainedTurns = Literal["all", "last", "marked", "everything"]
"""Which turns carry loss; see `formats.chosen_turns`."""


@dataclass(frozen=True)
class Image:
    """An image as its row stores it: an absolute path, or the bytes of a file."""

    path: str | None = None
    data: bytes | None = None

    def __str__(self) -> str:
        return f"the image {self.path}" if self.path is not None else f"an image of {len(self.data or b''):,} bytes"


@dataclass(frozen=True)
class Chat:
    """A conversation that ends with the assistant's turn.

    `tools` are JSON schemas for the chat template, `chat_template_kwargs` further names for it, of the row.
    """

    messages: list[Message]
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


@dataclass(frozen=True)
class Pair:
    """A prompt and two ways to go on from it. A plain text is one message: the user's prompt, the assistant's answer.

    `prompt` ends before the assistant's turn; `chosen` and `rejected` are the turns after it.
    """

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


@dataclass(frozen=True)
class Feedback:
    """A prompt, the turns after it, and whether they are good (`label`). A plain text is one message, as in `Pair`."""

    prompt: list[Message]
    completion: list[Message]
    label: bool
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


@dataclass(frozen=True)
class Prompt:
    """What the model answers while it trains, and the other columns of the row, which rewards get.

    `text` is a prompt that is a text: it is not rendered with the chat template.
    """

    prompt: list[Message]
    columns: dict[str, Any]
    text: str | None = None
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


Sample = Chat | str | Pair | Feedback | Prompt


def text_of(content: Any) -> str:
    """Return the text of a turn's content, without its images."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def spoken(turn: Message) -> str:
    """Return the text of a turn, with a line of JSON for each of its calls of tools."""
    calls = [call["function"] for call in turn.get("tool_calls") or ()]
    lines = [json.dumps(call, ensure_ascii=False, default=str) for call in calls]
    return "\n".join(filter(None, [text_of(turn.get("content") or ""), *lines]))


def has_loss(turn: Message) -> bool:
    """Return whether a turn, or a span of it, carries loss."""
    return turn["role"] == "assistant" and (turn.get("weight") != 0 or any(weight for *_, weight in marks_in(turn)))


def marks_in(turn: Message) -> list[Mark]:
    """Return the spans of a turn that have weights of their own, in their order."""
    return turn.get("spans") or []


def rewritten(turn: Message, content: str, place: Callable[[int], int]) -> Message:
    """Return a turn with another content, in which each character that a span begins or ends at has another `place`."""
    marks = [(place(begin), place(end), weight) for begin, end, weight in marks_in(turn)]
    spans = {"spans": [mark for mark in marks if mark[0] < mark[1]]} if marks else {}
    return {**turn, "content": content, **spans}


def is_whole(turn: Message) -> bool:
    """Return whether a turn carries its whole loss, or none."""
    return turn.get("weight", 1) in (0, 1) and not marks_in(turn)


def unmarked(turn: Message) -> Message:
    """Return a turn without what it says about its own loss."""
    return {key: value for key, value in turn.items() if key not in _MARKS}


def images_of(messages: Sequence[Message]) -> list[Image]:
    """Return the images of a conversation in their order. A content with images is a list of parts."""
    contents = [turn["content"] for turn in messages if isinstance(turn["content"], list)]
    return [part["image"] for content in contents for part in content if part["type"] == "image"]


def turns_of(sample: Chat | Pair | Feedback | Prompt) -> list[Message]:
    """Return the turns of a conversation, or of the prompt before answers."""
    return sample.messages if isinstance(sample, Chat) else sample.prompt


Thinking = Literal["keep", "strip", "last"]
"""What becomes of the thinking of answers; see `thinking`."""
Owner = Literal["column", "loss column", "turn", "part", "call", "conversation"]
"""What a key belongs to: the row, a turn, a part of a turn's content, or a call of a tool.

A `loss column` is named like a key of a turn that says whether the turn is trained; of a `conversation` turns are left
out."""
IGNORED = -100
"""The label of a token that carries no loss."""

EQUAL, NO_ANSWER = "both answers are the same", "there is no answer"


def lacks(sample: Sample) -> str | None:
    """Return why a sample holds nothing to learn, None where it does; callers count it as dropped."""
    if isinstance(sample, str):
        return None if sample.strip() else "the text is empty"
    if isinstance(sample, Pair):
        return None if sample.chosen != sample.rejected else EQUAL
    if isinstance(sample, Prompt):
        return None if sample.prompt else "there is no prompt"
    turns = sample.messages if isinstance(sample, Chat) else sample.completion
    answers = [turn for turn in turns if turn["role"] == "assistant"]
    if not answers:
        return NO_ANSWER
    says = ("content", "tool_calls", "reasoning_content")
    return None if any(any(map(turn.get, says)) for turn in answers) else "every answer is empty"
