"""Chooses the chat template to train with, and learns what it can render.

It renders no rows; `rendering` does.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from trl.chat_template_utils import get_training_chat_template, has_generation_markers

from tuner import assets
from tuner.assets import without_generation_marks
from tuner.data import limits
from tuner.data.encoder import Unrendered
from tuner.data.rendering import Template, num_alike, render, rendered, warn_once
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
_SCHEMA = {"name": "toolmark", "description": "Asks.", "parameters": {"type": "object", "properties": {}}}


def answers_end(tokenizer: Any) -> int | None:
    """Return the token that closes an answer in the tokenizer's chat template; None where no one token does."""
    try:
        template = choose_template(tokenizer)
    except DataError:
        return None
    text, spans = render(template, Chat(_PROBE), "the chat template")
    answer = text[slice(*spans[-1])]
    end = max((token for token in template.controls if answer.endswith(token)), key=len, default=None)
    return None if end is None else int(tokenizer.convert_tokens_to_ids(end))


def choose_template(tokenizer: Any) -> Template:
    """Return the tokenizer's chat template, or a variant of it with markers that renders the same text.

    Raises:
        DataError: the tokenizer has no template, or the template does not show which turns are the assistant's.
    """
    if not tokenizer.is_fast:
        problem = f"{type(tokenizer).__name__} does not report a token's place in the text"
        raise DataError(problem, where="the tokenizer", fix="Use a model folder with a tokenizer.json.")
    if not tokenizer.chat_template:
        raise DataError("the tokenizer has no chat template", where="model.chat_template", fix=_FIX)
    own = tokenizer.get_chat_template()
    added = tokenizer.added_tokens_decoder.values()
    controls = tuple(token.content for token in added if token.content.strip())
    # '<think>' and its like are added tokens too, but no special ones: answers in a data set do hold them on purpose.
    special = sorted((token.content for token in added if token.special), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, special)) or "(?!)")
    text = _training_variant(tokenizer, own)
    with limits.memory():
        template = _checked(Template(tokenizer, text, has_generation_markers(text), controls, pattern), own)
        return replace(template, cues=_cues(template), leaves_out=_left_out(template))


def with_images(template: Template, token: str) -> Template:
    """Return the template for conversations with images; `token` stands for an image in the text.

    A template of an LLM reads texts alone: then an image becomes its token and a line break, as in LLaVA.

    Raises:
        DataError: the template cannot render an image.
    """
    question = [{"type": "image"}, {"type": "text", "text": "Why?"}]
    chat = Chat([{"role": "user", "content": question}, _PROBE[-1]])
    for variant in (template, replace(template, in_parts=True), replace(template, image=f"{token}\n")):
        try:
            text, _ = rendered(variant, chat)
        except Unrendered:
            continue
        if text.count(token) == 1 and text.find(token) < text.find("Why?"):
            return variant
    raise DataError("the chat template does not render images", where="model.chat_template", fix=_FIX)


def _training_variant(tokenizer: Any, own: str) -> str:
    if has_generation_markers(own):
        return own
    for file in assets.template_files().values():
        named = file.read_text(encoding="utf-8")
        # A model that tuner saved has our template without its marks.
        if without_generation_marks(named) == own:
            return named
    try:
        return get_training_chat_template(tokenizer) or own
    except ValueError:
        return own


def _checked(template: Template, own: str) -> Template:
    """Return the template, with `in_parts` set if it needs that.

    Raises:
        DataError: the assistant's turns cannot be told apart in it, or it is no variant of `own`.
    """
    try:
        _check(template, own)
    except DataError:
        # Templates of models that see pictures loop over the parts of a content; over a text they find nothing.
        in_parts = replace(template, in_parts=True)
        try:
            _check(in_parts, own)
        except DataError:
            pass
        else:
            return in_parts
        raise
    return template


def _check(template: Template, own: str) -> None:
    text, spans = render(template, Chat(_PROBE), "the chat template")
    # GLM's variant appends the end token that its template leaves to the next turn.
    if not text.startswith(rendered(replace(template, text=own, has_markers=False), Chat(_PROBE))[0]):
        problem = "the training variant of the chat template renders a different text than the template itself"
        raise DataError(problem, where="model.chat_template", fix=_FIX)
    answers = "".join(text[slice(*span)] for span in spans)
    if "Because." not in answers or "Why?" in answers:
        problem = "the tokenizer's chat template does not show where the assistant's turns begin and end"
        raise DataError(problem, where="model.chat_template", fix=_FIX)
    if not answers.endswith(template.controls):
        warn_once(
            "The chat template does not end the assistant's turn with a special token; the model may not learn to stop."
        )


def _cues(template: Template) -> tuple[str, ...]:
    """Return the ends of the generation prompts that stand inside marked turns (Qwen 2.5: a newline), longest first.

    DeepSeek's prompt after a tool's result is another than after a question.
    """
    if not template.has_markers:
        return ()
    cues = {_cue(template, _PROBE), _cue(template, _TOOLS_PROBE)} - {""}
    return tuple(sorted(cues, key=len, reverse=True))


def _cue(template: Template, messages: list[Message]) -> str:
    try:
        prompt = rendered(template, Chat(messages[:-1]), prompt=True)[0]
        text, spans = rendered(template, Chat(messages))
    except Unrendered:
        return ""
    start = max((start for start, end in spans if "Because." in text[start:end]), default=len(text))
    return text[start : num_alike(prompt, text)]


def _left_out(template: Template) -> tuple[str, ...]:
    """Return what the template renders as nothing; what it refuses is told with the row that holds it."""
    schema = {"type": "function", "function": _SCHEMA}
    thought = {"role": "assistant", "content": "Because.", "reasoning_content": "thoughtmark"}
    probes = {
        "system turns": ("systemmark", Chat([{"role": "system", "content": "systemmark"}, *_PROBE])),
        "descriptions of tools": ("toolmark", Chat(_PROBE, [schema])),
        "tool calls": ("callmark", Chat(_TOOLS_PROBE, [schema])),
        "all but one of a turn's tool calls": ("secondmark", Chat(_CALLS_PROBE, [schema])),
        "tool results": ("resultmark", Chat(_TOOLS_PROBE, [schema])),
        "reasoning_content": ("thoughtmark", Chat([_QUESTION, thought])),
    }
    return tuple(name for name, (mark, chat) in probes.items() if not _shows(template, chat, mark))


def _shows(template: Template, chat: Chat, mark: str) -> bool:
    try:
        return mark in rendered(template, chat)[0]
    except Unrendered:
        return True
