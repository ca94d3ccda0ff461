"""How much a row, a chat template or a file of columns may become: bytes of text, processor time, memory.

A file says nothing of that: thirty kilobytes can unfold to any size. It reads nothing, and knows no format.
"""

from __future__ import annotations

import json
import resource
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from tuner.errors import DataError
from tuner.files import read_text

T = TypeVar("T")

MAX_SAMPLE_BYTES = 8 * 1024**2
"""Of what is tokenized at once, as UTF-8: some two million tokens. A tokenizer takes 400 times as much memory."""
MAX_DEPTH = 100
"""Of lists and objects inside each other in a row: Arrow's own limit for columns. Python ends at some hundreds."""
MAX_ADDED_BYTES, MAX_TIMES = 256 * 1024, 8
"""What a chat template may make of a conversation: so many times its size, and so much more."""
MAX_BYTES_AT_ONCE = 2 * 1024**3
"""Of memory that a template or a slice of a file of columns may take."""
MAX_TEMPLATE_S = 5
"""Of processor time for one conversation."""

_MAX_GROWTH = 100
"""Bytes that a tokenizer's own rules may write for one; Llama 2's write 9."""
_GROWTH_OF_UNICODE = 18
"""Source: Unicode Standard Annex 15, section 'Expansion': of NFKC, U+FDFA."""
_PIECE = 16 * 1024
_DATA = 5  # the field of statm; source: proc(5)
_is_limited = False


def too_deep(value: Any) -> bool:
    """Return whether a value of JSON has more than `MAX_DEPTH` lists and objects inside each other, however many."""
    level = [value]
    for _ in range(MAX_DEPTH):
        blocks = (item for item in level if isinstance(item, dict | list))
        level = [item for block in blocks for item in (block.values() if isinstance(block, dict) else block)]
        if not level:
            return False
    return any(isinstance(item, dict | list) for item in level)


def size(value: Any) -> int:
    """Return the bytes of the texts that a sample holds, with sixteen more for each value."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, dict):
        return sum(16 + size(key) + size(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return sum(16 + size(item) for item in value)
    return sum(size(getattr(value, field.name)) for field in fields(value)) if is_dataclass(value) else 16


def batches(values: Iterable[T], count: int | None = None) -> Iterator[list[T]]:
    """Yield values in lists of at most `count`, each hardly larger than one sample may be."""
    batch: list[T] = []
    length = 0
    for value in values:
        batch.append(value)
        length += size(value)
        if len(batch) == count or length > MAX_SAMPLE_BYTES:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


def check_text(tokenizer: Any, text: str, place: str) -> None:
    """Check that a text can be tokenized within the limits.

    Raises:
        DataError: it is too long, or becomes so by the tokenizer's own rules.
    """
    if size(text) > MAX_SAMPLE_BYTES:
        raise too_long("the text", place)
    growth = _growth(tokenizer)
    if growth > _MAX_GROWTH:
        problem = f"the tokenizer turns one byte into up to {growth:,}"
        raise DataError(problem, where="the tokenizer", fix="Use the tokenizer that the model was published with.")
    if size(text) * growth * _GROWTH_OF_UNICODE <= MAX_SAMPLE_BYTES:
        return
    normalizer = tokenizer.backend_tokenizer.normalizer if tokenizer.is_fast else None
    pieces = (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))
    sizes = accumulate(size(normalizer.normalize_str(piece)) for piece in pieces) if normalizer else ()
    if any(so_far > MAX_SAMPLE_BYTES for so_far in sizes):
        raise too_long("the text, as the tokenizer normalizes it,", place)


def too_long(name: str, place: str) -> DataError:
    """Return the error of a row that becomes more than can be tokenized at once."""
    limit = MAX_SAMPLE_BYTES // 1024**2
    return DataError(f"{name} is longer than {limit} MiB", where=place, of_row=True, fix="Split the row.")


@lru_cache(maxsize=1)
def _growth(tokenizer: Any) -> int:
    """Return how many bytes a tokenizer's rules can make of one, at most; those of Unicode aside."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {}
    growth = 1
    for rule in _replacing([rules.get("normalizer"), rules.get("decoder")]):
        text = rule["content"] if rule["type"] == "Replace" else rule["prepend"]
        can_match_nothing = rule["type"] == "Replace" and "Regex" in rule["pattern"]
        growth *= max(1, len(text.encode()) + can_match_nothing)
    return growth


def _replacing(rules: Any) -> Iterator[dict[str, Any]]:
    if isinstance(rules, dict) and rules.get("type") in ("Replace", "Prepend"):
        yield rules
    inner = rules.values() if isinstance(rules, dict) else rules if isinstance(rules, list) else ()
    for rule in inner:
        yield from _replacing(rule)


@contextmanager
def memory() -> Iterator[None]:
    """Let the code inside take `MAX_BYTES_AT_ONCE` more than is taken; Python and Arrow raise MemoryError beyond.

    Nested, the outer counts.
    """
    global _is_limited
    if _is_limited:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    taken_bytes = int(read_text(Path("/proc/self/statm")).split()[_DATA]) * resource.getpagesize()
    limits = [taken_bytes + MAX_BYTES_AT_ONCE, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    _is_limited = True
    try:
        yield
    finally:
        _is_limited = False
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@contextmanager
def processor_time(error: Exception) -> Iterator[None]:
    """Raise `error` in the code inside when it has taken `MAX_TEMPLATE_S` of processor time; nested, the outer counts.

    Python takes signals in its main thread alone: in another one nothing is raised.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getitimer(signal.ITIMER_VIRTUAL)[0]:
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise error

    before = signal.signal(signal.SIGVTALRM, stop)  # effect: ends a chat template that takes too long
    # Again and again: what is raised while an object is finalized is lost.
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_TEMPLATE_S, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)  # effect: and gives it back
