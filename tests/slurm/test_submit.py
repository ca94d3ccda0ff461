"""`tuner submit` on a real Slurm: what sbatch makes of the script, and jobs that are disturbed and end all the same."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.runs import processes_of, quick, wait_until, written_lines
from tests.slurm.conftest import Cluster
from tuner.runs import checkpoints

STEPS = 24
SRUN = f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([os.getcwd(), *sys.argv[1:]]))\n"


class Submitted:
    """A job, its run directory, and the cluster that has it."""

    def __init__(self, cluster: Cluster, recipe: Path, run: Path, *arguments: object, **env: str) -> None:
        self.cluster, self.run = cluster, run
        command = [sys.executable, "-m", "tuner", "submit", recipe, "--gpus-per-node", 0, "--work-dir", run, *arguments]
        done = subprocess.run(
            [str(word) for word in command],
            cwd=recipe.parent, env={**cluster.env, **env}, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        found = re.search(r": job (\d+), ", done.stdout)
        assert found, done.stderr
        self.number = found[1]

    def show(self, key: str) -> str:
        found = re.search(rf"\b{key}=(\S+)", self.cluster.ask("scontrol", "show", "job", self.number))
        return found[1] if found else ""

    def wait_for_step(self, step: int) -> None:
        """Wait until a step of any attempt is logged."""
        wait_until(lambda: bool(self.losses()) and max(self.losses()) >= step)

    def go_on(self) -> None:
        """Let a requeued job start now: Slurm itself would wait two minutes, from when it has cleared up, and may."""
        wait_until(lambda: self.show("JobState") == "PENDING")
        # An srun that still ends would end the step of the same number in the next attempt.
        wait_until(lambda: not processes_of(self.run))
        # slurmd refuses what starts in the second of the requeue: it counts in seconds when a credential was revoked.
        time.sleep(2)
        wait_until(self._starts, timeout_s=300)

    def _starts(self) -> bool:
        # Until Slurm has cleared up it forgets the time again; asked too often, its scheduler begins anew each time.
        with contextlib.suppress(AssertionError):
            self.cluster.ask("scontrol", "update", f"JobId={self.number}", "StartTime=now")
            wait_until(lambda: self.show("JobState") == "RUNNING", timeout_s=5)
            return True
        return False

    def wait_until_done(self) -> None:
        wait_until(lambda: self.show("JobState") in ("COMPLETED", "FAILED", "CANCELLED"))

    def losses(self) -> dict[int, float]:
        file = self.run / "metrics.jsonl"
        lines = file.read_text().splitlines() if written_lines(file) else []
        found = [json.loads(line) for line in lines]
        return {line["step"]: line["loss"] for line in found if "loss" in line}

    @property
    def log(self) -> str:
        return (self.run / f"slurm-{self.number}.out").read_text()


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = quick(tmp_path, "lora")
    path.write_text(path.read_text().replace("max_steps=4", f"max_steps={STEPS}").replace("interval=2", "interval=5"))
    return path


@pytest.fixture
def no_job_is_left(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.ask("scancel", "--user=root", "--full")
    wait_until(lambda: not cluster.ask("squeue", "--noheader"))


def test_sbatch_reads_the_script_as_it_was_meant(cluster: Cluster, tmp_path: Path, recipe: Path) -> None:
    fake = tmp_path / "bin" / "srun"
    fake.parent.mkdir()
    fake.write_text(SRUN)
    fake.chmod(0o755)
    run = tmp_path / 'it\'s a "50%j" #1 $(touch canary) ünï'
    value = "seed={index}"

    job = Submitted(
        cluster, recipe, run, "--array", "3-4", "--set", value, "--sbatch", "comment=x", "--time", "1-0",
        "--max-requeues", 7, PATH=f"{fake.parent}:{os.environ['PATH']}",
    )  # fmt: skip

    logs = [run / f"slurm-{job.number}_{index}.out" for index in (3, 4)]
    wait_until(lambda: all(log.is_file() and log.read_text().endswith("]\n") for log in logs))
    for index, log in zip((3, 4), logs, strict=True):
        standing, *words = json.loads(log.read_text())
        assert standing == str(tmp_path)
        assert f"--set=seed={index}" in words
        assert words[-2:] == ["--work-dir", f"{run}/{index}"]
    shown = cluster.ask("scontrol", "show", "job", f"{job.number}_3")
    assert all(text in shown for text in ("Comment=x", "TimeLimit=1-00:00:00", "Requeue=1", "JobName=quick_lora"))
    assert not list(tmp_path.rglob("canary"))


@pytest.mark.usefixtures("no_job_is_left")
@pytest.mark.long
def test_a_disturbed_job_ends_with_the_losses_of_an_undisturbed_one(
    cluster: Cluster, tmp_path: Path, recipe: Path
) -> None:
    how = ("--nodes", 2, "--deepspeed", "zero2", "--partition", "main")
    undisturbed = Submitted(cluster, recipe, tmp_path / "undisturbed", *how)
    undisturbed.wait_until_done()
    assert undisturbed.show("ExitCode") == "0:0", undisturbed.log
    assert undisturbed.log.count(f"Trained {STEPS} steps") == 1

    job = Submitted(cluster, recipe, tmp_path / "run", *how)
    job.wait_for_step(2)
    cluster.ask("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")
    job.go_on()
    job.wait_for_step(9)
    cluster.ask("scontrol", "requeue", job.number)
    job.go_on()
    job.wait_for_step(15)
    os.kill(int((cluster.folder / "run" / "n2.pid").read_text()), signal.SIGKILL)
    cluster.ask("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    wait_until(lambda: job.show("JobState") == "PENDING")
    assert cluster.start().returncode == 0
    job.go_on()
    job.wait_until_done()

    assert job.show("ExitCode") == "0:0", job.log
    assert job.show("Restarts") == "3"
    assert job.log.count("is requeued") == 1, "Slurm requeued the other times"
    assert job.losses() == undisturbed.losses()
    assert len(job.losses()) == STEPS


@pytest.mark.long
@pytest.mark.usefixtures("no_job_is_left")
def test_before_its_time_limit_a_job_saves_and_goes_back_into_the_queue(
    cluster: Cluster, tmp_path: Path, recipe: Path
) -> None:
    long = ("--set", "max_steps=10000", "--set", "checkpoint.interval=10000")
    job = Submitted(cluster, recipe, tmp_path / "run", *long, "--time", 4, "--stop-before", 120)
    job.wait_for_step(1)

    # Slurm looks at the limits every half minute, and this one then has come.
    cluster.ask("scontrol", "update", f"JobId={job.number}", "TimeLimit=2")

    wait_until(lambda: job.show("JobState") == "PENDING")
    assert job.show("Restarts") == "1"
    assert f"Job {job.number} is requeued after a time limit" in job.log
    newest, passed = checkpoints.newest_valid(job.run / "checkpoints")
    assert newest and not passed
    assert f"at step {newest.step} on request" in job.log
