"""Which mistake a call is refused for: the class of the error, which has a code of its own, and its place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from tuner.errors import TunerError

Error = TypeVar("Error", bound=TunerError)


@contextmanager
def refused(kind: type[Error], where: str | None, *values: object) -> Iterator[pytest.ExceptionInfo[Error]]:
    """Expect one error, and values that it names, each as a whole word.

    The words of an error are compared in `tests/golden` alone.

    Args:
        where: Its key, its option, or its file and line, of whose path the last part is enough; None: it has no place.
        values: Keys, flags, numbers and names.
    """
    with pytest.raises(kind) as caught:
        yield caught
    place = caught.value.where or ""
    assert (where or "") in (place, place.rpartition("/")[2])
    message = str(caught.value)
    assert [value for value in values if not re.search(rf"(?<!\w){re.escape(str(value))}(?!\w)", message)] == []
