"""Turns conversations and texts into token ids and labels: which tokens carry loss.

It reads no files and does not cut or pack.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from tuner.data import limits
from tuner.data import thinking as thinking_of_answers
from tuner.data.encoder import Labelled
from tuner.data.fast_tokens import FastTokens
from tuner.data.rendering import Span, Template, render
from tuner.data.sample import IGNORED, Chat, Thinking
from tuner.data.templates import choose_template
from tuner.data.tokens import Tokens
from tuner.errors import DataError

__all__ = ["Template", "choose_template", "encode_chats", "encode_texts"]

_WithOffsets = tuple[Sequence[int] | Tokens, Sequence[Span]]

# A Unicode noncharacter: no text for interchange holds it.
_QUOTE = "\ufdd0"


def encode_texts(tokenizer: Any, rows: Sequence[tuple[str, str]], fast: FastTokens | None = None) -> list[Labelled]:
    """Return the tokens of texts, each with its place; all carry loss, an end-of-sequence token at the end too.

    `fast` encodes them, where there is one.

    Raises:
        DataError: a text is too long to be tokenized.
        Differs: `fast` gives other tokens.
    """
    texts = [text for _, text in rows]
    _check_texts(tokenizer, rows, texts)
    return [_all_trained(ids) for some in limits.batches(texts) for ids in _encode_texts(tokenizer, some, fast)]


def encode_chats(
    template: Template,
    rows: Sequence[tuple[str, Chat]],
    *,
    train_all: bool = False,
    thinking: Thinking | None = None,
    fast: FastTokens | None = None,
    on_change: Callable[[str, str], object] = lambda place, reason: None,
    expand: Callable[[Chat, str, list[Span], str], tuple[str, list[Span]]] | None = None,
) -> list[Labelled]:
    """Return the tokens of conversations, each with its place, with loss on the assistant's turns alone.

    `train_all` puts it on everything. `fast` encodes, where there is one. `on_change` is called with the place of a
    conversation and what the template makes otherwise than its answers are. `expand` gives the tokens of its images to
    a rendered conversation.

    Raises:
        DataError: the template refuses a conversation or leaves out thinking that is to be kept, or what is to be
            tokenized is too long.
        Differs: `fast` gives other tokens.
    """
    tokenizer = template.tokenizer
    with limits.memory():
        chats = [(place, _quoted(template, thinking_of_answers.applied(chat, thinking))) for place, chat in rows]
        rendered = [render(template, chat, place) for place, chat in chats]
    for (place, chat), (text, _) in zip(chats, rendered, strict=True):
        for reason in thinking_of_answers.differences(chat, text):
            if reason == thinking_of_answers.LEFT_OUT and thinking == "keep":
                fix = "Set dataset.thinking to 'last' or 'strip', or choose another model.chat_template."
                raise DataError(f"{reason}, and dataset.thinking = 'keep'", where=place, of_row=True, fix=fix)
            on_change(place, reason)
    if expand:
        rendered = [
            expand(chat, text, spans, place) for (place, chat), (text, spans) in zip(chats, rendered, strict=True)
        ]
    texts = [text for text, _ in rendered]
    _check_texts(tokenizer, rows, texts)
    encoded = [one for some in limits.batches(texts) for one in _encode_rendered(tokenizer, some, fast)]
    if train_all:
        return [_all_trained(ids) for ids, _ in encoded]
    return [_labelled(ids, offsets, spans) for (ids, offsets), (_, spans) in zip(encoded, rendered, strict=True)]


def _check_texts(tokenizer: Any, rows: Sequence[tuple[str, object]], texts: Sequence[str]) -> None:
    for (place, _), text in zip(rows, texts, strict=True):
        limits.check_text(tokenizer, text, place)


def _quoted(template: Template, chat: Chat) -> Chat:
    """Put marks around special tokens that a row's text spells out, so that they can be encoded as mere text."""
    texts = [chat.messages, chat.tools]
    return chat if not _spells(texts, template.special) else Chat(*_quote_special(texts, template.special))


def _spells(value: Any, special: re.Pattern[str]) -> bool:
    if isinstance(value, str):
        return special.search(value) is not None
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(_spells(one, special) for one in inner)


def _quote_special(value: Any, special: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return special.sub(f"{_QUOTE}\\g<0>{_QUOTE}", value.replace(_QUOTE, ""))
    if isinstance(value, dict):
        return {key: _quote_special(one, special) for key, one in value.items()}
    return [_quote_special(one, special) for one in value] if isinstance(value, list) else value


def _encode_rendered(tokenizer: Any, texts: list[str], fast: FastTokens | None) -> list[_WithOffsets]:
    plain, exact = [text for text in texts if _QUOTE not in text], partial(_encode_plain, tokenizer)
    encoded = iter(() if not plain else fast.with_offsets(plain, exact) if fast else exact(plain))
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


def _encode_texts(tokenizer: Any, texts: list[str], fast: FastTokens | None) -> list[list[int]]:
    def exact(some: list[str]) -> list[list[int]]:
        ids: list[list[int]] = tokenizer(some, return_attention_mask=False, verbose=False)["input_ids"]
        return ids

    ids = fast.ids(texts, exact) if fast else exact(texts)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [row if row[-1:] == end else row + end for row in ids]


def _all_trained(ids: Sequence[int] | Tokens) -> Labelled:
    tokens = np.array(ids, dtype=np.int32)
    return tokens, tokens.copy()


def _labelled(ids: Sequence[int] | Tokens, offsets: Sequence[Span], spans: list[Span]) -> Labelled:
    tokens = np.array(ids, dtype=np.int32)
    labels = np.full_like(tokens, IGNORED)
    for start, end in spans:
        first = bisect_right(offsets, start, key=lambda offset: offset[1])
        last = bisect_left(offsets, end, key=lambda offset: offset[0])
        labels[first:last] = tokens[first:last]
    return tokens, labels
