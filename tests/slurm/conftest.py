"""One real two-node Slurm on this machine for all tests of this folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.runs import environment

SCRIPTS = Path(os.environ.get("TUNER_SLURM_SCRIPTS", Path(__file__).parents[3] / "shared" / "slurm"))


@dataclass(frozen=True)
class Cluster:
    """Where it lies, and the environment that reaches it."""

    folder: Path
    env: dict[str, str]

    def start(self) -> subprocess.CompletedProcess[str]:
        """Start what does not run: all of it, or a node that was killed."""
        port = str(21_000 + os.getpid() % 1_000 * 3)
        command = ["bash", SCRIPTS / "start-slurm.sh", self.folder]
        return subprocess.run(command, env={**os.environ, "PORT": port}, capture_output=True, text=True)

    def ask(self, *command: str) -> str:
        """Run one of Slurm's commands and return what it prints."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    there = (SCRIPTS / "start-slurm.sh").is_file()
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.slurm)
            item.add_marker(pytest.mark.skipif(not there, reason="no start-slurm.sh (TUNER_SLURM_SCRIPTS)"))
            item.add_marker(pytest.mark.skipif(os.geteuid() != 0, reason="a Slurm of one's own needs root"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="slurm"))  # short: it holds unix sockets
    made = Cluster(folder, environment(SLURM_CONF=f"{folder}/etc/slurm.conf"))
    started = made.start()
    if started.returncode:
        pytest.skip(f"Slurm does not start: {started.stderr.strip().splitlines()[-1:]}")
    try:
        _number_jobs_apart(made)
        yield made
    finally:
        subprocess.run(["bash", SCRIPTS / "stop-slurm.sh", folder], check=True, capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)


def _number_jobs_apart(made: Cluster) -> None:
    """Let no two workers of pytest have jobs of one number: ranks meet on a port that follows from it."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    with Path(made.env["SLURM_CONF"]).open("a", encoding="utf-8") as conf:
        conf.write(f"FirstJobId={1 + 1_000 * worker}\n")
    made.ask("scontrol", "reconfigure")


@pytest.fixture
def slurm(cluster: Cluster) -> dict[str, str]:
    """Return the environment that reaches the cluster."""
    return cluster.env
