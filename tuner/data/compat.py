"""The private names that this package takes.

Versions seen: datasets 5.2, which takes a new fingerprint and has no public name for the old one, and transformers
5.23, which compiles a chat template once and has no public way to tell it the date.
"""

from __future__ import annotations

from datetime import date, datetime, time
from typing import Any

from transformers.utils import chat_template_utils


def fingerprint_of(rows: Any) -> str:
    """Return the name of a `datasets.Dataset`, which changes with its rows."""
    return str(rows._fingerprint)


def with_fingerprint(rows: Any, more: str) -> Any:
    """Return the same `datasets.Dataset` under another fingerprint, by which TRL keeps what it has computed of them."""
    return rows.select(range(len(rows)), new_fingerprint=f"{fingerprint_of(rows)}-{more}")


def set_day(template: str, day: date | None) -> None:
    """Let `strftime_now` say midnight of a day whenever transformers renders this chat template; None: now.

    It compiles the template, so the limits of rendering must stand around it.
    """
    names = chat_template_utils._compile_jinja_template(template).globals
    names.pop("strftime_now", None)  # what stands in the environment stays
    if day is not None:
        midnight = datetime.combine(day, time())

        def strftime_now(form: str) -> str:
            return midnight.strftime(form)

        names["strftime_now"] = strftime_now
