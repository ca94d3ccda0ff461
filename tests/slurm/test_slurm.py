"""A real two-node Slurm on this machine: four ranks on two nodes train one recipe."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import quick
from tests.e2e.test_swapped import compile_ops, config
from tuner.machine import hardware


def srun(env: dict[str, str], folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [
        "srun",
        "-N2",
        "-n4",
        "--ntasks-per-node=2",
        "--kill-on-bad-exit=1",
        sys.executable,
        "-m",
        "tuner",
        "train",
    ]
    return subprocess.run(
        [*command, *map(str, arguments), "--launcher", "slurm"],
        env=env, cwd=folder, capture_output=True, text=True, timeout=400,
    )  # fmt: skip


def assert_code_2(done: subprocess.CompletedProcess[str]) -> None:
    """Fail unless the first task that ended had code 2: srun returns 143 where it ended one that was still starting."""
    assert re.search(r"Exited with exit code (\d+)", done.stderr)[1] == "2", done.stderr  # type: ignore[index]
    assert done.returncode == 2 or ": Terminated" in done.stderr, done.stderr


@pytest.mark.long  # what each rank does: tests/launch/test_execute.py
def test_four_ranks_on_two_nodes_train_one_recipe(slurm: dict[str, str], tmp_path: Path) -> None:
    recipe = quick(tmp_path, "lora")

    done = srun(slurm, tmp_path, recipe, "--deepspeed", "deepspeed_zero2")

    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (tmp_path / "work_dirs" / "quick_lora").iterdir()
    assert run.name.startswith("slurm-")
    assert (run / "final" / "adapter_model.safetensors").is_file()
    assert done.stderr.count("2 nodes, 4 processes (slurm)") == 1, "one rank speaks"
    assert done.stdout.count("Trained 4 steps") == 1


@pytest.mark.long  # two nodes that this machine starts: tests/lab/test_nodes.py
def test_the_doctor_compares_the_nodes_of_a_job(slurm: dict[str, str], tmp_path: Path) -> None:
    command = ["srun", "-N2", "-n4", sys.executable, "-m", "tuner", "doctor", "--nodes"]  # 3 tasks and 1

    done = subprocess.run(
        [*command, "--launcher", "slurm"], env=slurm, cwd=tmp_path, capture_output=True, text=True, timeout=400
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "ranks: 4, nodes: 2" in done.stdout


@pytest.mark.long  # a mistake is told once: below
def test_a_bad_row_is_told_once_whatever_the_other_ranks_make_of_it(slurm: dict[str, str], tmp_path: Path) -> None:
    data = tmp_path / "my.jsonl"
    data.write_text('{"messages": 7}\n')

    done = srun(slurm, tmp_path, quick(tmp_path, "lora"), "--data", data)

    assert_code_2(done)
    assert done.stderr.count(f"{data}:1") == 1, done.stderr
    assert "Traceback" not in done.stderr


def test_a_mistake_under_srun_is_told_once(slurm: dict[str, str], tmp_path: Path) -> None:
    done = srun(slurm, tmp_path, "tiny_lra_sample_e1")

    assert_code_2(done)
    assert done.stderr.count("Did you mean 'tiny_lora_sample_e1'?") == 1, done.stderr


def in_task(task: int, line: str, env: dict[str, str], folder: Path) -> dict[str, str]:
    """Return an environment in which one task runs a line of Python before tuner."""
    folder.mkdir()
    code = f"import os, time\nif os.environ.get('SLURM_PROCID') == '{task}': {line}\n"
    (folder / "sitecustomize.py").write_text(code)
    return {**env, "PYTHONPATH": str(folder)}


@pytest.mark.long
def test_a_mistake_is_told_once_where_the_first_task_starts_late(slurm: dict[str, str], tmp_path: Path) -> None:
    done = srun(in_task(0, "time.sleep(8)", slurm, tmp_path / "late"), tmp_path, "tiny_lra_sample_e1")

    assert_code_2(done)
    assert done.stderr.count("Did you mean 'tiny_lora_sample_e1'?") == 1, done.stderr


@pytest.mark.long
def test_a_mistake_of_a_later_task_alone_is_told_with_its_node(slurm: dict[str, str], tmp_path: Path) -> None:
    env = in_task(3, "os.environ['NNODES'] = '7'", slurm, tmp_path / "other")
    done = srun(env, tmp_path, quick(tmp_path, "lora"))

    assert done.returncode != 0
    assert done.stderr.count("On n2:") == done.stderr.count("NNODES") == 1, done.stderr


@pytest.mark.parametrize(
    "options",
    [["--kill-on-bad-exit=1"], pytest.param([], marks=pytest.mark.long)],  # the second task lets the first speak: 20 s
)
def test_srun_without_the_slurm_launcher_is_refused(options: list[str], slurm: dict[str, str], tmp_path: Path) -> None:
    command = ["srun", "-n2", *options, sys.executable, "-m", "tuner", "train", "tiny_lora_sample_e1"]
    done = subprocess.run(command, env=slurm, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    assert_code_2(done)
    assert "--launcher slurm" in done.stderr
    assert not (tmp_path / "work_dirs").exists()


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not hardware.has_libaio(os.environ), reason="libaio's header is not here (libaio-dev)")
def test_the_tasks_of_all_nodes_leave_nothing_on_the_disk_that_they_swap_to(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    swap = tmp_path / "swap"
    to_disk, recipe = config(tmp_path / "disk.json", device="nvme", nvme_path=str(swap)), quick(tmp_path, "full")
    # The ops are compiled here: both nodes use this machine's folder of ops, and see none of each other's processes.
    compile_ops(tmp_path)

    done = srun(slurm, tmp_path, recipe, "--deepspeed", to_disk)

    assert done.returncode == 0, done.stdout + done.stderr
    assert list(swap.iterdir()) == []
