"""Conversations into text by a chat template, and which characters of it are the assistant's.

It does not choose the template, and it does not tokenize.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from tuner.data import limits, thinking
from tuner.data.encoder import Unrendered
from tuner.data.formats.cells import SURROGATE
from tuner.data.sample import Chat
from tuner.errors import DataError

Span = tuple[int, int]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Template:
    """A chat template that tells the assistant's turns apart.

    `has_markers`: by `{% generation %}`; else by rendering the conversation up to each turn. `in_parts`: it reads
    contents as lists of parts alone. `image`: what a part that is an image becomes in a template that reads texts
    alone; empty: the template renders it itself. `cues`: what a marked turn may repeat of the generation prompt, which
    is not the assistant's to say. `controls`: the tokenizer's own tokens. `special`: matches those of them that a row's
    text must never become. `leaves_out`: what it renders as nothing.
    """

    tokenizer: Any
    text: str
    has_markers: bool
    controls: tuple[str, ...]
    special: re.Pattern[str]
    in_parts: bool = False
    image: str = ""
    cues: tuple[str, ...] = ()
    leaves_out: tuple[str, ...] = ()


def render(template: Template, chat: Chat, place: str) -> tuple[str, list[Span]]:
    """Return the conversation's text and the characters, start and end, of each assistant turn that carries loss.

    Raises:
        DataError: the template refuses the conversation or leaves a part of it out, or a turn depends on later ones.
    """
    try:
        with limits.processor_time(_slow()):
            _refuse_losses(template, chat)
            text, spans = rendered(template, chat)
            spans = (
                _of_turns(template, chat, text, spans)
                if template.has_markers
                else _spans_by_prefix(template, chat, text)
            )
            trimmed = [_trim(template, text, span) for span in _with_loss(chat, spans)]
    except Unrendered as error:
        fix = "Correct the row, or choose another model.chat_template."
        tools = " and its tools" if chat.tools or _has(chat, "tool_calls") else ""
        problem = f"the chat template cannot render the conversation{tools}: {error}"
        raise DataError(problem, where=place, of_row=True, fix=fix) from error
    return text, [span for span in trimmed if span[0] < span[1]]


def rendered(template: Template, chat: Chat, *, prompt: bool = False) -> tuple[str, list[Span]]:
    """Return the text, with `prompt` followed by the start of an answer, and the characters that the template marks.

    Raises:
        Unrendered: the template refuses the conversation.
    """
    messages = [{**turn, "content": _content(template, turn["content"])} for turn in chat.messages]
    try:
        with limits.processor_time(_slow()):
            texts, spans = render_jinja_template(
                conversations=[messages],
                tools=chat.tools,
                chat_template=template.text,
                return_assistant_tokens_mask=template.has_markers,
                add_generation_prompt=prompt,
                **template.tokenizer.special_tokens_map,
            )
    except MemoryError as error:
        raise Unrendered(f"it takes more than {limits.MAX_BYTES_AT_ONCE // 1024**3} GiB of memory") from error
    except Exception as error:  # a template is someone else's program: it can raise whatever it likes
        raise Unrendered(str(error).rstrip(".") or type(error).__name__) from error
    added = limits.size(texts[0]) - limits.MAX_ADDED_BYTES
    if added > 0 and added > limits.MAX_TIMES * limits.size(chat):
        raise Unrendered(f"it turns a conversation of {limits.size(chat):,} bytes into {len(texts[0]):,} characters")
    if SURROGATE.search(texts[0]):  # of tools and tool calls, which no format looks into
        raise Unrendered("it holds half of a surrogate pair, which no tokenizer accepts")
    return texts[0], spans[0] if template.has_markers else []


def _content(template: Template, content: Any) -> Any:
    """Return the content of a turn in the form that the template reads."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if template.in_parts else content
    if not template.image:
        # The template sees no bytes and no paths.
        return [part if part["type"] == "text" else {"type": part["type"]} for part in content]
    return "".join(part["text"] if part["type"] == "text" else template.image for part in content)


def _slow() -> Unrendered:
    return Unrendered(f"it takes more than {limits.MAX_TEMPLATE_S} s of processor time")


def _has(chat: Chat, key: str) -> bool:
    return any(turn.get(key) for turn in chat.messages)


def _refuse_losses(template: Template, chat: Chat) -> None:
    roles = {turn["role"] for turn in chat.messages if turn["content"]}
    is_in_chat = {
        "system turns": "system" in roles,
        "descriptions of tools": bool(chat.tools),
        "tool calls": _has(chat, "tool_calls"),
        "all but one of a turn's tool calls": any(len(turn.get("tool_calls") or ()) > 1 for turn in chat.messages),
        "tool results": "tool" in roles,
    }
    for name in template.leaves_out:
        if is_in_chat.get(name):
            raise Unrendered(f"it leaves out {name}")
    if "reasoning_content" in template.leaves_out and _has(chat, "reasoning_content"):
        warn_once("The chat template drops reasoning_content; the model learns the answers without it.")


def num_alike(one: Sequence[object], other: Sequence[object]) -> int:
    """Return how many values two sequences both begin with."""
    return sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(one, other, strict=False)))


@cache
def warn_once(message: str) -> None:
    """Log a warning that is true of the whole run and not of one row."""
    _LOG.warning(message)


def _of_turns(template: Template, chat: Chat, text: str, spans: list[Span]) -> list[Span]:
    """Return one span for each assistant turn, as far as the marks tell the turns apart."""
    count = sum(turn["role"] == "assistant" for turn in chat.messages)
    if len(spans) > count:
        # Phi 3's variant marks the end-of-sequence token behind the last turn too, Gemma's the parts of a turn.
        spans = _joined([span for span in spans if text[slice(*span)] not in ("", *template.controls)], count)
    if len(spans) != count and any(turn.get("weight") == 0 for turn in chat.messages):
        raise Unrendered(
            "it does not mark each assistant turn separately, so a single turn cannot be left out of the loss"
        )
    return spans


def _joined(spans: list[Span], count: int) -> list[Span]:
    """Join spans that adjoin, unless there is one for each of `count` turns already."""
    if len(spans) == count:
        return spans
    joined = spans[:1]
    for start, end in spans[1:]:
        adjoins = joined[-1][1] == start
        joined[-1:] = [(joined[-1][0], end)] if adjoins else [joined[-1], (start, end)]
    return joined


def _with_loss(chat: Chat, spans: list[Span]) -> list[Span]:
    weights = [turn.get("weight") for turn in chat.messages if turn["role"] == "assistant"]
    if 0 not in weights:
        return spans
    return [span for span, weight in zip(spans, weights, strict=True) if weight != 0]


def _spans_by_prefix(template: Template, chat: Chat, text: str) -> list[Span]:
    try:
        return _spans_up_to_each(template, chat, text)
    except Unrendered:
        # Gemma 4, Qwen 3 and DeepSeek R1 show the thinking of the turns after the last question alone.
        last = max((at for at, turn in enumerate(chat.messages) if turn["role"] == "user"), default=0)
        shorn = [
            thinking.shorn(turn) if at < last and turn["role"] == "assistant" else turn
            for at, turn in enumerate(chat.messages)
        ]
        if shorn == chat.messages or rendered(template, Chat(shorn, chat.tools))[0] != text:
            raise
        return _spans_up_to_each(template, Chat(shorn, chat.tools), text)


def _spans_up_to_each(template: Template, chat: Chat, text: str) -> list[Span]:
    spans = []
    for number, message in enumerate(chat.messages):
        if message["role"] == "assistant":
            before = rendered(template, Chat(chat.messages[:number], chat.tools), prompt=True)[0]
            after = rendered(template, Chat(chat.messages[: number + 1], chat.tools))[0]
            if not (text.startswith(after) and after.startswith(before)):
                raise Unrendered(
                    f"the text of turn {number + 1} changes when other turns follow, so it cannot be masked"
                )
            spans.append((len(before), len(after)))
    return spans


def _trim(template: Template, text: str, span: Span) -> Span:
    """Leave out the generation prompt's end and the white space after the end token: neither is generated."""
    start, end = span
    cue = next((cue for cue in template.cues if text.startswith(cue, start)), "")
    start += len(cue)
    shorter = text[start:end].rstrip()
    return (start, start + len(shorter)) if shorter.endswith(template.controls) else (start, end)
