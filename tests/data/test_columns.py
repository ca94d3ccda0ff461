from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.refused import refused
from tuner.data import formats
from tuner.data.formats.columns import renamed
from tuner.data.sample import Chat
from tuner.errors import DataError


def test_a_column_is_taken_whatever_its_type_and_leaves_its_old_name() -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]

    assert renamed({"dialog": turns, "id": 7}, {"messages": "dialog"}, "x") == {"id": 7, "messages": turns}


def test_a_text_is_made_of_several_columns_and_numbers() -> None:
    row = {"context": "CREATE", "question": "How many?", "count": 3, "none": None, "answer": "a"}
    columns = {"instruction": "{context}\n{question} {count}{none}", "output": "answer"}

    assert renamed(row, columns, "x") == {"instruction": "CREATE\nHow many? 3", "output": "a"}


def test_columns_may_swap_names() -> None:
    assert renamed({"input": "q", "output": "a"}, {"input": "output", "output": "input"}, "x") == {
        "input": "a",
        "output": "q",
    }


@pytest.mark.parametrize("hostile", ["{answer}", "{0}", "{a.__class__}", "{{x}}", "{a!r:>10}", "}{", "%s \\1 \\g<0>"])
def test_braces_in_a_row_s_text_stand_for_nothing(hostile: str) -> None:
    made = renamed({"a": hostile, "answer": "secret"}, {"text": "say {a}, {{a}} }}"}, "x")

    assert made["text"] == f"say {hostile}, {{a}} }}"


@pytest.mark.parametrize("source", ["{a.__class__}", "{a[0]}", "{a!r}", "{a:>10}", "{}", "{0}", "{b}"])
def test_only_a_column_s_plain_name_stands_between_braces(source: str) -> None:
    with refused(DataError, "my.jsonl:3"):
        renamed({"a": "x"}, {"text": source}, "my.jsonl:3")


def test_a_column_s_name_may_hold_anything() -> None:
    assert renamed({"Complex CoT": "x", "{odd}": "y"}, {"a": "{Complex CoT}!", "b": "{odd}"}, "x") == {
        "a": "x!",
        "b": "y",
    }


@pytest.mark.parametrize(
    ("where", "nearest", "read"),
    [
        ("x", "question", lambda: renamed({"question": "q", "answer": "a"}, {"prompt": "qestion"}, "x")),
        (
            *("dataset.columns", "instruction"),
            lambda: formats.read_sample("alpaca", {"q": "q", "output": "a"}, "x", columns={"instuction": "q"}),
        ),
        ("dataset.columns", "chosen", lambda: formats.detect([{"q": "q"}], "x", columns={"chozen": "q"})),
    ],
    ids=["of the row", "of the format", "of any format, before detection"],
)
def test_a_missing_column_names_the_nearest(where: str, nearest: str, read: Callable[[], object]) -> None:
    with refused(DataError, where) as caught:
        read()
    assert repr(nearest) in (caught.value.fix or "")


@pytest.mark.parametrize("value", [["q"], True, {"a": "b"}])
def test_a_text_of_columns_that_hold_no_text_is_refused(value: Any) -> None:
    with refused(DataError, "my.jsonl:3"):
        renamed({"a": value}, {"text": "{a}"}, "my.jsonl:3")


def test_a_format_reads_the_renamed_row_and_names_its_columns() -> None:
    columns = {"instruction": "{context}\n{question}", "output": "answer"}

    chat = formats.read_sample("alpaca", {"context": "c", "question": "q", "answer": "a"}, "x", columns=columns)

    assert chat == Chat([{"role": "user", "content": "c\nq"}, {"role": "assistant", "content": "a"}])
    with pytest.raises(DataError, match="its columns are instruction, output"):
        formats.read_sample("alpaca", {"context": "c", "question": "q", "answer": None}, "x", columns=columns)
