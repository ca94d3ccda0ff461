"""Turns conversations and texts into token ids and labels: which tokens carry loss.

It reads no files and does not cut or pack.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from tuner.data import limits, templates
from tuner.data import thinking as thinking_of_answers
from tuner.data.encoder import Labelled, Part, Tokens, Weights
from tuner.data.fast_tokens import FastTokens
from tuner.data.rendering import Rendered, Span, Template, render
from tuner.data.sample import IGNORED, Chat, Message, Thinking, has_loss, marks_in, rewritten
from tuner.errors import DataError

_Weighed = tuple[Labelled, Weights | None]
_WithOffsets = tuple[Sequence[int] | Tokens, Sequence[Span]]

# A Unicode noncharacter: no text for interchange holds it.
_QUOTE = "\ufdd0"
_QUOTES = re.compile(_QUOTE)
MARK_TAKEN_OUT = "the conversation holds U+FDD0, no character of Unicode, which is taken out"
UNWRITTEN = "the chat template leaves out a text of the {}, or changes it"
NO_NAME = "the chat template leaves out the name of a speaker"
_SPELLS = "the {} spells special tokens such as {!r}, which stay text"
_ENDS_ALREADY = "{} ends with {!r} already, which is taken off: the token itself follows"


def encode_texts(
    tokenizer: Any,
    rows: Sequence[tuple[str, str]],
    fast: FastTokens | None = None,
    *,
    special_tokens: bool = False,
    on_change: Callable[[str, str], object] = lambda place, reason: None,
) -> list[Labelled]:
    """Return the tokens of texts, each with its place; all carry loss, an end-of-sequence token at the end too.

    `fast` encodes them, where there is one. The special tokens that a text spells become tokens with `special_tokens`;
    else they stay text, and `on_change` is called with the place and the reason.

    Raises:
        DataError: a text is too long to be tokenized.
        Differs: `fast` gives other tokens.
    """
    for place, text in rows:
        limits.check_text(tokenizer, text, place)
    texts = [text for _, text in rows]
    if not special_tokens:
        texts = [_without_end(tokenizer, text, partial(on_change, place)) for place, text in rows]
    spelled = None if special_tokens else templates.special_tokens(tokenizer)
    for (place, _), text in zip(rows, texts, strict=True):
        if spelled and (token := spelled.search(text)):
            on_change(place, _SPELLS.format("text", token[0]))
    encoded = (ids for batch in limits.batches(texts) for ids in _encode_texts(tokenizer, batch, fast, spelled))
    return [_all_trained(ids) for ids in encoded]


def _without_end(tokenizer: Any, text: str, on_change: Callable[[str], object]) -> str:
    """Return a text without the end-of-sequence token that it spells at its end: a real one follows."""
    end = tokenizer.eos_token
    if not end or not text.rstrip().endswith(end):
        return text
    on_change(_ENDS_ALREADY.format("the text", end))
    return without_ends(text, (end,))


def without_ends(text: str, ends: Sequence[str]) -> str:
    """Return a text without what it ends with of `ends`, and without the white space behind them."""
    shorter = text.rstrip()
    while end := next((end for end in ends if end and shorter.endswith(end)), ""):
        text = shorter.removesuffix(end)
        shorter = text.rstrip()
    return text


def encode_chats(
    template: Template,
    rows: Sequence[tuple[str, Chat]],
    *,
    train_all: bool = False,
    thinking: Thinking | None = None,
    fast: FastTokens | None = None,
    on_change: Callable[[str, str], object] = lambda place, reason: None,
    expand: Callable[[Chat, str, list[Span], str], tuple[str, list[Span]]] | None = None,
) -> list[list[Part]]:
    """Return the tokens of conversations, each with its place, with loss on the assistant's turns alone.

    A conversation has several parts if the template renders an answer otherwise once other turns follow: each answer is
    trained after what a server renders before it. `train_all` puts loss on everything. `fast` encodes, where there is
    one. `on_change` is called with the place of a conversation and what is trained otherwise than its answers are.
    `expand` gives the tokens of its images to a rendered conversation.

    Raises:
        DataError: the template refuses a conversation or leaves out thinking that is to be kept, or what is to be
            tokenized is too long.
        Differs: `fast` gives other tokens.
    """
    tokenizer = template.tokenizer
    with limits.memory():
        chats = [
            (place, _as_text(template, _with_thinking(chat, thinking, place), place, on_change)) for place, chat in rows
        ]
        rendered = [render(template, chat, place, is_whole=train_all) for place, chat in chats]
    for (place, chat), texts in zip(chats, rendered, strict=True):
        for reason in _differences(chat, texts, thinking, place):
            on_change(place, reason)
    # One after the other: a batch of tokenization takes the parts of all conversations.
    parts = [(place, chat, text) for (place, chat), texts in zip(chats, rendered, strict=True) for text in texts]
    if expand:
        for at, (place, chat, text) in enumerate(parts):
            first = replace(chat, messages=chat.messages[: text.num_turns])
            answer_spans, inner = text.spans, [(begin, end) for begin, end, _ in text.inner]
            string, moved = expand(first, text.text, [*answer_spans, *inner], place)
            marks = [(*span, mark[2]) for span, mark in zip(moved[len(answer_spans) :], text.inner, strict=True)]
            parts[at] = place, chat, text._replace(text=string, spans=moved[: len(answer_spans)], inner=marks)
    for place, _, text in parts:
        limits.check_text(tokenizer, text.text, place)
    strings = [text.text for _, _, text in parts]
    encoded = [pair for batch in limits.batches(strings) for pair in _encode_rendered(tokenizer, batch, fast)]
    weighed = iter(
        (_all_trained(ids), None) if train_all else _weighed(ids, offsets, text)
        for (ids, offsets), (_, _, text) in zip(encoded, parts, strict=True)
    )
    return [
        [Part(labelled, text.num_turns, weights) for text, (labelled, weights) in zip(texts, weighed, strict=False)]
        for texts in rendered
    ]


def _with_thinking(chat: Chat, thinking: Thinking | None, place: str) -> Chat:
    """Return a conversation with the thinking of its answers that the recipe wants."""
    kept_chat = thinking_of_answers.applied(chat, thinking)
    for before, after in zip(chat.messages, kept_chat.messages, strict=True):
        lost = len(before["content"]) - len(after["content"])
        if lost and has_loss(before) and any(begin < lost for begin, *_ in marks_in(before)):
            problem = f"a span weighs the thinking of an answer, which dataset.thinking = {thinking!r} removes"
            raise DataError(problem, where=place, of_row=True, fix="Set dataset.thinking to 'keep', or move the span.")
    return kept_chat


def _as_text(template: Template, chat: Chat, place: str, on_change: Callable[[str, str], object]) -> Chat:
    """Return the conversation with marks in its texts, so that only the template writes special tokens."""
    chat = _ended(template, chat, place, on_change)
    texts = _texts_of(chat)
    if spelled := next(_spelled(texts, template.special), None):
        on_change(place, _SPELLS.format("conversation", spelled))
    has_marks = _holds_marks(texts)
    if has_marks:
        on_change(place, MARK_TAKEN_OUT)
    return _marked(template.special, chat) if spelled or has_marks else chat


def _ended(template: Template, chat: Chat, place: str, on_change: Callable[[str, str], object]) -> Chat:
    """Return the conversation with answers that lack the end of a turn: the template writes it."""
    end = template.of(chat).end
    ends = tuple(text for text in (end, end.strip()) if template.special.search(text))
    turns = [_without_ends(turn, ends) for turn in chat.messages]
    if turns == chat.messages:
        return chat
    on_change(place, _ENDS_ALREADY.format("an answer", end.strip()))
    return replace(chat, messages=turns)


def _without_ends(turn: Message, ends: tuple[str, ...]) -> Message:
    content = turn["content"]
    if turn["role"] != "assistant" or not isinstance(content, str):
        return turn
    shorter = without_ends(content, ends)
    return turn if shorter == content else rewritten(turn, shorter, lambda at: min(at, len(shorter)))


def _differences(chat: Chat, texts: Sequence[Rendered], thinking: Thinking | None, place: str) -> Iterator[str]:
    """Yield what is trained otherwise than the turns are."""
    num_looked_for = 0
    for text in texts:
        turns = chat.messages[: text.num_turns]
        if thinking == "keep" and not thinking_of_answers.is_kept(turns, text.text):
            fix = "Set dataset.thinking to 'last' or 'strip', or choose another model.chat_template."
            problem = f"{thinking_of_answers.LEFT_OUT}, and dataset.thinking = 'keep'"
            raise DataError(problem, where=place, of_row=True, fix=fix)
        yield from thinking_of_answers.differences(turns, text.answers, text.text)
        # Once, and again in the last text: the first turns of a long conversation stand in all of its texts.
        yield from unwritten(turns if text is texts[-1] else turns[num_looked_for:], text.text)
        num_looked_for = text.num_turns


def unwritten(turns: Sequence[Message], text: str) -> Iterator[str]:
    """Yield what a text lacks of the turns that are not the assistant's, and of the names of speakers."""
    for turn in turns:
        role, name, content = turn["role"], turn.get("name"), turn["content"]
        if role != "tool" and name and str(name) not in text:
            yield NO_NAME
        pieces = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
        # The result of a tool may be written as JSON.
        if role != "assistant" and not all(
            piece.strip() in text or (role == "tool" and json.dumps(piece, ensure_ascii=False)[1:-1] in text)
            for piece in pieces
        ):
            yield UNWRITTEN.format(role)


def quoted(tokenizer: Any, chat: Chat) -> Chat:
    """Put marks around special tokens that a row's text spells out, so that `encode_rendered` keeps them as text."""
    special, texts = templates.special_tokens(tokenizer), _texts_of(chat)
    return _marked(special, chat) if any(_spelled(texts, special)) or _holds_marks(texts) else chat


def encode_rendered(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a rendered conversation."""
    [(ids, _)] = _encode_rendered(tokenizer, [text], None)
    return list(ids)


def _texts_of(chat: Chat) -> list[Any]:
    """Return all of a conversation that the template may write."""
    return [chat.messages, chat.tools, chat.chat_template_kwargs]


def _holds_marks(texts: Sequence[Any]) -> bool:
    """Return whether a row's text holds a mark of its own, which would make text of what the template writes then."""
    return any(_spelled(texts, _QUOTES))


def _marked(special: re.Pattern[str], chat: Chat) -> Chat:
    messages, tools, names = _quote_special(_texts_of(chat), special)
    moved = [_spans_moved(*both, special) for both in zip(chat.messages, messages, strict=True)]
    return Chat(moved, tools, names)


def _spans_moved(turn: Message, quoted: Message, special: re.Pattern[str]) -> Message:
    """Return a turn that was put into marks, with its spans where their text is now."""
    if not marks_in(turn):
        return quoted
    content = turn["content"].replace(_QUOTE, "")
    marks = [at for match in special.finditer(content) for at in match.span()]

    def place(at: int) -> int:
        at -= turn["content"].count(_QUOTE, 0, at)
        return at + sum(mark < at for mark in marks)

    return {**quoted, "spans": rewritten(turn, quoted["content"], place)["spans"]}


def _spelled(value: Any, special: re.Pattern[str]) -> Iterator[str]:
    """Yield the special tokens that texts spell, also the names of arguments and of properties."""
    if isinstance(value, str):
        yield from (match[0] for match in special.finditer(value))
        return
    if isinstance(value, dict):
        yield from _spelled([*value, *value.values()], special)
    for inner in value if isinstance(value, list) else ():
        yield from _spelled(inner, special)


def _quote_special(value: Any, special: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return special.sub(f"{_QUOTE}\\g<0>{_QUOTE}", value.replace(_QUOTE, ""))
    if isinstance(value, dict):
        return {_quote_special(key, special): _quote_special(inner, special) for key, inner in value.items()}
    return [_quote_special(inner, special) for inner in value] if isinstance(value, list) else value


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
    piece_start = 0
    for number, piece in enumerate(text.split(_QUOTE)):
        if piece:
            [(new, places)] = _encode_plain(tokenizer, [piece], as_text=number % 2 == 1)
            ids += new
            offsets += [(start + piece_start, end + piece_start) for start, end in places]
        piece_start += len(piece) + len(_QUOTE)
    return ids, offsets


def _encode_texts(
    tokenizer: Any, texts: list[str], fast: FastTokens | None, spelled: re.Pattern[str] | None
) -> list[list[int]]:
    """Return the tokens of texts; what `spelled` matches stays text."""

    def exact(batch: list[str]) -> list[list[int]]:
        as_text = spelled is not None
        ids: list[list[int]] = tokenizer(
            batch, return_attention_mask=False, split_special_tokens=as_text, verbose=False
        )["input_ids"]
        return ids

    is_plain = [not (spelled and spelled.search(text)) for text in texts]
    plain = [text for text, fits in zip(texts, is_plain, strict=True) if fits]
    encoded = iter(() if not plain else fast.ids(plain, exact) if fast else exact(plain))
    ids = [next(encoded) if fits else exact([text])[0] for text, fits in zip(texts, is_plain, strict=True)]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    # A corpus that is rendered already spells the first token too, which the tokenizer adds.
    ids = [row[1:] if spelled is None and start and row[:2] == start * 2 else row for row in ids]
    return [row if row[-1:] == end else row + end for row in ids]


def _all_trained(ids: Sequence[int] | Tokens) -> Labelled:
    tokens = np.array(ids, dtype=np.int32)
    return tokens, tokens.copy()


def _weighed(ids: Sequence[int] | Tokens, offsets: Sequence[Span], text: Rendered) -> _Weighed:
    """Return the labels of a rendered conversation's tokens, and their weights where one is neither 0 nor 1."""
    tokens = np.array(ids, dtype=np.int32)
    weights = np.zeros(len(tokens), dtype=np.float32)
    for span, weight in zip(text.spans, text.weights, strict=True):
        if span[0] < span[1]:
            weights[_tokens_of(offsets, *span)] = weight
    for start, end, weight in text.inner:
        for at in range(*_tokens_of(offsets, start, end).indices(len(tokens))):
            if start <= _first_letter(text.text, offsets[at]) < end:
                weights[at] = weight
    labels = np.where(weights > 0, tokens, np.int32(IGNORED))
    return (tokens, labels), weights if ((weights > 0) & (weights < 1)).any() else None


def _tokens_of(offsets: Sequence[Span], start: int, end: int) -> slice:
    first = bisect_right(offsets, start, key=lambda offset: offset[1])
    return slice(first, bisect_left(offsets, end, key=lambda offset: offset[0]))


def _first_letter(text: str, offset: Span) -> int:
    """Return the first character of a token that is no white space: most tokens begin with the space before a word."""
    piece = text[slice(*offset)]
    return offset[0] + (len(piece) - len(piece.lstrip()) if piece.strip() else 0)
