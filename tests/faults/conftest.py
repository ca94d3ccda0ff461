"""Start a run whose ranks go wrong as TUNER_FAULT says; see `worker`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.e2e.runs import Finished, environment, finish

ROOT = Path(__file__).parents[2]


class Faulty:
    """`tuner train` on two CPU ranks with a fault in one of them."""

    def __call__(self, fault: str, recipe: Path, work_dir: Path, *arguments: object) -> Finished:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        env = environment(NPROC_PER_NODE="2", TUNER_FAULT=fault, PYTHONPATH=path)
        command = [sys.executable, "-m", "tests.faults.tuner", "train", recipe, "--work-dir", work_dir, *arguments]
        process = subprocess.Popen(
            [str(word) for word in command],
            env=env,
            cwd=tempfile.gettempdir(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        return finish(process, work_dir)


@pytest.fixture
def faulty() -> Faulty:
    return Faulty()
