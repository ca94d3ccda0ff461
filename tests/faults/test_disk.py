"""A disk that fills up at each moment of a run: real ranks on a real file system without a byte of room."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.e2e.runs import Finished, ok, processes_of, quick, train
from tests.faults.conftest import Faulty
from tuner.runs import checkpoints

pytestmark = pytest.mark.e2e


def _assert_told_once(run: Finished) -> None:
    assert run.code == 74, run.text
    assert "Traceback" not in run.text, run.text
    assert len(re.findall(r"^error\[disk\]: ", run.text, re.MULTILINE)) == 1, run.text
    assert processes_of(run.path) == []


def test_a_disk_without_room_is_told_before_a_rank_starts(tmp_path: Path, small_disk: Path) -> None:
    with (small_disk / "filler").open("ab", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(bytes(4096))

    run = train(quick(tmp_path, "lora"), small_disk / "run", ranks=1)

    _assert_told_once(run)
    assert not (run.path / "ranks").exists()


@pytest.mark.long
def test_a_disk_that_is_full_before_the_data_is_prepared_ends_the_run(
    tmp_path: Path, small_disk: Path, faulty: Faulty
) -> None:
    run = faulty("full@0:start", quick(tmp_path, "lora"), small_disk / "run", ranks=1)

    _assert_told_once(run)


@pytest.mark.long
@pytest.mark.parametrize(("fault", "newest"), [("full@0:3", 2), ("full@0:result", 4)])
def test_a_disk_that_is_full_while_metrics_or_the_result_are_written_leaves_the_checkpoint(
    tmp_path: Path, small_disk: Path, faulty: Faulty, fault: str, newest: int
) -> None:
    recipe = quick(tmp_path, "lora")
    run = faulty(fault, recipe, small_disk / "run", ranks=1)

    _assert_told_once(run)
    found, passed = checkpoints.newest_valid(run.path / "checkpoints")
    assert found and (found.step, passed) == (newest, [])

    (run.path / "filler").unlink()
    resumed = ok(train(recipe, run.path, "--resume", "auto", ranks=1))

    assert resumed.json("status.json")["state"] == "done"


@pytest.mark.long
def test_a_disk_that_is_full_at_the_report_costs_the_report_alone(
    tmp_path: Path, small_disk: Path, faulty: Faulty
) -> None:
    run = faulty("full@0:report", quick(tmp_path, "lora"), small_disk / "run", ranks=1)

    assert run.code == 0, run.text
    assert run.text.count("WARNING: no report: DiskError: ") == 1, run.text
    assert run.json("status.json")["state"] == "done"
    with safe_open(run.path / "final" / "adapter_model.safetensors", "pt") as weights:  # type: ignore[no-untyped-call]
        assert len(weights.keys()) > 0
