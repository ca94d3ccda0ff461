"""Tokens from fastokens, which encodes several times as fast as `tokenizers`, where it gives the same.

It gives no offsets, so they are computed from the bytes of each token. Both encode one text of `EVERY`, and each text
with a character outside ASCII that no text before it had: fastokens 0.3.5 splits U+180E differently, for example.

Version seen: fastokens 0.3.5. It works in forks of a process that has used it.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tuner.data.encoder import Tokens
from tuner.machine import libraries

EVERY = 16
MAX_BYTES = 8 * 1024
"""Of a text. fastokens looks for the words of longer texts, of 16 KiB and more, on several threads; an earlier version
then gave other tokens (its issue 67)."""

Exact = Callable[[list[str]], Sequence[Any]]
"""Encodes texts by `tokenizers`."""

_SPACES = re.compile(r"[Ġ\s]*")


class Differs(Exception):
    """fastokens gives other tokens than `tokenizers`."""


class _Table(NamedTuple):
    """Of each token id: its bytes, and the spaces at its ends that its offsets leave out."""

    num_bytes: npt.NDArray[np.int64]
    leading: npt.NDArray[np.int64] | None
    trailing: npt.NDArray[np.int64] | None
    is_first_whole: bool


class FastTokens:
    """A tokenizer's rules in fastokens."""

    def __init__(self, backend: Any, table: _Table, *, is_nfc: bool) -> None:
        """Take a `fastokens.Tokenizer`; `is_nfc`: it brings texts into that form of Unicode."""
        self._backend, self._table, self._is_nfc = backend, table, is_nfc
        self._compared: set[str] = set()
        """The characters outside ASCII of texts for which both gave the same tokens."""

    @classmethod
    def of(cls, tokenizer: Any) -> FastTokens | None:
        """Return a tokenizer's counterpart; None where there is no fastokens, or none that can be checked.

        Checked can be a byte-level BPE (GPT-2's kind: Llama 3, Qwen, DeepSeek). `tokenizers` is fast with the others.
        """
        if not libraries.is_installed("fastokens") or not tokenizer.is_fast or tokenizer.split_special_tokens:
            return None
        if any(token.lstrip or token.rstrip or token.single_word for token in tokenizer.added_tokens_decoder.values()):
            return None  # fastokens 0.3.5 leaves the spaces beside such tokens to other tokens
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
        if not _is_byte_level(rules):
            return None
        try:
            import fastokens  # only where many rows are encoded

            backend = fastokens.Tokenizer.from_json_str(json.dumps(rules | {"truncation": None, "padding": None}))
        except (ImportError, ValueError):  # it is not for this machine, or does not know a rule
            return None
        return cls(backend, _table(tokenizer, rules), is_nfc=rules["normalizer"] is not None)

    def ids(self, texts: list[str], exact: Exact) -> list[list[int]]:
        """Return the ids of texts, with the special tokens that the tokenizer adds.

        Raises:
            Differs: they are not those of `exact`.
        """
        return self._checked(texts, self._ids, exact, lambda fast, other: fast == other)

    def with_offsets(self, texts: list[str], exact: Exact) -> list[tuple[Sequence[int] | Tokens, Sequence[Any]]]:
        """Return the ids of texts, and the characters of each token, start and end; no special token is added.

        Raises:
            Differs: they are not those of `exact`.
        """
        return self._checked(
            texts, self._with_offsets, exact, lambda fast, other: all(map(np.array_equal, fast, other))
        )

    def _ids(self, text: str) -> list[int] | None:
        return self._encode(text, text.encode(), add_special_tokens=True)

    def _with_offsets(self, text: str) -> tuple[Tokens, npt.NDArray[np.int64]] | None:
        data, table = text.encode(), self._table
        tokens = self._encode(text, data, add_special_tokens=False)
        ids = np.array(tokens or (), dtype=np.int32)
        num_bytes = table.num_bytes[ids]
        ends = num_bytes.cumsum()
        if not tokens or ends[-1] != len(data):
            return None
        starts = ends - num_bytes
        if not text.isascii():
            chars = (np.frombuffer(data, np.uint8) & 0xC0 != 0x80).cumsum()  # that have begun, at each byte
            starts, ends = chars[starts] - 1, chars[ends - 1]
        if table.leading is not None and table.trailing is not None:
            leading = table.leading[ids]
            leading[0] *= not table.is_first_whole
            starts = np.minimum(starts + leading, ends)
            ends = np.maximum(ends - table.trailing[ids], starts)
        return ids, np.stack([starts, ends], axis=1)

    def _checked(
        self, texts: list[str], fast: Callable[[str], Any], exact: Exact, is_same: Callable[[Any, Any], bool]
    ) -> list[Any]:
        encoded = [fast(text) for text in texts]
        again = [
            at for at, tokens in enumerate(encoded) if tokens is None or at % EVERY == 0 or self._is_new(texts[at])
        ]
        for at, tokens in zip(again, exact([texts[at] for at in again]), strict=True):
            if encoded[at] is not None:
                if not is_same(encoded[at], tokens):
                    raise Differs
                self._compared.update(texts[at])
            encoded[at] = tokens
        return encoded

    def _is_new(self, text: str) -> bool:
        """Return whether a text has a character that no text had for which both were compared."""
        return not text.isascii() and any(not letter.isascii() for letter in set(text) - self._compared)

    def _encode(self, text: str, data: bytes, *, add_special_tokens: bool) -> list[int] | None:
        if len(data) > MAX_BYTES or (self._is_nfc and not unicodedata.is_normalized("NFC", text)):
            return None
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (ValueError, RuntimeError):  # such as a limit of its regular expressions
            return None
        return ids


def _is_byte_level(rules: dict[str, Any]) -> bool:
    """Return whether each byte of a text is in one token, and the token's name has one letter for each."""
    model, normalizer = rules["model"], rules["normalizer"]
    changed = (model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
    is_plain = model["type"] == "BPE" and not any(changed) and not model.get("byte_fallback")
    splits = [rule for rule in _rules(rules["pre_tokenizer"]) if rule["type"] == "ByteLevel"]
    has_form = normalizer is None or normalizer["type"] == "NFC"
    return is_plain and has_form and bool(splits) and not any(rule["add_prefix_space"] for rule in splits)


def _table(tokenizer: Any, rules: dict[str, Any]) -> _Table:
    names = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
    added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items()}
    size = max([*names.values(), *added]) + 1
    num_bytes = np.zeros(size, dtype=np.int64)
    num_bytes[list(names.values())] = list(map(len, names))
    num_bytes[list(added)] = [len(content.encode()) for content in added.values()]
    trims = [rule for rule in _rules(rules["post_processor"]) if rule["type"] == "ByteLevel" and rule["trim_offsets"]]
    if not trims:
        return _Table(num_bytes, None, None, is_first_whole=False)
    leading, trailing = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    for name, number in [*names.items(), *((content, number) for number, content in added.items())]:
        leading[number], trailing[number] = _num_spaces(name), _num_spaces(name[::-1])
    return _Table(num_bytes, leading, trailing, is_first_whole=trims[0]["add_prefix_space"])


def _num_spaces(name: str) -> int:
    spaces = _SPACES.match(name)
    return spaces.end() if spaces else 0


def _rules(rule: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return a rule, or those of a sequence."""
    if rule is None:
        return []
    inner = rule.get("pretokenizers") or rule.get("processors") if rule["type"] == "Sequence" else None
    return [rule] if inner is None else [inner_rule for part in inner for inner_rule in _rules(part)]
