"""Refuse objects of JSON in rows that have a key twice: one of its two values would be lost."""

from __future__ import annotations

from typing import Any


class RepeatedKey(ValueError):
    """An object of JSON with a key twice."""


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object with these keys and values: the `object_pairs_hook` of a JSON decoder.

    Raises:
        RepeatedKey: a key appears twice.
    """
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        raise RepeatedKey(f"key {next(key for key in keys if keys.count(key) > 1)!r} appears twice in one object")
    return value
