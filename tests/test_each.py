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


def test_the_short_suite_has_one_of_some_and_the_long_one_the_others() -> None:
    tried = []

    @each("abcdefg", every=3)
    def seen(letter: str) -> None:
        tried.append(letter)

    [given] = seen.pytestmark  # type: ignore[attr-defined]
    assert [[mark.name for mark in part.marks] for part in given.args[1]] == [[], ["long"]]
    for part in given.args[1]:
        seen(*part.values)
        tried.append("-")
    assert "".join(tried) == "adg-bcef-"
