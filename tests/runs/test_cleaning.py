"""What ended runs left is found and removed, and nothing of a run that is, or may be, at work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch.plans import checkpoint, written_run
from tests.runs.test_listing import held
from tests.runs.test_swapped import process
from tuner.errors import DiskError
from tuner.runs import checkpoints, cleaning, listing, lock, swapped
from tuner.runs.directory import RunDirectory
from tuner.runs.records import RunStatus

GONE = {"pid": 2**22 + 1}


def found(folder: Path, **more: Any) -> list[cleaning.Leftover]:
    return cleaning.found([Path(run.path) for run in listing.below(folder)], {}, **more)


def removed(leftovers: list[cleaning.Leftover], **more: Any) -> list[cleaning.Leftover]:
    return [*cleaning.removed(leftovers, {}, **more)]


def killed_run(path: Path) -> RunDirectory:
    """Write a run that was killed in a save of step 30 on two ranks; it has a checkpoint of step 20."""
    run = written_run(path)
    checkpoint(path, 20)
    for folder in ("checkpoint-30", "rank-1/checkpoint-30"):
        file = checkpoints.unfinished(run.checkpoints) / folder / "model.safetensors"
        file.parent.mkdir(parents=True)
        file.write_bytes(b"weights")
    held(run, **GONE)
    return run


def swaps(run: RunDirectory, disk: Path) -> str:
    """Let a run's record say that it swaps to a disk; return its launch."""
    record = json.loads(run.run_json.read_text())
    run.run_json.write_text(json.dumps({**record, "swaps_to": [str(disk)]}))
    return str(record["launch_id"])


def left_swapped(disk: Path, launch_id: str) -> Path:
    """Kill a process that swaps to a disk, and return what it leaves."""
    with process(disk, launch_id) as killed:
        (disk / "zero_stage_3" / "0_param.tensor.swp").write_bytes(b"states")
        killed.kill()
    return disk / "zero_stage_3"


def names(leftovers: list[cleaning.Leftover], folder: Path) -> list[str]:
    return [str(leftover.path.relative_to(folder)) for leftover in leftovers]


def test_what_a_killed_save_left_is_removed_and_whole_checkpoints_stay(tmp_path: Path) -> None:
    run = killed_run(tmp_path / "run")
    (checkpoint(run.path, 25) / checkpoints.MANIFEST).unlink()  # as other trainers write it: no save of ours left it
    checkpoint(run.path, 28, valid=False)  # it has lost a file since: somebody may still want the others
    kept = {file: file.read_bytes() for file in run.path.rglob("*") if file.is_file() and "checkpoint-20" in str(file)}

    leftovers = found(tmp_path)

    assert names(leftovers, run.checkpoints) == ["unfinished/checkpoint-30", "unfinished/rank-1"]
    assert [leftover.num_bytes for leftover in leftovers] == [7, 7]
    assert all(leftover.path.exists() for leftover in leftovers), "a list changes nothing"
    assert removed(leftovers) == leftovers
    assert found(tmp_path) == []
    assert [step for step, _ in checkpoints.newest_first(run.checkpoints)] == [28, 25, 20]
    assert kept and all(file.read_bytes() == content for file, content in kept.items())
    assert lock.holder(run.path) is None


def test_a_whole_checkpoint_of_a_killed_save_is_put_in_its_place(tmp_path: Path) -> None:
    run = killed_run(tmp_path / "run")
    (run.checkpoints / "checkpoint-20").rename(checkpoints.unfinished(run.checkpoints) / "replaced checkpoint-20")

    leftovers = found(tmp_path)

    assert "unfinished/replaced checkpoint-20" not in names(leftovers, run.checkpoints)
    assert removed(leftovers) == leftovers
    assert [saved.step for saved in checkpoints.listed(run.checkpoints)] == [20]


@pytest.mark.parametrize("place", ["run", "array"])
def test_what_a_job_may_start_again_is_passed_over_also_a_task_of_an_array(place: str, tmp_path: Path) -> None:
    run = killed_run(tmp_path / "array" / "run")
    (tmp_path / "array" / ("" if place == "array" else "run") / "job").write_text("812\n")
    told: list[str] = []

    assert found(tmp_path, tell=told.append) == []
    assert len(told) == 1 and "812" in told[0]
    leftovers = found(tmp_path, has_ended=lambda job: job == "812")
    assert len(leftovers) == 2
    assert removed(leftovers, tell=told.append) == [] and "812" in told[1], "it was queued again meanwhile"
    assert run.path.is_dir() and all(leftover.path.exists() for leftover in leftovers)


@pytest.mark.parametrize("damage", ["num_nodes", "run.json", "user"])
def test_nothing_of_a_run_is_found_where_nobody_knows_enough_of_it(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = killed_run(tmp_path / "run")
    if damage == "num_nodes":  # a rank on another node may be ending its save
        run.run_json.write_text(json.dumps({**json.loads(run.run_json.read_text()), "num_nodes": 2}))
    elif damage == "run.json":  # a project of another trainer, with files of such names
        run.run_json.write_text("{}")
    else:
        monkeypatch.setattr(cleaning.os, "geteuid", lambda: run.path.stat().st_uid + 1)
    told: list[str] = []

    assert found(tmp_path, tell=told.append) == []
    assert len(told) == 1 and str(run.path) in told[0]


def test_a_run_whose_status_is_damaged_is_cleaned_if_nobody_holds_it(tmp_path: Path) -> None:
    run = killed_run(tmp_path / "run")
    run.status.write_text("{")

    assert len(found(tmp_path)) == 2
    held(run, host="node-7")
    assert found(tmp_path) == []


@pytest.mark.parametrize("state", ["running", "failed"])
@pytest.mark.parametrize("facts", [{}, {"host": "node-7"}])
def test_nothing_of_a_run_that_may_be_at_work_is_found(facts: dict[str, object], state: Any, tmp_path: Path) -> None:
    """A run writes how it ended before its last process ends."""
    run = killed_run(tmp_path / "run")
    run.write_status(RunStatus(state=state, exit_code=1))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        import psutil

        started_s = psutil.Process(other.pid).create_time() - psutil.boot_time()
        held(run, pid=other.pid, started_s=started_s, **facts)
        assert found(tmp_path) == []


def test_a_run_that_has_begun_again_is_passed_over(tmp_path: Path) -> None:
    run = killed_run(tmp_path / "run")
    leftovers = found(tmp_path)
    held(run, host="node-7")
    told: list[str] = []

    assert removed(leftovers, tell=told.append) == []
    assert len(told) == 1 and str(run.path) in told[0]
    assert all(leftover.path.exists() for leftover in leftovers)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    run, other = killed_run(tmp_path / "run"), tmp_path / "other"
    run.checkpoints.rename(other)
    run.checkpoints.symlink_to(other)
    left_swapped(tmp_path / "disk", swaps(run, tmp_path / "linked"))
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "zero_stage_3").symlink_to(tmp_path / "disk" / "zero_stage_3")

    assert found(tmp_path) == []


def test_files_swapped_by_a_killed_launch_are_removed_also_of_an_earlier_attempt(tmp_path: Path) -> None:
    run = killed_run(tmp_path / "runs" / "run")
    earlier = RunDirectory(run.attempts / "1")
    earlier.path.mkdir(parents=True)
    earlier.run_json.write_text(run.run_json.read_text().replace(run.read_run().launch_id, "earlier"))
    of_run = [
        left_swapped(tmp_path / "old disk", swaps(earlier, tmp_path / "old disk")),
        left_swapped(tmp_path / "disk", swaps(run, tmp_path / "disk")),
    ]

    leftovers = [leftover for leftover in found(tmp_path / "runs") if leftover.kind == "swapped"]

    assert [leftover.path for leftover in leftovers] == of_run
    assert all(leftover.num_bytes > 6 for leftover in leftovers)
    assert removed(leftovers) == leftovers
    assert not any(folder.exists() for folder in of_run) and (tmp_path / "disk").is_dir()


def test_files_that_another_run_swaps_or_left_on_the_disk_are_not_this_runs(tmp_path: Path) -> None:
    run, disk = killed_run(tmp_path / "runs" / "run"), tmp_path / "disk"
    launch_id = swaps(run, disk)
    left_swapped(disk, launch_id)
    leftovers = found(tmp_path / "runs")

    with process(disk, "another"):  # it has taken the folder over
        assert {leftover.kind for leftover in found(tmp_path / "runs")} == {"checkpoint"}
        assert {leftover.kind for leftover in removed(leftovers)} == {"checkpoint"}
        assert (disk / "zero_stage_3").is_dir()
    left_swapped(disk, "another")
    assert found(tmp_path / "runs") == []
    with process(tmp_path / "third", launch_id):
        assert swapped.left([str(tmp_path / "third")], launch_id) == []


def test_what_cannot_be_removed_is_told_with_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    run = killed_run(tmp_path / "run")
    leftovers = found(tmp_path)
    monkeypatch.setattr(cleaning.shutil, "rmtree", refuses)

    with pytest.raises(DiskError) as caught:
        removed(leftovers)

    assert str(leftovers[0].path) in caught.value.what
    assert lock.holder(run.path) is None
