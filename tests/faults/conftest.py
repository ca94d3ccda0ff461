"""Start a run whose ranks go wrong as TUNER_FAULT says; see `worker`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import Finished, finish, start

ROOT = Path(__file__).parents[2]


class Faulty:
    """`tuner train` on two CPU ranks with a fault in one of them."""

    def __call__(self, fault: str, recipe: Path, work_dir: Path, *arguments: object) -> Finished:
        return finish(self.start(fault, recipe, work_dir, *arguments), work_dir)

    def start(self, fault: str, recipe: Path, work_dir: Path, *arguments: object) -> subprocess.Popen[str]:
        """Start it in a session of its own, and leave it to the test."""
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        command = [sys.executable, "-m", "tests.faults.tuner"]
        at = ("--work-dir", work_dir)
        return start(recipe, *at, *arguments, command=command, TUNER_FAULT=fault, PYTHONPATH=path)


@pytest.fixture
def faulty() -> Faulty:
    return Faulty()
