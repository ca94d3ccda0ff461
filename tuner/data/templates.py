"""Chooses the chat template to train with, and learns what it can render.

It renders no rows; `rendering` does.
"""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import date
from typing import Any

from tuner.data import limits
from tuner.data.encoder import Unrendered
from tuner.data.rendering import Template, TooSlow, rendered, texts_of, warn_once, with_marks
from tuner.data.sample import Chat, Message
from tuner.errors import DataError

_FIX = (
    "Set model.chat_template to a named template such as 'chatml', or to a .jinja file with {% generation %} markers."
)
_QUESTION: Message = {"role": "user", "content": "Why?"}
_PROBE: list[Message] = [_QUESTION, {"role": "assistant", "content": "Because."}]


def _call(mark: str) -> dict[str, Any]:
    # Mistral's templates want identifiers of nine letters.
    return {"type": "function", "id": "abcdefghi", "function": {"name": "ask", "arguments": {"cause": mark}}}


_RESULT: Message = {"role": "tool", "content": "resultmark", "name": "ask", "tool_call_id": "abcdefghi"}
_TOOLS_PROBE: list[Message] = [
    _QUESTION,
    {"role": "assistant", "content": "", "tool_calls": [_call("callmark")]},
    _RESULT,
    _PROBE[-1],
]
_CALLS_PROBE: list[Message] = [
    _QUESTION,
    {"role": "assistant", "content": "", "tool_calls": [_call("callmark"), _call("secondmark")]},
    _RESULT,
    _RESULT,
    _PROBE[-1],
]
_THOUGHT: Message = {"role": "assistant", "content": "Because.", "reasoning_content": "thoughtmark"}
_SCHEMA = {
    "type": "function",
    "function": {"name": "toolmark", "description": "Asks.", "parameters": {"type": "object", "properties": {}}},
}


def answers_end(tokenizer: Any) -> int | None:
    """Return the token that closes an answer in the tokenizer's chat template; None where no one token does."""
    try:
        template = choose_template(tokenizer)
    except DataError:
        return None
    [text] = texts_of(template, Chat(_PROBE))
    answer = text.text[slice(*text.spans[-1])]
    end = max((token for token in template.controls if answer.endswith(token)), key=len, default=None)
    return None if end is None else int(tokenizer.convert_tokens_to_ids(end))


def choose_template(tokenizer: Any, day: date | None = None) -> Template:
    """Return the tokenizer's chat template; it must show which turns are the assistant's.

    Args:
        tokenizer: With a chat template, or several named ones: then 'tool_use' renders conversations with tools.

    Raises:
        DataError: the tokenizer has no template, or the template does not show which turns are the assistant's.
    """
    if not tokenizer.is_fast:
        problem = f"{type(tokenizer).__name__} does not report a token's place in the text"
        raise DataError(problem, where="the tokenizer", fix="Use a model folder with a tokenizer.json.")
    if not tokenizer.chat_template:
        raise DataError("the tokenizer has no chat template", where="model.chat_template", fix=_FIX)
    templates_by_name = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    if templates_by_name and "default" not in templates_by_name:
        problem = (
            f"the tokenizer has chat templates named {', '.join(sorted(templates_by_name))}, and none named 'default'"
        )
        raise DataError(problem, where="model.chat_template", fix=_FIX)
    added = tokenizer.added_tokens_decoder.values()
    controls = tuple(token.content for token in added if token.content.strip())
    template = Template(tokenizer, tokenizer.get_chat_template(), controls, special_tokens(tokenizer), day)
    try:
        with limits.memory():
            chosen = _probed(template)
            for_tools = templates_by_name.get("tool_use", template.text)
            if for_tools == template.text:
                return chosen
            return replace(chosen, with_tools=_probed(replace(template, text=for_tools)))
    except Unrendered as error:
        problem = f"the chat template cannot render a conversation: {error}"
        raise DataError(problem, where="model.chat_template", fix=_FIX) from error


def special_tokens(tokenizer: Any) -> re.Pattern[str]:
    """Return a pattern of the tokens that no text of a row becomes.

    '<think>' and its like are added tokens too, but no special ones: answers in a data set do hold them on purpose.
    """
    added = tokenizer.added_tokens_decoder.values()
    special = sorted((token.content for token in added if token.special), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, special)) or "(?!)")


def with_images(template: Template, token: str) -> Template:
    """Return the template for conversations with images; `token` stands for an image in the text.

    A template of an LLM reads texts alone: then an image becomes its token and a line break, as in LLaVA.

    Raises:
        DataError: the template cannot render an image.
    """
    question = [{"type": "image"}, {"type": "text", "text": "Why?"}]
    chat = Chat([{"role": "user", "content": question}, _PROBE[-1]])
    for variant in (template, replace(template, in_parts=True), replace(template, image=f"{token}\n")):
        text = _text(variant, chat)
        if text is None:
            continue
        if text.count(token) == 1 and text.find(token) < text.find("Why?"):
            return variant
    raise DataError("the chat template does not render images", where="model.chat_template", fix=_FIX)


def _probed(template: Template) -> Template:
    """Return the template with what it does with some conversations."""
    template = _checked(template)
    try:
        with limits.processor_time(TooSlow()):  # all together
            return _learned(template)
    except TooSlow:  # with conversations of some kind: it is told with the row that is one
        return template


def _learned(template: Template) -> Template:
    of_texts = replace(template, has_text_arguments=True)
    if _text(template, Chat(_TOOLS_PROBE)) is None and _text(of_texts, Chat(_TOOLS_PROBE)) is not None:
        template = of_texts
    end, after_end = _end_of_answers(template)
    template = replace(template, end=end, after_end=after_end)
    if not end.strip():
        after_answer, after_calls = Chat([*_PROBE, _QUESTION]), Chat(_TOOLS_PROBE[:3], [_SCHEMA])
        next_turns = _next_turn(template, after_answer), _next_turn(template, after_calls)
        template = replace(template, next_turns=next_turns)
        template = replace(template, end=_end_of_answers(template)[0])
    if not template.end.rstrip().endswith(template.controls):
        warn_once(
            "The chat template does not end the assistant's turn with a special token; the model may not learn to stop."
        )
    template = replace(template, leaves_out=_left_out(template))
    return replace(template, moves_thoughts=_moves_thoughts(template))


def _checked(template: Template) -> Template:
    """Return the template, with `in_parts` set if it needs that."""
    errors: list[Exception] = []
    # Templates of models that see pictures loop over the parts of a content; over a text they find nothing.
    for variant in (template, replace(template, in_parts=True)):
        try:
            _check(variant)
        except TooSlow:
            raise
        except (DataError, Unrendered) as error:
            errors.append(error)
        else:
            return variant
    raise errors[0]


def _check(template: Template) -> None:
    [text] = texts_of(template, Chat(_PROBE))
    answers = "".join(text.text[slice(*span)] for span in text.spans)
    text_with_marks, marks = with_marks(template, Chat(_PROBE))
    marked = "".join(text_with_marks[slice(*span)] for span in marks)
    if "Because." not in answers or "Why?" in answers + marked:
        problem = "the tokenizer's chat template does not show where the assistant's turns begin and end"
        raise DataError(problem, where="model.chat_template", fix=_FIX)


def _end_of_answers(template: Template) -> tuple[str, str]:
    """Return what the template writes behind an answer, and what it writes behind that if no turn follows.

    Phi 3's writes the end-of-sequence token behind the end of the last answer.
    """
    [text] = texts_of(template, Chat(_PROBE))
    end = text.text[: text.spans[-1][1]].rpartition("Because.")[2]
    history = (_text(template, Chat([*_PROBE, _QUESTION])) or "").rpartition("Because.")[2]
    if history.startswith(end):
        return end, ""
    ends = [end[: match.end()] for token in template.controls for match in re.finditer(re.escape(token), end)]
    lasting = max((end_so_far for end_so_far in ends if history.startswith(end_so_far)), key=len, default="")
    return (lasting, text.text.rpartition("Because.")[2].removeprefix(lasting)) if lasting else (end, "")


def _next_turn(template: Template, chat: Chat) -> str:
    text, so_far = _text(template, chat), _text(template, Chat(chat.messages[:-1], chat.tools))
    if text is None or so_far is None or not text.startswith(so_far.rstrip()):
        return ""
    behind = text[len(so_far.rstrip()) :].lstrip()
    return max((token for token in template.controls if behind.startswith(token)), key=len, default="")


def _text(template: Template, chat: Chat) -> str | None:
    """Return a conversation as text; None if the template refuses it."""
    try:
        return rendered(template, chat)
    except TooSlow:
        raise
    except Unrendered:
        return None


def _left_out(template: Template) -> tuple[str, ...]:
    """Return what the template renders as nothing; what it refuses is told with the row that holds it."""
    probes = {
        "system turns": ("systemmark", Chat([{"role": "system", "content": "systemmark"}, *_PROBE])),
        "descriptions of tools": ("toolmark", Chat(_PROBE, [_SCHEMA])),
        "tool calls": ("callmark", Chat(_TOOLS_PROBE, [_SCHEMA])),
        "all but one of a turn's tool calls": ("secondmark", Chat(_CALLS_PROBE, [_SCHEMA])),
        "tool results": ("resultmark", Chat(_TOOLS_PROBE, [_SCHEMA])),
        "reasoning_content": ("thoughtmark", Chat([_QUESTION, _THOUGHT])),
    }
    return tuple(name for name, (mark, chat) in probes.items() if not _shows(template, chat, mark))


def _moves_thoughts(template: Template) -> bool:
    """Return whether it renders thinking, and renders it otherwise where it stands before what is said.

    gpt-oss and Gemma 4 have channels for it; Qwen 3.8 writes an empty thought before the tags in a text.
    """
    if "reasoning_content" in template.leaves_out:
        return False
    before = {**_PROBE[-1], "content": "<think>\nthoughtmark\n</think>\n\nBecause."}
    texts = [_text(template, Chat([_QUESTION, turn])) for turn in (before, _THOUGHT)]
    return None not in texts and len({"".join(str(text).split()) for text in texts}) > 1


def _shows(template: Template, chat: Chat, mark: str) -> bool:
    try:
        return mark in texts_of(template, chat)[-1].text
    except TooSlow:
        raise
    except Unrendered:
        return True
