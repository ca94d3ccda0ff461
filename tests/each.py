"""One test for hundreds of values that are checked in a moment each: a test of its own costs more than the check."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

_MAX_TOLD = 10


def each(values: Iterable[Any]) -> Callable[[Callable[[Any], None]], Callable[[], None]]:
    """Run a test for every value, and tell all that fail, like parametrize does."""

    given = list(values)
    assert given, "there is no value"

    def run(test: Callable[[Any], None]) -> Callable[[], None]:
        @functools.wraps(test)
        def on_all() -> None:
            failures: list[Exception] = []
            for value in given:
                try:
                    test(*value) if isinstance(value, tuple) else test(value)
                except (Exception, AssertionError) as error:
                    error.add_note(f"with {value!r}")
                    failures.append(error)
            if failures:
                told = f"{test.__name__}: {len(failures)} of {len(given)} fail; the first are"
                raise ExceptionGroup(told, failures[:_MAX_TOLD])

        del on_all.__wrapped__  # type: ignore[attr-defined]  # pytest would ask for its parameters
        return on_all

    return run
