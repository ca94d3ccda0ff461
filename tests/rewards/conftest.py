"""Rewards in processes that are forked: what a Python started for each imports takes most of such a test."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tuner.rewards import isolated_process


class _Forked(subprocess.Popen[bytes]):
    """A process of a reward, forked from the test's."""

    def __init__(self, argv: Sequence[str], **_: Any) -> None:
        self.args, self.returncode = argv, cast(int, None)
        self.stdin, self.stdout, self.stderr = None, None, None
        self._child_created, self._waitpid_lock = True, threading.Lock()  # what Popen.wait uses
        self.pid = os.fork()
        if self.pid:
            return
        try:
            os.setsid()
            sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))
            sys.argv = ["-c", *argv[-2:]]
            importlib.import_module(argv[-3]).main()
        finally:
            os._exit(0)


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the rewards that a test calls itself; a rank of its own starts them as a user's does."""
    monkeypatch.setattr(isolated_process, "subprocess", SimpleNamespace(Popen=_Forked, DEVNULL=subprocess.DEVNULL))
