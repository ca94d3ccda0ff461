"""Rows that a function of the user's reads: finds it, and takes what it returns for a row of a known format.

It knows no columns of its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from tuner.data.formats import chats, judged
from tuner.data.formats.cells import Misfit, Row
from tuner.data.sample import Sample
from tuner.errors import DataError


def user_function(name: str) -> Callable[[Row], Any]:
    """Import the function that `my_package.my_module:my_function` names: a row in, messages or a text out.

    Raises:
        DataError: there is no such module or function.
    """
    module, _, function = name.partition(":")
    try:
        imported = getattr(importlib.import_module(module), function, None)
    except ImportError as error:
        fix = "Install the package, or put its folder on PYTHONPATH."
        raise DataError(f"cannot import {module!r}: {error}", where="dataset.format", fix=fix) from error
    if not callable(imported):
        fix = "Name a function as 'my_package.my_module:my_function'."
        raise DataError(f"{module} has no function {function!r}", where="dataset.format", fix=fix)
    return imported  # type: ignore[no-any-return]


def sample_of(name: str, row: Row, place: str) -> Sample:
    """Return what the function that `name` names makes of a row.

    Raises:
        DataError: there is no such function, or it returns no sample.
    """
    made = user_function(name)(row)
    if isinstance(made, str):
        return made
    try:
        whole = {"messages": made} if isinstance(made, list) else made
        shape = next((shape for shape in _RETURNED if shape in whole), "messages")
        return _RETURNED[shape](whole)
    except (Misfit, TypeError, AttributeError) as error:
        fix = (
            "Return a text, a list of messages, or a row of format 'messages', 'prompt_completion', 'preference' "
            "or 'feedback'."
        )
        raise DataError(f"{name} returned no sample: {error}", where=place, of_row=True, fix=fix) from error


# The first column that one of a user's rows has tells what it is.
_RETURNED: dict[str, Callable[[Row], Sample]] = {
    "chosen": judged.read_preference,
    "label": judged.read_feedback,
    "completion": chats.read_prompt_completion,
    "messages": chats.read_messages,
}
