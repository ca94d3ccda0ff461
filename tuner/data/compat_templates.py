"""The private name of transformers that rendering takes; whoever imports it waits for transformers.

Version seen: 5.24, which compiles a chat template once and has no public way to tell it the date.
"""

from __future__ import annotations

from datetime import date, datetime, time

from transformers.utils import chat_template_utils


def set_day(template: str, day: date | None) -> None:
    """Let `strftime_now` say midnight of a day whenever transformers renders this chat template; None: now.

    It compiles the template, so the limits of rendering must stand around it.
    """
    names = chat_template_utils._compile_jinja_template(template).globals
    names.pop("strftime_now", None)  # what stands in the environment stays
    if day is not None:
        names["strftime_now"] = datetime.combine(day, time()).strftime
