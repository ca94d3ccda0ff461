"""What a user names is found, verified and said aloud; what cannot be exported is told in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.refused import refused
from tests.results.runs import checkpoint, finish, make_run
from tuner.errors import RunDirectoryError, UsageError
from tuner.results.saved import check_dest, find
from tuner.runs import checkpoints
from tuner.runs.directory import RunDirectory
from tuner.runs.records import ManifestFacts


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A folder that looks like weights: this room's first step reads none."""
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return make_run(tmp_path / "run", "tiny_full_sample_e1", "package:tiny")


def test_a_run_that_is_done_means_its_result(run: RunDirectory, weights: Path) -> None:
    checkpoint(run, 2, weights)
    finish(run, weights)

    found = find(run.path)

    assert (found.folder, found.step, found.is_adapter) == (run.final, 3, False)
    assert find(run.final).run_dir == run


def test_a_run_that_is_not_done_means_its_newest_valid_checkpoint_and_says_so(run: RunDirectory, weights: Path) -> None:
    older, newest = checkpoint(run, 2, weights), checkpoint(run, 4, weights)

    assert (find(run.path).folder, find(run.path).step) == (newest, 4)
    assert "checkpoint 4 of" in find(run.path).description and "not finished" in find(run.path).description
    (newest / "model.safetensors").write_bytes(b"WEIGHTS")
    assert find(run.path).folder == older
    assert "checkpoint-4 is skipped: model.safetensors has changed" in find(run.path).description


def test_a_checkpoint_knows_its_run_and_is_hashed_first(run: RunDirectory, weights: Path) -> None:
    folder = checkpoint(run, 2, weights)

    assert (find(folder).run_dir, find(folder).step) == (run, 2)
    (folder / "model.safetensors").write_bytes(b"WEIGHTS")
    with refused(RunDirectoryError, "SOURCE") as told:
        find(folder)
    assert told.value.exit_code == 2
    (folder / "manifest.json").unlink()
    with refused(RunDirectoryError, "SOURCE"):
        find(folder)


def test_a_folder_beside_no_run_is_weights_whatever_it_is_called_and_may_be_edited(
    tmp_path: Path, weights: Path
) -> None:
    (weights / "README.md").write_text("card")
    checkpoints.seal(weights, ManifestFacts(num_tensors=1))  # as an export is
    (weights / "README.md").write_text("card with a licence")
    of_another_tool = weights.rename(tmp_path / "checkpoint-500")

    assert find(of_another_tool).description == f"the weights in {of_another_tool}"


def test_a_checkpoint_that_was_moved_is_known_by_its_step(run: RunDirectory, weights: Path, tmp_path: Path) -> None:
    moved = checkpoint(run, 2, weights).rename(tmp_path / "mine")

    assert find(moved).step == 2
    (moved / "model.safetensors").write_bytes(b"WEIGHTS")
    with refused(RunDirectoryError, "SOURCE"):
        find(moved)
    (moved / "manifest.json").write_text("{")
    with refused(RunDirectoryError, "SOURCE"):
        find(moved)


def test_a_run_that_never_saved_is_told_to_go_on_with_the_flag_that_its_recipe_needs(tmp_path: Path) -> None:
    run = make_run(tmp_path / "my run", "tiny_full_sample_e1", "package:tiny", ("--set", "log.notify=true"))

    with refused(RunDirectoryError, "SOURCE") as told:
        find(run.path)

    command = f"tuner train '{run.recipe}' --resume '{run.path}' --allow-code"
    assert told.value.fix == f"Resume it first: {command} (--allow-code allows log.notify = 'true')"


def test_what_is_no_result_is_refused(tmp_path: Path, run: RunDirectory, weights: Path) -> None:
    pickle = tmp_path / "iter_500.pth"
    pickle.write_bytes(b"")
    with refused(UsageError, "SOURCE"):
        find(pickle)
    with refused(RunDirectoryError, "SOURCE"):
        find(tmp_path / "runn")
    with refused(UsageError, "SOURCE"):
        find(run.checkpoints)


@pytest.mark.parametrize("name", ["optimizer.pt", "pytorch_model.bin"], ids=["no frozen layers", "pickles alone"])
def test_a_checkpoint_without_whole_safetensors_is_refused(run: RunDirectory, weights: Path, name: str) -> None:
    (weights / "model.safetensors").rename(weights / name)

    with refused(UsageError, "SOURCE"):
        find(checkpoint(run, 2, weights))


def test_a_destination_that_holds_something_is_refused(tmp_path: Path, weights: Path) -> None:
    check_dest(tmp_path / "new")
    (tmp_path / "empty").mkdir()
    check_dest(tmp_path / "empty")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for taken in (weights, weights / "model.safetensors", tmp_path / "link"):
        with refused(UsageError, "DEST"):
            check_dest(taken)


def test_a_destination_that_no_folder_can_be_renamed_to_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "here")
    (tmp_path / "file").write_text("mine")
    monkeypatch.chdir(tmp_path / "here")

    for taken in (Path(), tmp_path / "here", tmp_path / "link"):
        with refused(UsageError, "DEST"):
            check_dest(taken)
    with refused(UsageError, "DEST"):
        check_dest(tmp_path / "file" / "new" / "out")
    with refused(UsageError, "DEST"):
        check_dest(tmp_path / "new" / "..")
