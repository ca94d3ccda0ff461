"""Jobs of `tuner submit` that go on by themselves after a killed rank and a lost node, on a real Slurm."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.runs import processes_of, wait_until
from tests.slurm.conftest import Cluster
from tests.slurm.test_submit import STEPS, Submitted
from tests.slurm.test_submit import no_job_is_left as no_job_is_left
from tests.slurm.test_submit import recipe as recipe
from tuner.runs.directory import RunDirectory

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("no_job_is_left")]


def lose(cluster: Cluster, node: str) -> None:
    """Let a node die, and Slurm notice it at once."""
    os.kill(int((cluster.folder / "run" / f"{node}.pid").read_text()), signal.SIGKILL)
    cluster.ask("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")


@pytest.fixture
def all_nodes(cluster: Cluster) -> Iterator[None]:
    """Have the lost node back for the next test."""
    yield
    assert cluster.start().returncode == 0


def test_after_a_killed_rank_and_a_lost_node_a_job_goes_on_on_the_spare_one(
    cluster: Cluster, tmp_path: Path, recipe: Path, all_nodes: None
) -> None:
    job = Submitted(cluster, recipe, tmp_path / "run", "--spare-nodes", 1, "--max-restarts", 2)
    job.wait_for_step(6)
    next(process for process in processes_of(job.run) if "tuner.worker" in process.cmdline()).kill()
    wait_until(lambda: "attempt 2 on n2" in job.log)
    job.wait_for_step(11)
    lose(cluster, "n2")
    job.wait_until_done()

    assert job.show("ExitCode") == "0:0", job.log
    assert job.show("Restarts") == "0", "it was one job"
    assert "attempt 3 on n1 (n2 is down" in job.log
    assert sorted(job.losses()) == [*range(1, STEPS + 1)]
    restarts = RunDirectory(job.run).read_json(job.run / "requeues.json")["restarts"]
    assert [(ended["cause"], ended["node"]) for ended in restarts] == [("killed", "n1"), ("lost-peer", "n2")]


def test_after_a_hang_a_job_goes_on_on_the_same_nodes(cluster: Cluster, tmp_path: Path, recipe: Path) -> None:
    job = Submitted(
        cluster, recipe, tmp_path / "run", "--nodes", 2, "--max-restarts", 2, "--set", "hang_timeout=15",
        "--deepspeed", "zero2",
    )  # fmt: skip
    job.wait_for_step(6)
    wait_until((job.run / "checkpoints" / "checkpoint-5").is_dir)
    next(process for process in processes_of(job.run) if "tuner.worker" in process.cmdline()).suspend()
    job.wait_until_done()

    assert job.show("ExitCode") == "0:0", job.log
    assert "--max-restarts after hang: attempt 2 on n1, n2, from checkpoint-" in job.log
    assert RunDirectory(job.run).read_run().follows_failure and "180 s at most" in job.log, "its ranks were compared"
    assert sorted(job.losses()) == [*range(1, STEPS + 1)]


def test_before_its_time_limit_a_job_starts_no_srun_that_would_not_hear_of_it(
    cluster: Cluster, tmp_path: Path, recipe: Path
) -> None:
    limits = ("--time", 30, "--stop-before", 120)
    job = Submitted(cluster, recipe, tmp_path / "run", "--max-restarts", 2, *limits, "--set", "max_steps=100000")
    job.wait_for_step(6)
    rank = next(process for process in processes_of(job.run) if "tuner.worker" in process.cmdline())
    rank.kill()  # first: else it might hear Slurm's signal
    cluster.ask("scontrol", "update", f"JobId={job.number}", "TimeLimit=3")
    wait_until(lambda: (job.show("Restarts"), job.show("JobState")) == ("1", "PENDING"))

    assert f"Job {job.number} is requeued: its time limit is" in job.log


def test_a_job_with_too_few_nodes_goes_back_into_the_queue_without_the_lost_one(
    cluster: Cluster, tmp_path: Path, recipe: Path, all_nodes: None
) -> None:
    endless = ("--set", "max_steps=100000")
    job = Submitted(cluster, recipe, tmp_path / "run", "--nodes", 2, "--max-restarts", 2, *endless)
    job.wait_for_step(2)
    lose(cluster, "n2")
    wait_until(lambda: (job.show("ExcNodeList"), job.show("JobState")) == ("n2", "PENDING"))

    assert f"Job {job.number} is requeued without n2: n2 is down" in job.log
    assert RunDirectory(job.run).read_status().state == "failed"


def test_a_killed_rank_is_told_in_the_jobs_status_though_no_rank_could(
    cluster: Cluster, tmp_path: Path, recipe: Path
) -> None:
    job = Submitted(cluster, recipe, tmp_path / "run")
    job.wait_for_step(1)
    next(process for process in processes_of(job.run) if "tuner.worker" in process.cmdline()).kill()
    job.wait_until_done()

    status = RunDirectory(job.run).read_status()
    assert (status.state, status.exit_code) == ("failed", 137)
    assert status.diagnosis and (status.diagnosis.cause, status.diagnosis.rank) == ("killed", 0)
    assert job.show("ExitCode") == "137:0"
