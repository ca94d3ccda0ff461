"""The text that training makes of a conversation beside the one that a server makes of it, token by token.

It reads no rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tuner.data.rendering import Template, Unrendered, num_alike, rendered
from tuner.data.sample import Chat

_AROUND = 8
"""Tokens that are shown before and after the first that differs."""


@dataclass(frozen=True)
class Difference:
    """The first token that differs up to the end of one assistant turn: `turn` counts from 1, `token` from 0.

    `part` is 'prompt' where it lies before the answer. The texts are the tokens around it, on both sides.
    """

    place: str
    turn: int
    part: str
    token: int
    serving: str
    training: str


def compare(template: Template, chat: Chat, place: str) -> Iterator[Difference]:
    """Yield for each assistant turn where training reads otherwise than serving.

    Serving renders, by the tokenizer's own template, the turns before the answer with the start of one, and then the
    conversation up to the answer; training renders all turns once. Each of the first is to begin the second.
    """
    tokenizer = template.tokenizer
    own = replace(template, text=tokenizer.get_chat_template(), has_markers=False)
    trained = _ids(tokenizer, rendered(template, chat)[0])
    for number, turn in enumerate(chat.messages):
        if turn["role"] != "assistant":
            continue
        for part, end, prompt in (("prompt", number, True), ("answer", number + 1, False)):
            try:
                served = _ids(tokenizer, rendered(own, Chat(chat.messages[:end], chat.tools), prompt=prompt)[0])
            except Unrendered as error:
                yield Difference(place, number + 1, part, 0, f"(not rendered: {error})", "")
                break
            at = num_alike(served, trained)
            if at < len(served):
                around = (tokenizer.decode(ids[max(at - _AROUND, 0) : at + _AROUND]) for ids in (served, trained))
                yield Difference(place, number + 1, part, at, *around)
                break


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids
