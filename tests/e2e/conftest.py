"""Runs that several tests compare theirs with."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from tests.e2e.runs import Finished, Once, ok, train


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Return what trains a recipe with the same arguments once for all test processes: no test changes such a run."""
    own = tmp_path_factory.getbasetemp()
    root = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def trained(write: Callable[[Path, str], Path], method: str, *words: str, ranks: int = 2) -> Finished:
        asked = repr((write.__module__, write.__name__, method, words, ranks))
        folder = root / "once" / hashlib.sha256(asked.encode()).hexdigest()[:12]
        folder.mkdir(parents=True, exist_ok=True)
        run = Finished(0, "", folder / "run")
        with FileLock(folder / "lock"):
            if not (folder / "done").exists():
                ok(train(write(folder, method), run.path, *words, ranks=ranks))
                (folder / "done").touch()
        return run

    return trained
