"""`tuner chat` in a script: the answer alone on stdout, and one line where there can be none."""

from __future__ import annotations

import io
import json
import sys

import pytest

from tests.cli.command import Result, Tuner
from tuner.worker.generation import Answer

TINY = "package:tiny"
SHORT = ("--max-new-tokens", 6, "--temperature", 0)


def asked(tuner: Tuner, monkeypatch: pytest.MonkeyPatch, prompt: bytes, *arguments: object) -> Result:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(prompt)))
    return tuner("chat", *arguments)


def test_stdin_is_one_prompt_and_the_answer_alone_goes_to_stdout(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    told = asked(tuner, monkeypatch, b"Why?\nTell me.\n", TINY, *SHORT)
    as_json = asked(tuner, monkeypatch, b"Why?\nTell me.\n", TINY, *SHORT, "--json")
    other = asked(tuner, monkeypatch, b"Why?\nTell me.\n", TINY, *SHORT, "--system", "Be kind. " * 20)

    assert told.code == as_json.code == other.code == 0
    value = json.loads(as_json.out)
    assert value == {
        "prompt": "Why?\nTell me.",
        "answer": told.out.removesuffix("\n"),
        "tokens": 6,
        "is_whole": False,
        "seed": 42,
    }
    assert "package:tiny, in float32 on cpu" in told.err and "cut off after 6 tokens" in told.err
    assert other.out != told.out


@pytest.mark.parametrize(
    ("prompt", "arguments", "code", "words"),
    [
        (b" \n", (TINY,), 2, "no prompt on standard input"),
        (b"\xff", (TINY,), 2, "the prompt is not UTF-8"),
        (b"Why?", ("./nowhere",), 2, "error[bad-run-directory]: SOURCE: './nowhere' does not exist"),
        (b"Why?", ("org/model",), 3, "cannot reach the hub for 'org/model'"),
        (b"Why?", (TINY, "--adapter", "./nowhere"), 2, "error[bad-run-directory]: SOURCE: 'nowhere' does not exist"),
        (b"Why?", (TINY, "--temperature", "nan"), 2, "nan is not a finite number"),
    ],
)
def test_what_cannot_be_asked_is_one_line(
    prompt: bytes, arguments: tuple[str, ...], code: int, words: str, tuner: Tuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = asked(tuner, monkeypatch, prompt, *arguments)

    assert (result.code, result.out) == (code, "")
    assert len(result.messages) == 1 and words in result.messages[0]


def test_json_is_for_scripts(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)

    result = tuner("chat", TINY, "--json")

    assert result.code == 2 and "--json answers one prompt" in result.err


def test_a_standard_input_that_is_closed_is_an_empty_prompt(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)

    result = tuner("chat", TINY)

    assert result.code == 2 and "no prompt on standard input" in result.err


def test_an_answer_to_a_prompt_does_not_steer_the_terminal(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    said = Answer("\x1b[2Jgone", 4, is_whole=True)
    monkeypatch.setattr("tuner.results.chat.Chat.ask", lambda *_: said)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert asked(tuner, monkeypatch, b"Why?", TINY, *SHORT).out == "[2Jgone\n"
