"""Rank 0 makes a checkpoint of the files of all ranks only when it sees each file as its rank wrote it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.refused import refused
from tuner.errors import DiskError
from tuner.runs import checkpoints, rank_files
from tuner.runs.records import ManifestFacts

NAME = "checkpoint-2"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a run's folder of checkpoints, where ranks 0, 1 and 2 have written a file each of step 2."""
    for rank in range(3):
        folder = rank_files.home_of(checkpoints.unfinished(tmp_path), rank) / NAME / "global_step2"
        folder.mkdir(parents=True)
        (folder / f"states-{rank}").write_text(f"of rank {rank}")
        if rank:
            rank_files.declare(checkpoints.unfinished(tmp_path), NAME, rank)
    return tmp_path


def commit(home: Path, waits_for: Callable[[str], bool] = lambda _: False) -> None:
    checkpoints.commit(home, 2, ManifestFacts(), num_ranks=3, waits_for=waits_for)


def of_rank_1(home: Path) -> Path:
    return rank_files.home_of(checkpoints.unfinished(home), 1) / NAME / "global_step2" / "states-1"


def test_a_checkpoint_holds_the_parts_of_all_ranks_and_its_manifest_names_each_file(home: Path) -> None:
    commit(home)

    assert checkpoints.inspect(home / NAME) is None
    manifest = checkpoints._manifest(home / NAME)
    assert [*manifest.files] == [f"global_step2/states-{rank}" for rank in range(3)]
    assert {path.name for path in (home / NAME / "global_step2").iterdir()} == {"states-0", "states-1", "states-2"}
    assert not checkpoints.unfinished(home).exists()


def test_rank_0_waits_for_a_file_that_is_shown_late(home: Path) -> None:
    late, hidden = of_rank_1(home), home / "hidden"
    late.rename(hidden)
    threading.Timer(0.2, hidden.rename, (late,)).start()
    seen = []

    commit(home, lambda problem: bool(seen.append(problem)) or True)

    assert "states-1" in seen[0]
    assert checkpoints.inspect(home / NAME) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda file: file.unlink(),
        lambda file: file.write_text("of"),
        lambda file: file.write_text("OF RANK 1"),
        lambda file: file.parent.parent.with_suffix(".json").unlink(),
        lambda file: file.parent.parent.with_suffix(".json").write_text('{"version": 1, "host":'),
    ],
    ids=["missing", "short", "another content", "not declared", "declared in part"],
)
def test_a_part_that_is_not_seen_as_it_was_written_makes_no_checkpoint(
    home: Path, change: Callable[[Path], object]
) -> None:
    change(of_rank_1(home))

    with refused(DiskError, home.name, "rank 1"):
        commit(home)

    assert not (home / NAME).exists()


def test_a_rank_that_wrote_nothing_declares_that(tmp_path: Path) -> None:
    (checkpoints.unfinished(tmp_path) / NAME).mkdir(parents=True)
    for rank in (1, 2):
        rank_files.declare(checkpoints.unfinished(tmp_path), NAME, rank)

    commit(tmp_path)

    assert checkpoints.inspect(tmp_path / NAME) is None


def test_a_checkpoint_that_is_removed_while_rank_0_waits_is_waited_for_no_longer(home: Path) -> None:
    of_rank_1(home).unlink()

    def remove(_: str) -> bool:
        is_first = checkpoints.unfinished(home).exists()
        shutil.rmtree(checkpoints.unfinished(home), ignore_errors=True)
        return is_first

    with pytest.raises(FileNotFoundError):
        commit(home, remove)


def test_no_file_of_a_rank_takes_the_place_of_anothers(home: Path) -> None:
    unfinished = checkpoints.unfinished(home)
    same = rank_files.home_of(unfinished, 2) / NAME / "global_step2" / "states-1"
    same.write_text("of rank 2")
    rank_files.declare(unfinished, NAME, 2)

    with refused(DiskError, NAME, "states-1", "rank 2"):
        commit(home)

    assert not (home / NAME).exists()
