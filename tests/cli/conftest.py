from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.cli.command import Tuner, runner

LAUNCHER = ("NPROC_PER_NODE", "NNODES", "NODE_RANK", "ADDR", "MASTER_ADDR", "PORT", "MASTER_PORT", "RANK", "WORLD_SIZE")


@pytest.fixture
def tuner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tuner:
    """Return the command line, in an empty folder, without a launcher's variables and without GPUs."""
    monkeypatch.chdir(tmp_path)
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return runner(monkeypatch, capsys)


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test when a process is started or replaced."""

    def started(*args: Any, **options: Any) -> NoReturn:
        raise AssertionError(f"started {args}")

    monkeypatch.setattr("tuner.launch.supervise.run", started)
    monkeypatch.setattr(os, "execve", started)
