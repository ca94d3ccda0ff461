"""`tuner clean` as a shell sees it; tests/runs/test_cleaning.py has what is left and what is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import Tuner
from tests.runs.test_cleaning import killed_run


def test_leftovers_are_listed_with_sizes_and_removed_with_yes_alone(tuner: Tuner) -> None:
    run = killed_run(Path("work_dirs/mine/first").absolute())
    unfinished = run.checkpoints / "unfinished"

    listed = tuner("clean")
    assert listed.code == 0
    *lines, last = listed.out.splitlines()
    assert len(lines) == 2 and "--yes" in last
    assert str(unfinished / "checkpoint-30") in lines[0] and str(unfinished / "rank-1") in lines[1]
    assert (unfinished / "checkpoint-30").is_dir()

    assert tuner("clean", "work_dirs", "--yes").out.splitlines()[-1].startswith("Removed ")
    assert [*unfinished.iterdir()] == []
    assert "Nothing to remove" in tuner("clean", str(run.path)).out


def test_its_json_says_what_is_left_and_what_was_removed(tuner: Tuner) -> None:
    run = killed_run(Path("work_dirs/first").absolute())

    listed, cleaned, again = (json.loads(tuner("clean", "--json", *more).out) for more in ((), ("--yes",), ("--yes",)))

    assert [left["path"] for left in listed["leftovers"]] == [
        str(run.checkpoints / "unfinished" / name) for name in ("checkpoint-30", "rank-1")
    ]
    assert (listed["bytes"], listed["is_removed"], listed["leftovers"][0]["kind"]) == (14, False, "checkpoint")
    assert cleaned == {**listed, "is_removed": True}
    assert (again["leftovers"], again["bytes"]) == ([], 0)


@pytest.mark.parametrize("folder", ["wrok_dirs", "a file"])
def test_a_folder_that_is_none_is_refused(tuner: Tuner, folder: str) -> None:
    Path("a file").touch()

    assert tuner("clean", folder).code == 2
    assert tuner("clean").code == 0
