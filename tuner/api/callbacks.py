"""`callbacks` of `train`: functions that get a run's events, and classes of the ranks by their import paths."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from tuner.errors import UsageError, brief_repr

Event = dict[str, Any]
Callback = str | Callable[[Event], object]


def of_ranks(callbacks: Sequence[Callback]) -> list[str]:
    """Return the import paths among callbacks, which the ranks load.

    Raises:
        UsageError: one is neither an import path nor a function.
    """
    for one in callbacks:
        if _is_trainer_callback(one):
            what = f"callbacks holds {brief_repr(one)}, which cannot leave this process; training runs in others"
            fix = "Put the class into a module, and give its import path: callbacks=['my_module:MyCallback']."
            raise UsageError(what, where="callbacks", fix=fix)
        if not isinstance(one, str) and not callable(one):
            fix = "Give functions of one event, or import paths such as 'my_module:MyCallback'."
            raise UsageError(f"{brief_repr(one)} is no callback", where="callbacks", fix=fix)
    return [one for one in callbacks if isinstance(one, str)]


def _is_trainer_callback(one: object) -> bool:
    """Return whether it is transformers' own kind; where nobody imported transformers, nothing is."""
    transformers = sys.modules.get("transformers")
    kind = getattr(transformers, "TrainerCallback", None) if transformers else None
    return kind is not None and (isinstance(one, kind) or (isinstance(one, type) and issubclass(one, kind)))


class Functions:
    """Hands each event to functions, in the order in which they were given; one that fails is not called again."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._functions = [one for one in callbacks if not isinstance(one, str)]

    def __bool__(self) -> bool:
        return bool(self._functions)

    def __call__(self, event: Event) -> None:
        for function in [*self._functions]:
            try:
                function(dict(event))
            except Exception:  # a mistake in the caller's function must not end the run
                self._functions.remove(function)
                traceback.print_exc()
                print(f"tuner: {function!r} failed and is not called again.", file=sys.stderr)  # effect: as warnings
