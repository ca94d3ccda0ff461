"""Which rows have the same question and answer: their keys, and what is counted of them.

Case and white space make no difference. It reads no rows.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, is_dataclass
from typing import Any

from tuner.data.sample import Chat, Feedback, Message, Pair, Prompt, Sample, unmarked

RowKey = int
_DIGEST_BYTES = 8
"""Two of ten million different rows have one key with a probability of 3 in a million."""

Seen = tuple[RowKey, int]
"""The key of a row, and the hash of its place: a mixture may read a row again, which is no copy."""


def key_of(sample: Sample) -> RowKey:
    """Return a number that samples with the same question and answer share.

    A prompt without an answer is its question alone. A judgement is no part of an answer, and no more is its weight.
    """
    match sample:
        case str():
            return key_of_row([sample])
        case Chat():
            return key_of_row([_said(sample.messages), sample.tools])
        case Pair():
            return key_of_row([*map(_said, (sample.prompt, sample.chosen, sample.rejected)), sample.tools])
        case Feedback():  # as the conversation that it is
            return key_of_row([_said([*sample.prompt, *sample.completion]), sample.tools])
        case Prompt():
            return key_of_row([_said(sample.prompt), sample.tools])


def _said(turns: Iterable[Message]) -> list[Message]:
    return [unmarked(turn) for turn in turns]


def key_of_row(row: Any) -> RowKey:
    """Return the key of a row that is no sample: of all its columns."""
    return _digest(json.dumps(_folded(row), default=_plain, sort_keys=True).encode())


def place_of(place: str) -> int:
    return _digest(place.encode("utf-8", "surrogatepass"))


def _digest(text: bytes) -> int:
    # Signed: a column of a table has 63 bits and a sign.
    return int.from_bytes(hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest(), "big", signed=True)


def _folded(value: Any) -> Any:
    if isinstance(value, str):
        return " ".join(value.split()).casefold()
    if isinstance(value, dict):
        return {str(name): _folded(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_folded(inner) for inner in value]
    return value


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else repr(value)


def leak_warning(num_leaked: int, num_rows: int) -> str:
    """Return the warning about validation rows that stand in the training rows too."""
    verb = "has" if num_leaked == 1 else "have"
    return (
        f"{num_leaked:,} of the {num_rows:,} validation rows {verb} the question and answer of a training row: their "
        "loss shows what was learned by heart. Remove them from one of the two."
    )


def warning(num_copies: int, num_rows: int) -> str:
    """Return the warning about rows that have the question and answer of another row."""
    return (
        f"{num_copies:,} of the {num_rows:,} rows have the question and answer of another row, apart from case and "
        "spaces: the model sees them more often than others."
    )


def count(rows: Iterable[Seen]) -> int:
    """Return how many rows have the question and answer of another row."""
    rows_of_key = Counter(key for key, _ in set(rows))
    return sum(number for number in rows_of_key.values() if number > 1)


def shared(rows: Iterable[Seen], other_rows: Iterable[Seen]) -> int:
    """Return how many of `rows` have the question and answer of one of `other_rows`."""
    other_keys = {key for key, _ in other_rows}
    return sum(key in other_keys for key, _ in set(rows))
