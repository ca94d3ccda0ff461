"""Runs under limits of the operating system: open files, processes, sizes of files, stacks, masks, memory, /dev/shm.

A shell sets each limit for a real `tuner train`. Root may read and write whatever a mask hides: those runs give that
capability up.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.runs import COMMAND, Finished, ok, processes_of, quick, train
from tests.faults.conftest import FAULTY, Faulty
from tuner.runs import checkpoints

pytestmark = [pytest.mark.e2e, pytest.mark.long]

BOUND_BY_MODES = "setpriv --bounding-set=-dac_override,-dac_read_search --inh-caps=-all"
NOT_ROOT = (
    "setpriv --reuid=12345 --regid=12345 --clear-groups --inh-caps=+dac_read_search --ambient-caps=+dac_read_search"
)
QUICKER = ("--set", "max_steps=2", "--set", "checkpoint.interval=1")


def under(limit: str, command: list[str] = COMMAND, then: str = "") -> list[str]:
    """Return a command that runs under what a shell sets, and `then` under another program's."""
    return ["bash", "-c", f'{limit} && exec {then} "$@"', "bash", *command]


def _assert_refused(run: Finished, code: int, *told: str) -> None:
    assert run.code == code, run.text
    assert "Traceback" not in run.text, run.text
    assert all(text in run.text for text in told), run.text
    assert processes_of(run.path) == []


@pytest.fixture
def as_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("giving up what root may needs root")


@pytest.mark.parametrize("limit", ["ulimit -n 48", "ulimit -s 128"])
def test_a_run_goes_through_with_few_open_files_or_a_small_stack(tmp_path: Path, limit: str) -> None:
    run = ok(train(quick(tmp_path, "lora"), tmp_path / "run", *QUICKER, ranks=1, command=under(limit)))

    assert ("a process may open 48 files" in run.text) == ("-n" in limit)
    assert checkpoints.inspect(run.path / "checkpoints" / "checkpoint-2") is None


def test_so_few_open_files_that_nothing_starts_is_told(tmp_path: Path) -> None:
    run = train(quick(tmp_path, "lora"), tmp_path / "run", *QUICKER, ranks=1, command=under("ulimit -n 12"))

    _assert_refused(run, 3, "ulimit -n")


def test_a_save_beyond_the_largest_file_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    recipe = quick(tmp_path, "full")
    first = ok(train(recipe, tmp_path / "run", "--set", "max_steps=2", ranks=1))

    run = train(recipe, first.path, "--resume", "auto", ranks=1, command=under("ulimit -f 2000"))

    _assert_refused(run, 74, "error[disk]: ", "larger than the limit (ulimit -f)")
    newest, _ = checkpoints.newest_valid(run.path / "checkpoints")
    assert newest and newest.step == 2
    assert not checkpoints.unfinished(run.path / "checkpoints").exists()


@pytest.mark.usefixtures("as_root")
def test_a_mask_that_hides_files_from_others_holds_for_all_and_one_that_hides_them_from_oneself_is_refused(
    tmp_path: Path,
) -> None:
    recipe = quick(tmp_path, "lora")

    run = ok(train(recipe, tmp_path / "run", *QUICKER, ranks=1, command=under("umask 077", then=BOUND_BY_MODES)))

    assert not [path for path in run.path.rglob("*") if not path.is_symlink() and path.stat().st_mode & 0o077]
    ok(train(recipe, run.path, "--resume", "auto", "--set", "max_steps=3", ranks=1))

    hidden = train(recipe, tmp_path / "hidden", *QUICKER, ranks=1, command=under("umask 777", then=BOUND_BY_MODES))

    _assert_refused(hidden, 74, f"cannot write {hidden.path}: Permission denied")


MEMORY = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """Make a control group with 3 GiB of memory; of the first kind where that is mounted, else of the second."""
    first = MEMORY.is_dir()
    group = (MEMORY if first else MEMORY.parent) / f"tuner-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(3 << 30))
    except OSError as error:
        group.rmdir() if group.is_dir() else None
        pytest.skip(f"no control group of one's own: {error}")
    yield group
    group.rmdir()


def test_a_rank_beyond_the_memory_of_its_control_group_is_told_as_out_of_memory(
    tmp_path: Path, cgroup: Path, faulty: Faulty
) -> None:
    join = f"echo $$ > {cgroup}/cgroup.procs"
    run = faulty("eat@1:3", quick(tmp_path, "lora"), tmp_path / "run", command=under(join, FAULTY))

    _assert_refused(run, 137, "rank 1", "memory")
    newest, _ = checkpoints.newest_valid(run.path / "checkpoints")
    assert newest and newest.step == 2


@pytest.mark.usefixtures("as_root")
def test_a_full_dev_shm_with_dataloader_workers_is_told(tmp_path: Path) -> None:
    mounted = "mount -t tmpfs -o size=64k tmpfs /dev/shm; head -c 64k /dev/zero > /dev/shm/filler"
    command = ["unshare", "--mount", *under(f"{mounted}; df /dev/shm | grep -q 100%")]
    assert subprocess.run([*command[:-3], "true"]).returncode == 0

    workers = ("--set", "train_dataloader.num_workers=2")
    run = train(quick(tmp_path, "lora"), tmp_path / "run", *QUICKER, *workers, ranks=1, command=command)

    _assert_refused(run, 3, "/dev/shm")
