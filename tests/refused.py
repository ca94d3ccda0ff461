"""Which mistake a call is refused for: the class of the error, which has a code of its own, and its place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from tuner.errors import TunerError

Error = TypeVar("Error", bound=TunerError)


@contextmanager
def refused(kind: type[Error], where: str) -> Iterator[pytest.ExceptionInfo[Error]]:
    """Expect one error at a key, an option, or a file and its line; of a path, the last part is enough.

    The words of an error are compared in `tests/golden` alone.
    """
    with pytest.raises(kind) as caught:
        yield caught
    place = caught.value.where or ""
    assert where in (place, place.rpartition("/")[2])
