"""Start a run whose ranks go wrong as TUNER_FAULT says; see `worker`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.e2e.conftest import once
from tests.e2e.runs import Finished, Once, Started, finish, fork, quick, start, train

__all__ = ["once"]

ROOT = Path(__file__).parents[2]
FAULTY = [sys.executable, "-m", "tests.faults.tuner"]


class Faulty:
    """`tuner train` on two CPU ranks, or as many as are asked for, with a fault in one of them."""

    def __call__(
        self,
        fault: str,
        recipe: object,
        work_dir: Path,
        *arguments: object,
        ranks: int = 2,
        command: Sequence[str] | None = None,
    ) -> Finished:
        """Run it to its end; by a command of its own it starts as a user's does."""
        if command:
            return finish(self.start(fault, recipe, work_dir, *arguments, ranks=ranks, command=command), work_dir)
        return train(recipe, work_dir, *arguments, ranks=ranks, worker="tests.faults.worker", TUNER_FAULT=fault)

    def start(
        self,
        fault: str,
        recipe: object,
        work_dir: Path,
        *arguments: object,
        ranks: int = 2,
        command: Sequence[str] | None = None,
    ) -> Started:
        """Start it in a session of its own, and leave it to the test; a `command` of its own leads to `FAULTY`."""
        words = (recipe, "--work-dir", work_dir, *arguments)
        if not command:
            return fork(*words, ranks=ranks, worker="tests.faults.worker", TUNER_FAULT=fault)
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        return start(*words, ranks=ranks, command=command, TUNER_FAULT=fault, PYTHONPATH=path)


@pytest.fixture
def faulty() -> Faulty:
    return Faulty()


@pytest.fixture(scope="session")
def undisturbed(once: Once) -> Finished:
    """Return a run of six steps at ZeRO 2 in which nothing goes wrong."""
    return once(quick, "full", "--deepspeed", "zero2", "--set", "max_steps=6")


@pytest.fixture
def small_disk(mounted: Callable[[str], Path]) -> Path:
    """Mount a file system with room for three checkpoints of the tiny model in fp32 and little more."""
    return mounted("size=64m")
