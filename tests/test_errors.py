"""The tree of user mistakes: every class is documented with the exit code it has, and every message has its parts."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner import errors
from tuner.errors import (
    DsKey,
    Key,
    MachineError,
    Option,
    RecipeError,
    TunerError,
    UsageError,
    did_you_mean,
    nearest,
    options,
    together,
    words_of,
)

CLASSES = [found for _, found in inspect.getmembers(errors, inspect.isclass) if issubclass(found, TunerError)]


def test_the_tree_in_the_docstring_is_the_tree_in_the_code() -> None:
    drawn = re.findall(r"^\W*(\w+) +(\d+)   ", errors.__doc__ or "", flags=re.MULTILINE)

    assert {name: int(code) for name, code in drawn} == {found.__name__: found.exit_code for found in CLASSES}


@pytest.mark.parametrize("found", CLASSES, ids=lambda found: found.__name__)
def test_every_mistake_has_a_code_of_its_own_and_a_sentence(found: type[TunerError]) -> None:
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", found.code)
    assert [other for other in CLASSES if other.code == found.code] == [found]
    assert found.__doc__


def test_no_exit_code_is_success_or_one_of_a_signal() -> None:
    assert all(0 < found.exit_code < 128 for found in CLASSES)


@pytest.mark.parametrize(
    ("where", "fix", "text"),
    [
        (None, None, "bad-recipe: lr = nan is no number."),
        ("my.py:14", None, "bad-recipe: my.py:14: lr = nan is no number."),
        (None, "Write 2e-4", "bad-recipe: lr = nan is no number. Write 2e-4."),
        ("my.py:14", "Write 2e-4.", "bad-recipe: my.py:14: lr = nan is no number. Write 2e-4."),
        (None, "Go. See: tuner list", "bad-recipe: lr = nan is no number. Go. See: tuner list"),
        ("my.py:14", "Did you mean 'x'?", "bad-recipe: my.py:14: lr = nan is no number. Did you mean 'x'?"),
    ],
)
def test_a_message_says_where_what_and_what_to_do(where: str | None, fix: str | None, text: str) -> None:
    assert str(RecipeError("lr = nan is no number", where=where, fix=fix)) == text


def test_one_error_tells_of_many_each_with_its_own_place_and_advice() -> None:
    first, second, third = (
        RecipeError(f"no key {key!r}", where=f"my.py:{line}", fix="Go.") for line, key in enumerate("abc")
    )
    machine = MachineError("no GPU", where="--gpus")

    error = together([machine, together([first, second]), third])

    assert list(error.each()) == [machine, first, second, third]
    assert error.exit_code == 2, "a wrong recipe before a wrong machine"
    lines = [f"bad-recipe: my.py:{line}: no key {key!r}. Go." for line, key in enumerate("abc")]
    assert error.for_people() == [
        "error[bad-environment]: --gpus: no GPU.",
        *(f"error[bad-recipe]: my.py:{line}: no key {key!r}. Go." for line, key in enumerate("abc")),
    ]
    assert str(error).splitlines() == ["bad-environment: --gpus: no GPU.", *lines]


@pytest.mark.parametrize(
    ("name", "found"),
    [("qlra", "qlora"), ("QLORA", "qlora"), ("sdpa", "SDPA"), ("entirely different", None), ("", None)],
)
def test_the_nearest_name_ignores_case_and_may_be_none(name: str, found: str | None) -> None:
    assert nearest(name, ["lora", "qlora", "SDPA"]) == found


def test_a_suggestion_is_followed_by_where_the_names_are_listed() -> None:
    assert did_you_mean("qlra", ["qlora"], see="tuner list") == "Did you mean 'qlora'? See: tuner list"
    assert did_you_mean("zzz", ["qlora"], see="tuner list") == "See: tuner list"
    assert did_you_mean("qlra", ["qlora"]) == "Did you mean 'qlora'?"
    assert did_you_mean("zzz", ["qlora"]) == ""


@given(st.text(st.characters(exclude_categories=())), st.lists(st.text()))
def test_the_nearest_name_is_one_of_the_candidates(name: str, candidates: list[str]) -> None:
    assert nearest(name, candidates) in {None, *candidates}


def test_a_message_is_short_and_moves_no_cursor_whatever_it_quotes() -> None:
    text = str(RecipeError("x" * 9_000 + "\x1b[2J", where="a\rb", fix="\u202eWrite \udcff\nit"))

    assert text.startswith(r"bad-recipe: a\rb: xxx") and " ... 5,004 characters ... " in text
    assert text.endswith(r"x\x1b[2J. \u202eWrite \udcff" + "\nit.")
    assert len(text) < 5_000


@pytest.mark.parametrize("text", ["swift sft --model 'x", 'ssh "x', "ssh \\"])
def test_a_command_line_with_an_open_quote_is_one_message(text: str) -> None:
    with pytest.raises(UsageError, match="is no command line"):
        words_of(text, "--ssh")

    assert words_of("ssh -p '2 2'", "--ssh") == ["ssh", "-p", "2 2"]


def test_options_together_are_the_arguments_of_one_call_in_python() -> None:
    several = options(
        options(DsKey("overlap_comm", True), Key("train_cfg.loss", "whole")),
        DsKey("zero_optimization.stage", 3),
        Option("epochs", 3),
        Key("train_cfg.seed", 1),
        options(),
    )

    expected = {"ds": {"overlap_comm": True, "zero_optimization.stage": 3}, "train_cfg": {"loss": "whole", "seed": 1}}
    assert eval(f"dict({several.in_python})") == expected | {"epochs": 3}  # noqa: S307
    assert several.count("--ds ") == 2 and several.count("--set ") == 2


def test_an_option_that_another_process_sent_can_stand_among_others() -> None:
    sent = pickle.loads(pickle.dumps(Key("train_cfg.loss", "whole")))  # noqa: S301

    assert options(sent, Option("epochs", 3)) == "--set train_cfg.loss=whole --epochs 3"
    assert (type(sent), sent.in_python) == (Key, 'train_cfg={"loss": "whole"}')
