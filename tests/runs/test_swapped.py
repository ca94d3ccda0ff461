"""What a run swaps to a disk is removed by the last of its processes, and by the next run where they were killed."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.refused import refused
from tuner.errors import DiskError, MachineError
from tuner.runs import swapped

ROOT = Path(__file__).parents[2]
SWAPS = """
import sys
from tuner.runs.swapped import removed_afterwards
with removed_afterwards(sys.argv[1:2], sys.argv[2]):
    print('swaps', flush=True)
    sys.stdin.read()
"""


@contextmanager
def process(swap: Path, launch_id: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process that has claimed the folder, and swaps until its input is closed."""
    command = [sys.executable, "-c", SWAPS, str(swap), launch_id]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout and started.stdout.readline() == "swaps\n"
        yield started


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "swap" / "zero_stage_3"


@pytest.mark.parametrize(("left", "stays"), [((), False), (("made-by-tuner", "a.swp"), False), (("a.swp",), True)])
def test_what_was_swapped_is_removed_and_what_somebody_else_has_there_stays(
    folder: Path, left: tuple[str, ...], stays: bool
) -> None:
    for name in left:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()

    with swapped.removed_afterwards([str(folder.parent)], "mine") as kept:
        assert folder.is_dir()
        (folder / "rank0").mkdir()
        (folder / "rank0" / "0_param.tensor.swp").touch()

    assert folder.exists() is stays
    assert [line for line in kept if "already existed" in line] == kept and bool(kept) is stays
    assert folder.parent.is_dir()


def test_a_full_disk_is_told_with_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(swapped, "_lock_mark", full)

    with pytest.raises(DiskError) as caught, swapped.removed_afterwards([str(folder.parent)], "mine"):
        pass

    assert str(folder) in caught.value.what


def test_two_runs_never_swap_into_one_folder(folder: Path) -> None:
    with swapped.removed_afterwards([str(folder.parent)], "mine"):
        with (
            refused(MachineError, "zero_stage_3"),
            swapped.removed_afterwards([str(folder.parent)], "another"),
        ):
            pass
        assert folder.is_dir()


def test_the_last_process_of_a_run_removes_what_all_of_them_swapped(folder: Path) -> None:
    with ExitStack() as running:
        first, second = (running.enter_context(process(folder.parent, "mine")) for _ in range(2))
        (folder / "0_param.tensor.swp").touch()

        first.communicate(timeout=60)
        assert (folder / "0_param.tensor.swp").is_file()

        second.communicate(timeout=60)
        assert not folder.exists()


def test_what_a_killed_run_left_is_the_next_runs_to_remove(folder: Path) -> None:
    with process(folder.parent, "killed") as killed:
        (folder / "0_param.tensor.swp").touch()
        killed.kill()
        killed.wait()
    assert (folder / "0_param.tensor.swp").is_file()

    with process(folder.parent, "next") as following:
        following.communicate(timeout=60)

    assert not folder.exists()


def test_what_is_still_written_while_a_run_ends_is_left_to_the_next_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with swapped.removed_afterwards([str(folder.parent)], "mine"):
        (folder / "rank1").mkdir()
        monkeypatch.setattr(swapped.shutil, "rmtree", lambda *_, **__: None)

    assert sorted(entry.name for entry in folder.iterdir()) == ["made-by-tuner", "rank1"]
