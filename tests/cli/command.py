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
ACT = ("train", "submit", "check", "data", "smoke", "tune")
"""Commands that read the rows of a recipe, or run something of it."""
_BESIDE = {"dry_run": "--dry-run", "gpus_per_node": "--gpus-per-node=0", "gpus": "--gpus=1", "gpu": "--gpu=h100"}
"""The options with which a command starts nothing, and does the same on every machine."""


def parameters(command: str) -> dict[str, click.Parameter]:
    """Return the arguments and options of a command by their names in Python."""
    loaded = tuner.get_command(click.Context(tuner), command)
    assert loaded
    return {str(parameter.name): parameter for parameter in loaded.params}


def beside(command: str) -> list[str]:
    """Return the words that a command needs beside its first argument to start nothing and write nothing else."""
    options = [option for name, option in _BESIDE.items() if name in parameters(command)]
    return [*options, *(["copied.py"] if command == "copy" else [])]


def of_recipes() -> dict[str, list[str]]:
    """Return each command that takes a recipe, with words that name it @."""
    return {name: [name, "@", *beside(name)] for name in COMMANDS if "sets" in parameters(name)}


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
