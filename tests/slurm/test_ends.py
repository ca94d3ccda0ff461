"""Ends that Slurm itself brings about: arrays side by side, a cancelled job in a save, a step that is out of time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import processes_of, quick, wait_until
from tests.faults.conftest import FAULTY, ROOT
from tests.slurm.conftest import Cluster
from tests.slurm.test_submit import Submitted
from tests.slurm.test_submit import no_job_is_left as no_job_is_left
from tuner.runs import checkpoints

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("no_job_is_left")]


def test_two_tasks_of_an_array_train_side_by_side_each_in_its_own_directory(cluster: Cluster, tmp_path: Path) -> None:
    job = Submitted(
        cluster, quick(tmp_path, "lora"), tmp_path / "run", "--array", "1-2", "--set", "seed={index}",
        "--set", "max_steps=2",
    )  # fmt: skip
    wait_until(lambda: not cluster.ask("squeue", "--noheader"), timeout_s=300)

    for index in (1, 2):
        run, log = job.run / str(index), (job.run / f"slurm-{job.number}_{index}.out").read_text()
        assert "Trained 2 steps" in log, log
        assert f"randomness = dict(seed={index})" in (run / "recipe.py").read_text()
        assert checkpoints.inspect(run / "checkpoints" / "checkpoint-2") is None
        assert (run / "final" / "adapter_model.safetensors").is_file()
        assert processes_of(run) == []


def test_a_job_that_is_cancelled_in_a_save_leaves_a_whole_checkpoint_and_no_process(
    cluster: Cluster, tmp_path: Path
) -> None:
    run, log = tmp_path / "run", tmp_path / "job.out"
    train = [*FAULTY, "train", str(quick(tmp_path, "lora")), "--work-dir", str(run), "--launcher", "slurm"]
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\nexec srun -n1 --kill-on-bad-exit=1 {' '.join(train)}\n")
    env = {**cluster.env, "TUNER_FAULT": "save-hold@0:4", "PYTHONPATH": str(ROOT)}
    command = ["sbatch", "--parsable", f"--output={log}", str(script)]
    number = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip()
    wait_until((run / "held").exists)

    cluster.ask("scancel", number)
    wait_until(lambda: "CANCELLED" in cluster.ask("scontrol", "show", "job", number))
    (run / "held").unlink()
    wait_until(lambda: not processes_of(run))

    assert checkpoints.inspect(run / "checkpoints" / "checkpoint-2") is None
    newest, passed = checkpoints.newest_valid(run / "checkpoints")
    assert newest and passed == [], "no half one is there"
    assert "Traceback" not in log.read_text(), log.read_text()


def test_a_step_that_is_out_of_time_saves_and_says_so(cluster: Cluster, tmp_path: Path) -> None:
    run = tmp_path / "run"
    endless = ("--set", "max_steps=100000", "--set", "checkpoint.interval=100000")
    train = ["train", quick(tmp_path, "lora"), "--work-dir", run, "--launcher", "slurm", *endless]
    command = ["srun", "--time=2", "-n1", "--kill-on-bad-exit=1", sys.executable, "-m", "tuner", *map(str, train)]

    done = subprocess.run(command, env=cluster.env, cwd=tmp_path, capture_output=True, text=True, timeout=400)

    newest, passed = checkpoints.newest_valid(run / "checkpoints")
    assert newest and passed == [], done.stdout[-1500:] + done.stderr[-1500:]
    assert f"at step {newest.step} on request" in done.stdout + done.stderr
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    wait_until(lambda: not processes_of(run))
