"""The bytes that each token of a tokenizer stands for, and which tokens of two tokenizers spell the same text.

It reads the rules of a tokenizer.json. Known are byte-level BPE (Llama 3, Qwen, SmolLM, GPT-2) and the pieces of
SentencePiece (Gemma, Llama 2, Mistral).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from os.path import commonprefix
from typing import Any, NamedTuple

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
MOST_TOKENS = 32
"""Of a span on each side. In longer ones the two tokenizers have lost each other."""


class Span(NamedTuple):
    """Tokens of two sequences that spell the same text: the first and the one after the last of each."""

    student: tuple[int, int]
    teacher: tuple[int, int]


def token_bytes(rules: Mapping[str, Any]) -> dict[int, bytes] | None:
    """Return the bytes of each token of a tokenizer.json that is text, by its id; None for an unknown kind of rules.

    Special tokens are no text.
    """
    model, kinds = rules["model"], {*_kinds(rules.get("pre_tokenizer")), *_kinds(rules.get("decoder"))}
    words = model.get("vocab") or {}
    ids = words if isinstance(words, Mapping) else {word: number for number, (word, _) in enumerate(words)}
    if "ByteLevel" in kinds:
        letters = _letters()
        bytes_by_id = {
            number: bytes(letters[letter] for letter in word)
            for word, number in ids.items()
            if all(letter in letters for letter in word)
        }
    elif model.get("type") in ("BPE", "Unigram") and (model.get("byte_fallback") or "Metaspace" in kinds):
        bytes_by_id = {number: _piece(word) for word, number in ids.items()}
    else:
        return None
    for token in rules.get("added_tokens") or ():
        bytes_by_id.pop(token["id"], None)
        if not token["special"]:
            bytes_by_id[token["id"]] = token["content"].encode()
    return bytes_by_id


def special_tokens(rules: Mapping[str, Any]) -> dict[str, int]:
    """Return the special tokens of a tokenizer.json, with their ids."""
    return {token["content"]: token["id"] for token in rules.get("added_tokens") or () if token["special"]}


def _piece(word: str) -> bytes:
    byte = _BYTE.fullmatch(word)
    return bytes([int(byte[1], 16)]) if byte else word.replace(_SPACE, " ").encode()


def _kinds(rule: Mapping[str, Any] | None) -> list[str]:
    """Return the types of a rule and of those inside it."""
    if rule is None:
        return []
    inner = [part for name in ("pretokenizers", "decoders") for part in rule.get(name) or ()]
    return [rule["type"], *(kind for part in inner for kind in _kinds(part))]


def _letters() -> dict[str, int]:
    """Return the letter of each byte in the names of a byte-level BPE's tokens, as GPT-2 has chosen them."""
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + at): byte for at, byte in enumerate(hidden)}


def spans(student_tokens: Sequence[bytes], teacher_tokens: Sequence[bytes]) -> list[Span]:
    """Return the shortest spans in which the tokens of two sequences spell the same text, one after another.

    They end where the texts first differ. A span of more than `MOST_TOKENS` is left out.
    """
    num_same = len(commonprefix([b"".join(student_tokens), b"".join(teacher_tokens)]))  # noqa: RUF071  # of texts, not of paths
    ends = [list(accumulate(map(len, tokens))) for tokens in (student_tokens, teacher_tokens)]
    matches, before = [], (0, 0)
    for end in sorted({*ends[0]} & {*ends[1]}):
        if end > num_same:
            break
        after = bisect_right(ends[0], end), bisect_right(ends[1], end)
        if max(after[0] - before[0], after[1] - before[1]) <= MOST_TOKENS:
            matches.append(Span((before[0], after[0]), (before[1], after[1])))
        before = after
    return matches


def same_tokens(student_bytes: Mapping[int, bytes], teacher_bytes: Mapping[int, bytes]) -> list[tuple[int, int]]:
    """Return the ids of the tokens that both have with the same bytes: the student's and the teacher's.

    Of two tokens with the same bytes the last one counts: in SentencePiece's lists letters come after single bytes.
    """
    number_of, number_there = (
        {spelled: number for number, spelled in sorted(bytes_by_id.items())}
        for bytes_by_id in (student_bytes, teacher_bytes)
    )
    return sorted((number, number_there[spelled]) for spelled, number in number_of.items() if spelled in number_there)
