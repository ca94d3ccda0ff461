from __future__ import annotations

import pytest

from tests.each import each


def test_every_value_is_tried_and_all_that_fail_are_told() -> None:
    tried = []

    @each([1, 2, 3, 4])
    def even(number: int) -> None:
        tried.append(number)
        assert number % 2 == 0

    with pytest.raises(ExceptionGroup, match="2 of 4 fail") as caught:
        even()

    assert tried == [1, 2, 3, 4]
    assert [error.__notes__ for error in caught.value.exceptions] == [["with 1"], ["with 3"]]
