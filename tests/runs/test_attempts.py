from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs.made_records import run_json
from tuner.files import write_text
from tuner.runs import attempts, checkpoints
from tuner.runs.directory import RunDirectory
from tuner.runs.records import ManifestFacts


def _run(folder: Path, *, began: int | None, saved: int | None) -> RunDirectory:
    run = RunDirectory(folder)
    write_text(run.run_json, run_json(resume_step=began))
    if saved is not None:
        checkpoint = run.checkpoints / f"checkpoint-{saved}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "weights").write_bytes(b"x")
        checkpoints.seal(checkpoint, ManifestFacts(step=saved))
    return run


@pytest.mark.parametrize(("began", "saved"), [(None, None), (None, 5), (5, 5)])
def test_the_first_restart_needs_no_progress(tmp_path: Path, began: int | None, saved: int | None) -> None:
    assert attempts.refusal(_run(tmp_path, began=began, saved=saved), 0, 3) is None


def test_a_run_that_saved_further_may_be_started_again_up_to_the_limit(tmp_path: Path) -> None:
    run = _run(tmp_path, began=5, saved=10)

    assert attempts.refusal(run, 2, 3) is None
    assert attempts.refusal(run, 3, 3) == "it was restarted 3 times, and the limit is 3"


@pytest.mark.parametrize(("began", "saved"), [(5, 5), (5, None), (None, None)])
def test_a_loop_without_a_newer_checkpoint_ends(tmp_path: Path, began: int | None, saved: int | None) -> None:
    told = attempts.refusal(_run(tmp_path, began=began, saved=saved), 1, 100)

    assert told == f"its last attempt began at step {began or 0} and saved no newer checkpoint"


def test_a_checkpoint_that_is_not_valid_is_no_progress(tmp_path: Path) -> None:
    run = _run(tmp_path, began=5, saved=10)
    (run.checkpoints / "checkpoint-10" / "weights").write_bytes(b"y")

    assert attempts.refusal(run, 1, 100)


def test_a_checkpoint_that_was_just_written_is_not_read_again(tmp_path: Path) -> None:
    run = _run(tmp_path, began=5, saved=10)
    (run.checkpoints / "checkpoint-10" / "weights").write_bytes(b"y")

    assert attempts.refusal(run, 1, 100, saved=10) is None
    assert attempts.refusal(run, 1, 100, saved=5)
