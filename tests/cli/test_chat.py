"""`tuner chat` in a script: the answer alone on stdout, and one line where there can be none."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import PIL.Image
import pytest

from tests.cli.command import Result, Tuner
from tests.machine.gpus import CPU
from tuner.cli.chat import _obeyed
from tuner.results.chat import Chat
from tuner.results.loaded_model import load, spec_of
from tuner.worker.generation import Answer, Settings

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
        "version": 1,
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
        (b"/image dog.png\nWhy?", (TINY,), 2, "Name the image with --image PATH."),
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


def test_commands_of_images_show_the_image_or_say_what_to_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = Chat(load(spec_of("package:tiny_vision", None), CPU), Settings(max_new_tokens=1))
    PIL.Image.new("RGB", (48, 32)).save(tmp_path / "a b.png")
    (tmp_path / "empty.png").touch()
    replies = {
        f"/image '{tmp_path}/a b.png'": "An image of 48 x 32 pixels",
        f"/image {tmp_path}/empty.png": f"the image {tmp_path}/empty.png is an empty file. Use another image.",
        f"/image {tmp_path}": f"there is no image file {tmp_path}. Use another image.",
        "/image": "Write the path of the image: /image PATH.",
        "/images a.png": "Did you mean /image?",
    }

    for text, reply in replies.items():
        assert _obeyed(chat, text)
        assert reply in "".join(capsys.readouterr())
