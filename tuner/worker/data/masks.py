"""Turns conversations and texts into token ids and labels: which tokens carry loss.

It reads no files and does not cut or pack.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt
from transformers.utils.chat_template_utils import render_jinja_template
from trl.chat_template_utils import get_training_chat_template, has_generation_markers

from tuner.errors import DataError
from tuner.worker.data.formats import Chat, Message, Sample

IGNORED = -100
Tokens = npt.NDArray[np.int32]
Span = tuple[int, int]

_LOG = logging.getLogger(__name__)
_FIX = (
    "Set model.chat_template to a named template such as 'chatml', or to a .jinja file with {% generation %} markers."
)
# A Unicode noncharacter: no text for interchange holds it.
_QUOTE = "\ufdd0"
_PROBE: list[Message] = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]


@dataclass(frozen=True)
class Template:
    """A chat template that tells the assistant's turns apart.

    `marked`: by `{% generation %}`; else by rendering the conversation up to each turn. `cue`: what a marked turn
    repeats of the generation prompt, which is not the assistant's to say. `controls`: the tokenizer's own tokens.
    `special`: matches those of them that a row's text must never become.
    """

    tokenizer: Any
    text: str
    marked: bool
    cue: str
    controls: tuple[str, ...]
    special: re.Pattern[str]


def choose_template(tokenizer: Any) -> Template:
    """Return the tokenizer's chat template, or TRL's variant of it with markers that renders the same text.

    Raises:
        DataError: there is none, or the assistant's turns cannot be told apart in it.
    """
    if not tokenizer.is_fast:
        what = f"{type(tokenizer).__name__} cannot tell where in the text a token stands"
        raise DataError(what, where="the tokenizer", fix="Use a model folder with a tokenizer.json.")
    if not tokenizer.chat_template:
        raise DataError("the tokenizer has no chat template", where="model.chat_template", fix=_FIX)
    own = tokenizer.get_chat_template()
    added = tokenizer.added_tokens_decoder.values()
    controls = tuple(token.content for token in added if token.content.strip())
    # '<think>' and its like are added tokens too, but no special ones: answers in a data set do hold them on purpose.
    special = sorted((token.content for token in added if token.special), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, special)) or "(?!)")
    text = _training_variant(tokenizer, own)
    plain = Template(tokenizer, text, has_generation_markers(text), "", controls, pattern)
    _check(plain, own)
    return replace(plain, cue=_cue(plain))


def _training_variant(tokenizer: Any, own: str) -> str:
    if has_generation_markers(own):
        return own
    try:
        return get_training_chat_template(tokenizer) or own
    except ValueError:
        return own


def _cue(template: Template) -> str:
    """Return the end of the generation prompt that stands inside the assistant's marked turn (Qwen 2.5: a newline)."""
    if not template.marked:
        return ""
    prompt = _render(template, Chat(_PROBE[:1]), prompt=True)[0]
    text, spans = render(template, Chat(_PROBE), "the chat template")
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, text, strict=False)))
    return text[spans[0][0] : common] if spans else ""


def _check(template: Template, own: str) -> None:
    text, spans = render(template, Chat(_PROBE), "the chat template")
    # GLM's variant appends the end token that its template leaves to the next turn.
    if not text.startswith(_render(replace(template, text=own, marked=False), Chat(_PROBE))[0]):
        what = "the variant of the chat template for training renders another text than the template itself"
        raise DataError(what, where="model.chat_template", fix=_FIX)
    said = "".join(text[slice(*span)] for span in spans)
    if "Because." not in said or "Why?" in said:
        what = "the assistant's turns cannot be told apart in the tokenizer's chat template"
        raise DataError(what, where="model.chat_template", fix=_FIX)
    if not said.endswith(template.controls):
        _LOG.warning(
            "The chat template ends the assistant's turn with no special token; the model may not learn to stop."
        )


def render(template: Template, chat: Chat, place: str) -> tuple[str, list[Span]]:
    """Return the conversation's text and the characters, start and end, of each assistant turn with its end token.

    Raises:
        DataError: the template refuses the conversation, or an earlier turn depends on later ones.
    """
    try:
        text, spans = _render(template, chat)
        if not template.marked:
            spans = _spans_by_prefix(template, chat, text)
    except (jinja2.TemplateError, TypeError, _Entangled) as error:
        reason = str(error).rstrip(".")
        fix = "Correct the row, or choose another model.chat_template."
        raise DataError(f"the chat template cannot render the conversation: {reason}", where=place, fix=fix) from error
    trimmed = [_trim(template, text, span) for span in spans]
    return text, [span for span in trimmed if span[0] < span[1]]


def _render(template: Template, chat: Chat, *, prompt: bool = False) -> tuple[str, list[Span]]:
    texts, spans = render_jinja_template(
        conversations=[chat.messages],
        tools=chat.tools,
        chat_template=template.text,
        return_assistant_tokens_mask=template.marked,
        add_generation_prompt=prompt,
        **template.tokenizer.special_tokens_map,
    )
    return texts[0], spans[0] if template.marked else []


class _Entangled(ValueError):
    """A turn's text depends on the turns after it."""


def _spans_by_prefix(template: Template, chat: Chat, text: str) -> list[Span]:
    spans = []
    for number, message in enumerate(chat.messages):
        if message["role"] == "assistant":
            before = _render(template, Chat(chat.messages[:number], chat.tools), prompt=True)[0]
            after = _render(template, Chat(chat.messages[: number + 1], chat.tools))[0]
            if not (text.startswith(after) and after.startswith(before)):
                raise _Entangled(f"turn {number + 1} is rendered otherwise when other turns follow, so it has no mask")
            spans.append((len(before), len(after)))
    return spans


def _trim(template: Template, text: str, span: Span) -> Span:
    """Leave out the generation prompt's end and the white space after the end token: neither is generated."""
    start, end = span
    if template.cue and text.startswith(template.cue, start):
        start += len(template.cue)
    shorter = text[start:end].rstrip()
    return (start, start + len(shorter)) if shorter.endswith(template.controls) else (start, end)


def encode(
    template: Template | None, tokenizer: Any, rows: Sequence[tuple[str, Sample]], *, train_all: bool = False
) -> list[tuple[Tokens, Tokens]]:
    """Return input ids and labels (int32, shape [tokens]) of each row; a label of -100 carries no loss.

    `rows` are places and samples, all conversations or all texts. A conversation has loss on the assistant's turns,
    with `train_all` on everything; a text on everything, and ends with the end-of-sequence token.

    Raises:
        DataError: the template refuses a conversation.
    """
    if template is None:
        return [_all_trained(ids) for ids in _encode_texts(tokenizer, [str(sample) for _, sample in rows])]
    rendered = [
        render(template, _quoted(template, sample), place) for place, sample in rows if isinstance(sample, Chat)
    ]
    encoded = _encode_rendered(tokenizer, [text for text, _ in rendered])
    if train_all:
        return [_all_trained(ids) for ids, _ in encoded]
    return [_labelled(ids, offsets, spans) for (ids, offsets), (_, spans) in zip(encoded, rendered, strict=True)]


def _quoted(template: Template, chat: Chat) -> Chat:
    """Put marks around special tokens that a row's text spells out, so that they can be encoded as mere text."""
    if not any(template.special.search(message["content"]) for message in chat.messages):
        return chat
    marked = f"{_QUOTE}\\g<0>{_QUOTE}"
    messages = [
        {**message, "content": template.special.sub(marked, message["content"].replace(_QUOTE, ""))}
        for message in chat.messages
    ]
    return Chat(messages, chat.tools)


def _encode_rendered(tokenizer: Any, texts: list[str]) -> list[tuple[list[int], list[Span]]]:
    plain = [text for text in texts if _QUOTE not in text]
    encoded = iter(_encode_plain(tokenizer, plain) if plain else ())
    return [_encode_quoted(tokenizer, text) if _QUOTE in text else next(encoded) for text in texts]


def _encode_plain(tokenizer: Any, texts: list[str], *, as_text: bool = False) -> list[tuple[list[int], list[Span]]]:
    # No special tokens added: the template has written them, and a second beginning-of-sequence token would come.
    encoded = tokenizer(
        texts,
        add_special_tokens=False,
        split_special_tokens=as_text,
        return_attention_mask=False,
        return_offsets_mapping=True,
        verbose=False,
    )
    return list(zip(encoded["input_ids"], encoded["offset_mapping"], strict=True))


def _encode_quoted(tokenizer: Any, text: str) -> tuple[list[int], list[Span]]:
    """Encode piece by piece; offsets count characters of `text`, its marks included."""
    ids: list[int] = []
    offsets: list[Span] = []
    here = 0
    for number, piece in enumerate(text.split(_QUOTE)):
        if piece:
            [(new, places)] = _encode_plain(tokenizer, [piece], as_text=number % 2 == 1)
            ids += new
            offsets += [(start + here, end + here) for start, end in places]
        here += len(piece) + len(_QUOTE)
    return ids, offsets


def _encode_texts(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    ids = tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [row if row[-1:] == end else row + end for row in ids]


def _all_trained(ids: list[int]) -> tuple[Tokens, Tokens]:
    tokens = np.array(ids, dtype=np.int32)
    return tokens, tokens.copy()


def _labelled(ids: list[int], offsets: list[Span], spans: list[Span]) -> tuple[Tokens, Tokens]:
    tokens = np.array(ids, dtype=np.int32)
    labels = np.full_like(tokens, IGNORED)
    for start, end in spans:
        first = bisect_right(offsets, start, key=lambda offset: offset[1])
        last = bisect_left(offsets, end, key=lambda offset: offset[0])
        labels[first:last] = tokens[first:last]
    return tokens, labels
