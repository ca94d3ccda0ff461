"""`tuner chat`: questions to a model, in the terminal or from a script."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from tuner.cli.help import Command
from tuner.cli.models import max_new_tokens_option, model_options, stdout_is_the_answers
from tuner.cli.options import Finite, OptionValue
from tuner.cli.say import say, say_json
from tuner.errors import TunerError, UsageError, nearest
from tuner.machine.hardware import detect

if TYPE_CHECKING:
    from tuner.results.chat import Chat

_COMMANDS = {
    "/reset": "clear the conversation",
    "/system TEXT": "set the system prompt",
    "/image PATH": "show an image with the next question",
    "/help": "show this list",
    "/exit": "quit, like exit, quit and Ctrl-D",
}
_HELP = "; ".join(f"{name}: {meaning}" for name, meaning in _COMMANDS.items())
_ENDS = ("/exit", "/quit", "/bye", "exit", "quit", "exit()", "quit()")
_UNSHOWN = dict.fromkeys({*range(32), *range(127, 160)} - {9, 10})
"""Control characters: an answer must not steer the terminal."""


@click.command(
    cls=Command,
    examples=(
        "tuner chat work_dirs/NAME/TIME",
        'tuner chat Qwen/Qwen3-0.6B --system "Answer briefly."',
    ),
    json_keys={
        "tuner chat RUN --json": "`prompt`, `answer`, `tokens`, `is_whole`, `seed`",
    },
)
@model_options
@click.option("--system", metavar="TEXT", help="System prompt.")
@click.option(
    "--image", "images", metavar="PATH", multiple=True, help="An image beside the first question; repeatable."
)
@max_new_tokens_option
@click.option(
    "--temperature",
    type=Finite(0),
    help="Sampling temperature; 0 always takes the most likely token. [default: the model's]",
)
@click.option(
    "--top-p",
    type=Finite(0, 1, min_open=True),
    help="Nucleus sampling: the smallest set of tokens with this probability. [default: the model's]",
)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=42, help="Random seed of sampling.")
@click.option(
    "--json", "as_json", is_flag=True, help="Read one prompt from standard input and print the answer as JSON."
)
def command(
    source: str,
    images: tuple[str, ...],
    max_new_tokens: int,
    temperature: float | None,
    top_p: float | None,
    seed: int,
    as_json: bool,
    **options: OptionValue,
) -> None:
    """Chat with a trained model, or any other one.

    SOURCE is a run directory (its result, or its newest checkpoint), a checkpoint, a model's folder, or an id on the
    hub. The chat template and the stop tokens are those of training. In a terminal it is a conversation; on a pipe,
    standard input is one prompt and the answer goes to standard output.
    """
    talks = sys.stdin is not None and sys.stdin.isatty()  # a shell may have closed it: <&-
    if talks and as_json:
        raise UsageError("--json answers one prompt, from stdin", where="--json", fix="Add: < PROMPT.txt.")
    prompt = None if talks else _prompt()
    if prompt and prompt.startswith("/image "):
        problem = "/image is a command of a conversation, and standard input is one prompt"
        raise UsageError(problem, fix="Name the image with --image PATH.")
    with stdout_is_the_answers():
        from tuner.results.chat import begin  # torch
        from tuner.worker.generation import Settings

        settings = Settings(max_new_tokens, temperature, top_p)
        chat = begin(source, detect(os.environ), settings, seed=seed, **options)
    for path in images:
        chat.show(path)
    say(f"{chat.description}.", err=True)
    if prompt is not None:
        _answer_once(chat, prompt, seed, as_json=as_json)
    else:
        click.echo(_HELP, err=True)
        _talk(chat)


def _prompt() -> str:
    try:
        text = sys.stdin.buffer.read().decode("utf-8") if sys.stdin else ""
    except UnicodeDecodeError as error:
        raise UsageError(
            f"the prompt is not UTF-8: byte {error.start}", where="standard input", fix="Convert it to UTF-8."
        ) from None
    if not text.strip():
        raise UsageError("no prompt on standard input", fix="Example: echo 'Why?' | tuner chat RUN")
    return text.removesuffix("\n")


def _answer_once(chat: Chat, prompt: str, seed: int, *, as_json: bool) -> None:
    answer = chat.ask(prompt, lambda _: None)
    if not answer.is_whole:
        click.echo(f"The answer was cut off after {answer.num_tokens} tokens; raise --max-new-tokens.", err=True)
    if as_json:
        value: dict[str, object] = {"prompt": prompt, "answer": answer.text, "tokens": answer.num_tokens}
        say_json(value | {"is_whole": answer.is_whole, "seed": seed})
    else:
        click.echo(answer.text.translate(_UNSHOWN) if sys.stdout.isatty() else answer.text)


def _talk(chat: Chat) -> None:
    with suppress(ImportError):
        import readline  # noqa: F401  edits the line and keeps earlier ones; not on every platform
    while True:
        click.echo()
        try:
            text = input("> ").strip()
        except EOFError:
            click.echo()
            return
        except UnicodeDecodeError:
            click.echo("The input is not UTF-8 and was ignored.", err=True)
            continue
        except KeyboardInterrupt:
            click.echo("\nCtrl-D or /exit ends.")
            continue
        if text.lower() in _ENDS:
            return
        if text and not _obeyed(chat, text):
            _reply(chat, text)


def _obeyed(chat: Chat, text: str) -> bool:
    """Do what a command says; anything else that begins with a slash is said to the model."""
    name, _, argument = text.partition(" ")
    if text == "/reset":
        chat.forget()
        click.echo("The conversation is cleared.")
    elif text in ("/help", "/?"):
        click.echo(_HELP)
    elif name == "/system":
        chat.system = argument.strip() or None
        click.echo("The system prompt is set." if chat.system else "The system prompt is removed.")
    elif name == "/image":
        _show(chat, argument.strip())
    elif text.startswith("/") and (meant := nearest(name, ("/reset", "/system", "/image", "/help", "/exit"))):
        click.echo(f"Did you mean {meant}?")
    else:
        return False
    return True


def _show(chat: Chat, path: str) -> None:
    if not path:
        click.echo("Write the path of the image: /image PATH.")
        return
    try:
        width, height = chat.show(path.strip("'\""))  # a terminal quotes a file that is dropped on it
    except TunerError as error:
        click.echo("\n".join(error.for_people()), err=True)
    else:
        click.echo(f"An image of {width} x {height} pixels is shown with the next question.")


def _reply(chat: Chat, text: str) -> None:
    try:
        answer = chat.ask(text, lambda piece: click.echo(piece.translate(_UNSHOWN), nl=False), interruptible=True)
    except TunerError as error:
        click.echo("\n".join(error.for_people()), err=True)
        return
    except KeyboardInterrupt:  # before the first token, or after the last one
        click.echo()
        return
    click.echo()
    if answer.num_dropped:
        click.echo(f"(The context is full: the oldest {answer.num_dropped} turns are dropped.)", err=True)
