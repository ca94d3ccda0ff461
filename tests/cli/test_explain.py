"""`tuner explain`: every code has an explanation, every example is real, and every error names the command."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import tuner as package
from tests.cli.command import Tuner
from tests.each import each
from tuner import errors
from tuner.cli.explain import Explanation, exit_codes, explanations
from tuner.errors import TunerError
from tuner.runs import causes

pytestmark = pytest.mark.usefixtures("nothing_starts")
ALL = [*explanations().values()]
SOURCE = "\n".join(path.read_text(encoding="utf-8") for path in Path(package.__file__).parent.rglob("*.py"))


def test_every_code_that_can_be_raised_is_explained_and_no_other() -> None:
    assert explanations().keys() == exit_codes().keys()


@each([found for found in vars(errors).values() if isinstance(found, type) and issubclass(found, TunerError)])
def test_every_class_of_error_is_raised_somewhere(found: type[TunerError]) -> None:
    assert re.search(rf"(?<!class ){found.__name__}\(", SOURCE)


@pytest.mark.parametrize(
    "explanation", [explanation for explanation in ALL if explanation.command], ids=lambda explanation: explanation.code
)
def test_an_example_is_what_its_command_prints(tuner: Tuner, explanation: Explanation) -> None:
    result = tuner(*shlex.split(explanation.command or "")[1:])

    assert (result.code, explanation.code in explanation.example) == (2, True)
    assert explanation.example in result.out + result.err


@each(
    [
        explanation
        for explanation in ALL
        if any(cause.name == explanation.code and cause.signs for cause in causes.every())
    ]
)
def test_an_example_without_a_command_leads_to_its_code(explanation: Explanation) -> None:
    found = causes.classify(explanation.example)

    assert explanation.example.startswith(f"error[{explanation.code}]: ") or (
        found and found[0].name == explanation.code
    )


def test_one_code_is_explained_in_its_parts(tuner: Tuner) -> None:
    told = tuner("explain", "port-in-use").out

    assert told.startswith("port-in-use: Another process uses the port that the ranks need to connect. Exit code 3.\n")
    assert re.findall(r"^(\w+):$", told, re.MULTILINE) == ["Cause", "Example", "Fix"]
    assert "--master-port 29501" in told


def test_without_a_code_all_are_listed_a_line_each(tuner: Tuner) -> None:
    lines = tuner("explain").out.splitlines()

    assert [line.split()[0] for line in lines] == [*explanations()]


def test_an_unknown_code_gets_the_nearest_one(tuner: Tuner) -> None:
    result = tuner("explain", "bad-recip")

    assert result.code == 2
    assert "Did you mean 'bad-recipe'?" in result.err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["show", "tiny_ful_sample_e1"], "bad-recipe"),
        (["--colour"], "bad-usage"),
        (["shwo"], "bad-usage"),
        (["show", "--colour"], "bad-usage"),
        (["export"], "bad-usage"),
        (["train", "tiny_full_sample_e1", "--nnodes", "two"], "bad-usage"),
    ],
)
def test_every_error_starts_with_its_code_and_names_the_command_that_explains_it(
    tuner: Tuner, arguments: list[str], code: str
) -> None:
    result = tuner(*arguments)

    message, more = result.err.splitlines()
    assert result.code == 2
    assert message.startswith(f"error[{code}]: ")
    assert more == f"More: tuner explain {code}"


def test_several_errors_name_each_code_once(tuner: Tuner) -> None:
    result = tuner("train", "tiny_full_sample_e1", "--model", "./no", "--data", "no.jsonl", "--set", "chat_template=no")

    assert result.err.splitlines()[-1].startswith("More: tuner explain bad-")
    assert result.err.count("More: ") == 1
