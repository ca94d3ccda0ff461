"""What is swapped to a disk trains as what is offloaded to memory does, and leaves nothing on the disk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.runs import COMMAND, finish, ok, processes_of, quick, start, train, wait_until, written_lines
from tests.e2e.test_launchers import MPIRUN, needs_mpi
from tuner.machine import hardware

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.long,  # three ops are compiled where no earlier run has, which takes minutes
    pytest.mark.skipif(not hardware.has_libaio(os.environ), reason="libaio's header is not here (libaio-dev)"),
]
BY = {"none": COMMAND, "mpi": [*MPIRUN, *COMMAND]}


def config(path: Path, **device: Any) -> Path:
    offload = {**device, "pin_memory": False}
    zero = {"stage": 3, "offload_optimizer": offload, "offload_param": offload}
    path.write_text(json.dumps({"zero_optimization": zero}))
    return path


def compile_ops(folder: Path) -> None:
    """Swap in one step alone: where no earlier run has compiled the three ops, that takes minutes of both cores."""
    to_disk = config(folder / "first.json", device="nvme", nvme_path=str(folder / "first"))
    short = ("--work-dir", folder / "first_run", "--set", "max_steps=1")
    ok(finish(start(quick(folder, "full"), "--deepspeed", to_disk, *short, ranks=1), folder / "first_run", 1500))


@pytest.fixture(autouse=True, scope="module")
def _compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    compile_ops(tmp_path_factory.mktemp("ops"))


def test_a_disk_gives_the_losses_of_memory_and_is_empty_afterwards(tmp_path: Path) -> None:
    recipe, swap = quick(tmp_path, "full"), tmp_path / "swap"
    to_disk = config(tmp_path / "disk.json", device="nvme", nvme_path=str(swap))
    to_memory = config(tmp_path / "memory.json", device="cpu")

    whole = train(recipe, tmp_path / "whole", "--deepspeed", to_disk)
    memory = train(recipe, tmp_path / "memory", "--deepspeed", to_memory)
    again = ("--deepspeed", to_disk, "--resume", tmp_path / "whole" / "checkpoints" / "checkpoint-2")
    resumed = train(recipe, tmp_path / "resumed", *again)

    codes = (whole.code, memory.code, resumed.code)
    assert codes == (0, 0, 0), whole.text + memory.text + resumed.text
    assert "GB/s of writes" in whole.text
    assert whole.losses == pytest.approx(memory.losses, abs=1e-6)
    assert resumed.losses == pytest.approx(whole.losses[2:], rel=1e-6)
    assert list(swap.iterdir()) == []


def swapping(folder: Path) -> tuple[object, ...]:
    """Return the arguments of a run that swaps to `folder / "swap"`."""
    to_disk = config(folder / "disk.json", device="nvme", nvme_path=str(folder / "swap"))
    return quick(folder, "full"), "--deepspeed", to_disk, "--work-dir", folder / "run"


def worker(run: Path) -> psutil.Process:
    """Return a rank of a run whose steps have begun."""
    wait_until(lambda: written_lines(run / "metrics.jsonl") > 0, timeout_s=300)
    return next(process for process in processes_of(run) if "tuner.worker" in process.info["cmdline"])


@pytest.mark.parametrize("launcher", ["none", pytest.param("mpi", marks=needs_mpi)])
def test_ranks_that_nobody_watches_leave_nothing_on_the_disk(launcher: str, tmp_path: Path) -> None:
    process = start(*swapping(tmp_path), "--launcher", launcher, ranks=0, command=BY[launcher])

    done = finish(process, tmp_path / "run")

    assert done.code == 0, done.text
    assert list((tmp_path / "swap").iterdir()) == []


@needs_mpi
def test_the_others_remove_what_a_killed_rank_of_mpirun_swapped(tmp_path: Path) -> None:
    many = ("--launcher", "mpi", "--set", "train_cfg.max_steps=1000")
    process = start(*swapping(tmp_path), *many, ranks=0, command=BY["mpi"])

    worker(tmp_path / "run").kill()

    done = finish(process, tmp_path / "run")
    assert done.code != 0
    assert list((tmp_path / "swap").iterdir()) == [], done.text


def test_the_next_run_removes_what_a_killed_one_swapped(tmp_path: Path) -> None:
    given = (*swapping(tmp_path), "--launcher", "none")
    process = start(*given, "--set", "train_cfg.max_steps=1000", ranks=0)
    worker(tmp_path / "run").kill()
    process.communicate(timeout=60)
    assert list((tmp_path / "swap").rglob("*.swp"))

    again = finish(start(*given, "--resume", "auto", ranks=0), tmp_path / "run")

    assert again.code == 0, again.text
    assert list((tmp_path / "swap").iterdir()) == []
