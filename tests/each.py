"""One test for hundreds of values that are checked in a moment each: a test of its own costs more than the check."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest

_MAX_TOLD = 10


def each(values: Iterable[Any], *, every: int = 1) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test for every value, and tell all that fail, like parametrize does.

    Args:
        every: Which values the short suite has: the first, the one so many after it, and so on. `make test-long` has
            the others.
    """

    given = list(values)
    assert given, "there is no value"

    def run(test: Callable[..., None]) -> Callable[..., None]:
        def on(values: Iterable[Any]) -> None:
            failures: list[Exception] = []
            for value in values:
                try:
                    test(*value) if isinstance(value, tuple) else test(value)
                except (Exception, AssertionError) as error:
                    error.add_note(f"with {value!r}")
                    failures.append(error)
            if failures:
                told = f"{test.__name__}: {len(failures)} of {len(given)} fail; the first are"
                raise ExceptionGroup(told, failures[:_MAX_TOLD])

        @functools.wraps(test)
        def on_all() -> None:
            on(given)

        @functools.wraps(test)
        def on_part(is_long: bool) -> None:
            on(value for at, value in enumerate(given) if bool(at % every) == is_long)

        # pytest would ask for its parameters
        del on_all.__wrapped__, on_part.__wrapped__  # type: ignore[attr-defined]
        long = pytest.param(True, marks=pytest.mark.long, id="the others")
        parts = pytest.mark.parametrize("is_long", [pytest.param(False, id=f"one of {every}"), long])
        return on_all if every == 1 else parts(on_part)

    return run
