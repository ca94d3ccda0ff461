"""Conversations into text by a chat template, as a server renders them, and which characters each answer is.

It does not choose the template, and it does not tokenize. `text_of` is the one place that runs a chat template.
"""

from __future__ import annotations

import json
import logging
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cache
from typing import Any, NamedTuple

from transformers.utils.chat_template_utils import render_jinja_template

from tuner import assets
from tuner.data import compat_templates, limits, thinking
from tuner.data.encoder import Unrendered
from tuner.data.formats.cells import SURROGATE
from tuner.data.sample import Chat, Mark, Message, has_loss, marks_in
from tuner.errors import DataError

Span = tuple[int, int]

_LOG = logging.getLogger(__name__)
_OPEN_THOUGHT = re.compile(r"<think>\s*\Z")
_CLOSED_THOUGHT = "\n</think>\n\n"
"""How DeepSeek R1, QwQ and Qwen 3.5 close a thought that their prompt has opened."""
_THINKS = {"enable_thinking": True, "thinking": True}
"""What chat templates call the switch."""
_PROBE = "\ufdd1"
"""A Unicode noncharacter, as `masks` has another: no text for interchange holds it."""
_MAX_COMPARED = 16
"""Answers of a long conversation that are compared with what a server renders, where the template marks them all:
rendering the beginning of a conversation before each of 5,000 answers takes hours."""


@dataclass(frozen=True)
class Template:
    """A model's own chat template, and what it is known to do.

    `controls`: the tokenizer's own tokens. `special`: matches those of them that a row's text must never become.
    `day`: what `strftime_now` says; None: today. `in_parts`: it reads contents as lists of parts alone.
    `has_text_arguments`: it reads the arguments of a call as JSON text alone (DeepSeek V3). `image`: what a
    part that is an image becomes in a template that reads texts alone; empty: the template renders it itself. `end`:
    what it writes behind an answer. `after_end`: what it writes there only behind the last turn. `next_turns`: if it
    writes nothing, the tokens that begin the next turn after an answer and after tool calls, which a model generates to
    stop (GLM). `leaves_out`: what it renders as nothing. `moves_thoughts`: it writes thinking in its own way, so that
    before what is said, in <think> tags, is given to it as `reasoning_content`. `with_tools`: the tokenizer's named
    template for conversations with tools; None: this one.
    """

    tokenizer: Any
    text: str
    controls: tuple[str, ...]
    special: re.Pattern[str]
    day: date | None = None
    in_parts: bool = False
    has_text_arguments: bool = False
    image: str = ""
    end: str = ""
    after_end: str = ""
    next_turns: tuple[str, str] = ("", "")
    leaves_out: tuple[str, ...] = ()
    moves_thoughts: bool = False
    with_tools: Template | None = None

    def of(self, chat: Chat) -> Template:
        """Return the template that renders a conversation."""
        return self.with_tools if chat.tools and self.with_tools else self


class TooSlow(Unrendered):
    """Rendering takes more than `limits.MAX_TEMPLATE_S` of processor time."""

    def __init__(self) -> None:
        super().__init__(f"it takes more than {limits.MAX_TEMPLATE_S} s of processor time")


class Rendered(NamedTuple):
    """The first `num_turns` turns of a conversation as text, and what of it carries loss.

    `answers` are the numbers of the turns with loss, `spans` the characters of them, and `weights` how much those of
    each span weigh. `inner` are spans with other weights inside of them.
    """

    text: str
    spans: list[Span]
    answers: tuple[int, ...]
    num_turns: int
    weights: list[float]
    inner: list[Mark]


@cache
def has_marks(text: str) -> bool:
    """Return whether a chat template marks what the assistant says by `{% generation %}`."""
    return assets.without_generation_marks(text) != text


def render(template: Template, chat: Chat, place: str, *, is_whole: bool = False) -> list[Rendered]:
    """Return texts in which each answer with loss follows what a server renders before it, and ends as it does there.

    It is one text, unless the template renders an answer otherwise once other turns follow: then the next answer is in
    a text of its own. Nothing behind the last answer of a text carries loss.

    Args:
        is_whole: Return one text of all turns, as the template renders them, and no answers.

    Raises:
        DataError: the template refuses the conversation or leaves a part of it out, or its answers cannot be told.
    """
    try:
        return texts_of(template, chat, is_whole=is_whole)
    except Unrendered as error:
        fix = "Correct the row, or choose another model.chat_template."
        tools = " and its tools" if chat.tools or _has(chat, "tool_calls") else ""
        problem = f"the chat template cannot render the conversation{tools}: {error}"
        raise DataError(problem, where=place, of_row=True, fix=fix) from error


def texts_of(template: Template, chat: Chat, *, is_whole: bool = False) -> list[Rendered]:
    """Return what `render` returns. Raises Unrendered: as `render` says."""
    template = template.of(chat)
    with limits.processor_time(TooSlow()):
        refuse_losses(template, chat)
        return [_whole(template, chat)] if is_whole else _with_answers(template, chat)


def rendered(template: Template, chat: Chat, *, prompt: bool = False, thinks: bool = False) -> str:
    """Return the text of a conversation, with `prompt` followed by the start of an answer.

    With `thinks` it is what a server renders that is asked to let the model think. Errors as for `with_marks`.
    """
    return with_marks(template, chat, prompt=prompt, thinks=thinks, marks=False)[0]


def with_marks(
    template: Template, chat: Chat, *, prompt: bool = False, thinks: bool = False, marks: bool = True
) -> tuple[str, list[Span]]:
    """Return the text of a conversation and, with `marks`, the characters that the template marks.

    Raises:
        Unrendered: the template refuses the conversation.
    """
    template = template.of(chat)
    text, spans = text_of(
        template.text,
        [_message(template, turn) for turn in chat.messages],
        tools=chat.tools,
        prompt=prompt,
        marks=marks and has_marks(template.text),
        day=template.day,
        names=template.tokenizer.special_tokens_map | (chat.chat_template_kwargs or {}) | (_THINKS if thinks else {}),
    )
    added = limits.size(text) - limits.MAX_ADDED_BYTES
    if added > 0 and added > limits.MAX_TIMES * limits.size(chat):
        raise Unrendered(f"it turns a conversation of {limits.size(chat):,} bytes into {len(text):,} characters")
    if SURROGATE.search(text):  # of tools and tool calls, which no format looks into
        raise Unrendered("it holds half of a surrogate pair, which no tokenizer accepts")
    return text, spans


def text_of(
    template: str,
    messages: Sequence[Message],
    *,
    names: Mapping[str, Any],
    tools: Sequence[Any] | None = None,
    prompt: bool = False,
    marks: bool = False,
    day: date | None = None,
) -> tuple[str, list[Span]]:
    """Run a chat template within the limits of time and memory; return the text and the characters that it marks.

    Args:
        messages: The turns, in the form that the template reads.
        names: Further names that it knows, such as the tokenizer's `bos_token`.
        day: What `strftime_now` says; None: today.

    Raises:
        Unrendered: the template refuses the conversation, or takes too long or too much memory.
    """
    try:
        with limits.memory(), limits.processor_time(TooSlow()):
            if "strftime_now" in template:
                compat_templates.set_day(template, day)
            texts, spans = render_jinja_template(
                conversations=[list(messages)],
                tools=None if tools is None else list(tools),
                chat_template=template,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompt,
                **names,
            )
    except Unrendered:
        raise
    except MemoryError as error:
        raise Unrendered(f"it takes more than {limits.MAX_BYTES_AT_ONCE // 1024**3} GiB of memory") from error
    except Exception as error:  # a template is someone else's program: it can raise whatever it likes
        raise Unrendered(str(error).rstrip(".") or type(error).__name__) from error
    return texts[0], spans[0] if marks else []


def _message(template: Template, turn: Message) -> Message:
    """Return a turn in the form that the template reads."""
    if template.moves_thoughts and turn["role"] == "assistant":
        turn = thinking.apart(turn)
    message = {**turn, "content": _content(template, turn["content"])}
    if template.has_text_arguments and turn.get("tool_calls"):
        message["tool_calls"] = [_with_text_arguments(call) for call in turn["tool_calls"]]
    return message


def _with_text_arguments(call: Message) -> Message:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _content(template: Template, content: Any) -> Any:
    """Return the content of a turn in the form that the template reads."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if template.in_parts else content
    if not template.image:
        # The template sees no bytes and no paths.
        return [part if part["type"] == "text" else {"type": part["type"]} for part in content]
    return "".join(part["text"] if part["type"] == "text" else template.image for part in content)


def _has(chat: Chat, key: str) -> bool:
    return any(turn.get(key) for turn in chat.messages)


def refuse_losses(template: Template, chat: Chat) -> None:
    """Check that the template renders whatever a conversation holds. Raises Unrendered: it leaves out all of a kind."""
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


@cache
def warn_once(message: str) -> None:
    """Log a warning that is true of the whole run and not of one row."""
    _LOG.warning(message)


def _with_answers(template: Template, chat: Chat) -> list[Rendered]:
    """Return the texts in which the answers with loss stand; see `render`."""
    answers = [at for at, turn in enumerate(chat.messages) if has_loss(turn)]
    if not answers:
        return [_whole(template, chat)]
    is_long = len(answers) > _MAX_COMPARED and not any(map(marks_in, chat.messages))
    if has_marks(template.text) and is_long and (rendered := _marked_at_once(template, chat, answers)):
        return [rendered]
    texts: list[Rendered] = []
    for number in answers:
        part = _up_to(template, chat, number)
        before = texts[-1] if texts else None
        if before and part.text.startswith(before.text[: before.spans[-1][1]]):
            texts[-1] = part._replace(
                spans=[*before.spans, *part.spans],
                answers=(*before.answers, *part.answers),
                weights=[*before.weights, *part.weights],
                inner=[*before.inner, *part.inner],
            )
        else:
            texts.append(part)
    return texts


def _whole(template: Template, chat: Chat) -> Rendered:
    answers = tuple(at for at, turn in enumerate(chat.messages) if has_loss(turn))
    return Rendered(rendered(template, chat), [], answers, len(chat.messages), [], [])


def _up_to(template: Template, chat: Chat, number: int) -> Rendered:
    """Return the conversation up to an answer, as a server renders it, and the characters that the model generates."""
    turn = chat.messages[number]
    text, spans = _text_up_to(template, chat, number)
    inner: list[Mark] = []
    for mark in marks_in(turn):
        edges = _edges(turn["content"], mark)
        begin, end = (_place(template, chat, number, edge, text, spans[0][0]) for edge in edges)
        if begin >= end:
            raise Unrendered(f"the span {[*mark[:2]]} of turn {number + 1} is text that the template does not write")
        inner.append((begin, end, mark[2]))
    weights = [turn.get("weight", 1)] * len(spans)
    return Rendered(text, spans, (number,), number + 1, weights, inner)


def _edges(content: str, mark: Mark) -> tuple[list[int], list[int]]:
    """Return where both ends of a span may be told in a content: white space beside them makes no difference."""
    begin, end, _ = mark
    edges = []
    for at, inwards in ((begin, 1), (end, -1)):
        later = len(content) - len(content[at:].lstrip())
        earlier = len(content[:at].rstrip())
        edges.append(list(dict.fromkeys([at, *(later, earlier)[::inwards]])))
    return edges[0], edges[1]


def _place(template: Template, chat: Chat, number: int, edge: Sequence[int], text: str, start: int) -> int:
    """Return the character of a rendered text that a character of an answer's content became.

    A character that no text holds is put there, and must change nothing else of what the template makes of the answer.

    Args:
        edge: Characters of its content, the first that can be told counts.
        start: The character of it where the answer begins.
    """
    turn = chat.messages[number]
    content = turn["content"]
    left_out = False
    for at in edge:
        probed = {**turn, "content": content[:at] + _PROBE + content[at:]}
        turns = [*chat.messages[:number], probed]
        try:
            probe, _ = _text_up_to(template, replace(chat, messages=turns), number)
        except Unrendered:
            continue
        if probe.replace(_PROBE, "") == text and probe.count(_PROBE) <= 1:
            if _PROBE in probe[start:]:
                return probe.index(_PROBE)
            left_out = True
    if not content[: edge[0]].strip():  # of an answer that begins with a thought, which the template takes apart
        return start
    why = "does not write it" if left_out else "writes other text there"
    raise Unrendered(f"a span of turn {number + 1} begins or ends at character {edge[0]}, and the template {why}")


def _text_up_to(template: Template, chat: Chat, number: int) -> tuple[str, list[Span]]:
    turn = chat.messages[number]
    history = replace(chat, messages=chat.messages[:number])
    prompt = rendered(template, history, prompt=True)
    text, marked = with_marks(template, replace(chat, messages=chat.messages[: number + 1]))
    if not text.startswith(prompt):
        prompt, text = _behind_prompt(template, history, turn, prompt, text)
        marked = []
    text = text.removesuffix(template.after_end)
    start = len(prompt)
    spans = [(max(first, start), min(end, len(text))) for first, end in marked if start < end and first < len(text)]
    spans = [_trim(template, text, span) for span in spans or [(start, len(text))]]
    next_turn = template.next_turns[bool(turn.get("tool_calls"))]
    if next_turn and not text[slice(*spans[-1])].endswith(next_turn):
        text = text[: spans[-1][1]] + next_turn
        spans[-1] = (spans[-1][0], len(text))
    return text, spans


def _behind_prompt(template: Template, history: Chat, turn: Message, prompt: str, text: str) -> tuple[str, str]:
    """Return what a server renders before an answer, and that with the answer, where a template renders them apart."""
    if thought := thinking.thought_of(turn):
        thinks = rendered(template, history, prompt=True, thinks=True)
        if text.startswith(thinks):  # Qwen 3.5's small models think only where a server asks for it
            return thinks, text
    # As `commonprefix`, without looking at each letter.
    alike = bisect_left(range(len(prompt)), True, key=lambda end: not text.startswith(prompt[: end + 1]))
    if not prompt[alike:].strip():  # Nemotron renders no line break in an empty thought
        return prompt, prompt + text[alike:]
    opened = _OPEN_THOUGHT.search(prompt)
    if opened and text.startswith(prompt[: opened.start()]):
        answer = text[opened.start() :]
        if answer.lstrip().startswith("</think>"):
            return prompt, prompt + answer
        # DeepSeek R1 and QwQ render the answer alone, also where it is the last one.
        return prompt, prompt + thought.strip("\n") + _CLOSED_THOUGHT + answer.lstrip("\n")
    # gpt-oss drops the thoughts before a tool's result once there is an answer.
    shorn = [thinking.shorn(past) if past["role"] == "assistant" else past for past in history.messages]
    before = rendered(template, replace(history, messages=shorn), prompt=True)
    after = rendered(template, replace(history, messages=[*shorn, turn]))
    if after.startswith(before):
        return prompt, prompt + after[len(before) :]
    number = len(history.messages) + 1
    raise Unrendered(f"the text of turn {number} changes when other turns follow, so it cannot be masked")


def _marked_at_once(template: Template, chat: Chat, answers: Sequence[int]) -> Rendered | None:
    """Return the conversation rendered once, if its marks tell the answers apart and history does not change.

    `_MAX_COMPARED` answers are compared with what a server renders.
    """
    text, spans = with_marks(template, chat)
    turns = [at for at, turn in enumerate(chat.messages) if turn["role"] == "assistant"]
    if len(spans) != len(turns) or template.next_turns != ("", ""):
        return None
    span_of = dict(zip(turns, spans, strict=True))
    cues = set()
    for number in answers[:: -(-len(answers) // _MAX_COMPARED)]:
        prompt = rendered(template, replace(chat, messages=chat.messages[:number]), prompt=True)
        up_to = rendered(template, replace(chat, messages=chat.messages[: number + 1])).removesuffix(template.after_end)
        if not (text.startswith(prompt) and text.startswith(up_to.rstrip())):
            return None
        cues.add(text[span_of[number][0] : len(prompt)])
    if len(cues) > 1:
        return None
    cue = len(cues.pop())
    trimmed = [_trim(template, text, (span_of[at][0] + cue, span_of[at][1])) for at in answers]
    weights = [chat.messages[at].get("weight", 1) for at in answers]
    return Rendered(text, trimmed, tuple(answers), len(chat.messages), weights, [])


def _trim(template: Template, text: str, span: Span) -> Span:
    """Leave out the white space after the end token: it is not generated."""
    start, end = span
    shorter = text[start:end].rstrip()
    return (start, start + len(shorter)) if shorter.endswith(template.controls) else span
