"""`tuner explain`: every error code with its cause, an example and the fix; the texts are in explanations.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from textwrap import fill

import click

from tuner.cli.help import Command
from tuner.cli.say import say, say_json, wrapped
from tuner.errors import TunerError, UsageError, did_you_mean
from tuner.files import read_text
from tuner.runs import causes

_TEXTS = Path(__file__).with_name("explanations.toml")


@dataclass(frozen=True)
class Explanation:
    """What one code stands for.

    Args:
        example: A message with this code, or the line of a log that leads to it.
        command: What prints the example; None: it takes more than one command.
    """

    code: str
    exit_code: int
    means: str
    cause: str
    example: str
    fix: str
    command: str | None = None

    @property
    def shown(self) -> str:
        """The example as a terminal shows it."""
        return f"$ {self.command}\n{self.example}" if self.command else self.example


def exit_codes() -> dict[str, int]:
    """Return every code that a message or a diagnosis can have, with the exit code that goes with it."""
    return {
        **{cause.name: cause.exit_code for cause in causes.every()},
        **{error.code: error.exit_code for error in _tree()},
    }


def _tree(root: type[TunerError] = TunerError) -> Iterator[type[TunerError]]:
    yield root
    for below in root.__subclasses__():
        yield from _tree(below)


@cache
def explanations() -> dict[str, Explanation]:
    """Return the explanation of each code, in the order in which they are listed."""
    codes = exit_codes()
    texts = tomllib.loads(read_text(_TEXTS))
    return {code: Explanation(code, codes[code], **text) for code, text in texts.items()}


@click.command(
    cls=Command,
    examples=("tuner explain bad-recipe",),
    json_keys={
        "tuner explain CODE --json": "a list; each: `code`, `exit_code`, `means`, `cause`, `example`, `fix`, `command`",
    },
    uses={
        "what an error code means": "`tuner explain CODE`",
    },
)
@click.argument("codes", metavar="[CODE]...", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print the explanations as JSON.")
def command(codes: tuple[str, ...], as_json: bool) -> None:
    """Explain an error code: its cause, an example, and what to do. Without CODE, list all codes.

    A message starts with its code: `error[bad-recipe]: no key 'lrr'...` is explained by `tuner explain bad-recipe`.
    """
    by_code = explanations()
    for code in codes:
        if code not in by_code:
            fix = did_you_mean(code, by_code, see="tuner explain")
            raise UsageError(f"no error code {code!r}", where="CODE", fix=fix)
    chosen = [by_code[code] for code in codes or by_code]
    if as_json:
        say_json([asdict(explanation) for explanation in chosen])
    elif codes:
        say("\n\n".join(map(_page, chosen)))
    else:
        width = max(map(len, by_code))
        for explanation in chosen:
            say(wrapped(f"{explanation.code:<{width}}  {explanation.means}", " " * (width + 2)))


def _page(explanation: Explanation) -> str:
    parts = (("Cause", explanation.cause), ("Example", explanation.shown), ("Fix", explanation.fix))
    head = f"{explanation.code}: {explanation.means} Exit code {explanation.exit_code}."
    return "\n".join([wrapped(head), *(f"\n{title}:\n{_indented(text)}" for title, text in parts)])


def _indented(text: str) -> str:
    # Also in a pipe: a paragraph of 400 characters is read by people there too.
    return "\n".join(
        fill(line, 100, initial_indent="  ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for line in text.splitlines()
    )
