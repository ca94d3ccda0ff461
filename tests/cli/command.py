"""The command line, in this process: what it prints, how it exits, and what it leaves behind."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import click
import pytest

from tuner.cli import COMMANDS, main, tuner
from tuner.cli.models import Place


@dataclass(frozen=True)
class Result:
    """How one command ended."""

    code: int
    out: str
    err: str

    @property
    def messages(self) -> list[str]:
        """The lines that tell a mistake."""
        starts = ("error[", "Error:")
        return [line for line in (self.out + self.err).splitlines() if line.startswith(starts)]


Tuner = Callable[..., Result]
LOOK_ALONE = ("show", "plan", "copy")
"""Commands that neither read the rows of a recipe nor run anything of it."""
_BESIDE = {
    "train": ("--dry-run",),
    "submit": ("--dry-run", "--gpus-per-node=0"),
    "plan": ("--gpus=1", "--gpu=h100"),
    "copy": ("copied.py",),
}
"""What a command needs beside a recipe to start nothing, and to do the same on every machine and in every folder."""


def parameters(command: str) -> dict[str, click.Parameter]:
    """Return the arguments and options of a command by their names in Python."""
    loaded = tuner.get_command(click.Context(tuner), command)
    assert loaded
    return {str(parameter.name): parameter for parameter in loaded.params}


def of_recipes() -> dict[str, list[str]]:
    """Return each command that takes a recipe, with words that name it @."""
    return {name: [name, "@", *_BESIDE.get(name, ())] for name in COMMANDS if "sets" in parameters(name)}


def of_results() -> dict[str, list[str]]:
    """Return each command whose arguments name runs, or runs and models, with words that name them @."""
    found: dict[str, list[str]] = {}
    for name in COMMANDS:
        arguments = [value for value in parameters(name).values() if isinstance(value, click.Argument)]
        if any(isinstance(argument.type, Place) for argument in arguments):
            found[name] = [name, *("@" if isinstance(argument.type, Place) else "out" for argument in arguments)]
    return found


def runner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tuner:
    """Return a function that runs `tuner ARGUMENTS` as a shell would."""

    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["tuner", *map(str, arguments)])
        capsys.readouterr()
        code: object = 0
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        assert isinstance(code, int)
        return Result(code, *capsys.readouterr())

    return run
