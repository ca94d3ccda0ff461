"""The private names that this package takes.

Version seen: datasets 5.2, which takes a new fingerprint and has no public name for the old one. It imports nothing: a
plan reads rows.
"""

from __future__ import annotations

from typing import Any


def fingerprint_of(rows: Any) -> str:
    """Return the name of a `datasets.Dataset`, which changes with its rows."""
    return str(rows._fingerprint)


def with_fingerprint(rows: Any, suffix: str) -> Any:
    """Return the same `datasets.Dataset` under another fingerprint, by which TRL keeps what it has computed of them."""
    return rows.select(range(len(rows)), new_fingerprint=f"{fingerprint_of(rows)}-{suffix}")
