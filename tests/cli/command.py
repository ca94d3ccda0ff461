"""The command line, in this process: what it prints, how it exits, and what it leaves behind."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tuner.cli import main


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
