"""DeepSpeed's hostfile and its filters mean here what they mean to DeepSpeed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.refused import refused
from tuner.errors import UsageError
from tuner.machine import hostfile

FILE = "# the workers\nworker-1 slots=4\n\nworker-2   slots=4 # new\nworker-3 slots=2\n"


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "hosts"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize(
    ("include", "exclude"),
    [
        ("", ""),
        ("worker-2", ""),
        ("worker-2@worker-1", ""),
        ("worker-2:3,1@worker-1:0", ""),
        ("", "worker-1"),
        ("", "worker-1:0,3@worker-2"),
    ],
)
def test_the_hosts_and_gpus_are_those_that_deepspeed_takes(written: Path, include: str, exclude: str) -> None:
    from deepspeed.launcher import runner

    wanted = runner.parse_inclusion_exclusion(runner.fetch_hostfile(str(written)), include, exclude)

    found = hostfile.read_hostfile(written, include or None, exclude or None)

    assert {host.name: list(host.gpus) for host in found} == wanted
    assert [host.name for host in found] == list(wanted)
    slots = {"worker-1": 4, "worker-2": 4, "worker-3": 2}
    assert [host.is_whole for host in found] == [len(host.gpus) == slots[host.name] for host in found]


@pytest.mark.parametrize(
    ("text", "where", "values"),
    [
        ("worker-1", "hosts:1", ()),
        ("worker-1 slots=4\nworker-2 slots=x\n", "hosts:2", ()),
        ("worker-1 slots=0", "hosts:1", ()),
        ("-oProxyCommand=id slots=1", "hosts:1", ()),
        ("a slots=1\na slots=1", "hosts:2", ("a",)),
        ("# nothing\n", "--hostfile", ()),
    ],
)
def test_a_line_that_names_no_host_is_told_with_its_place(
    tmp_path: Path, text: str, where: str, values: tuple[str, ...]
) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)

    with refused(UsageError, where, *values):
        hostfile.read_hostfile(path, None, None)


@pytest.mark.parametrize(
    ("include", "exclude", "said"),
    [
        ("worker-9", None, "worker-9 is not in the hostfile"),
        ("worker-1:4", None, "worker-1 has no slot 4"),
        ("worker-1:x", None, "'worker-1:x' is not a host"),
        (None, "worker-1@worker-2@worker-3", "no GPU is left"),
        ("worker-1", "worker-2", "cannot be combined"),
    ],
)
def test_a_filter_of_what_is_not_there_is_refused(
    written: Path, include: str | None, exclude: str | None, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        hostfile.read_hostfile(written, include, exclude)


def test_deepspeeds_environment_files_are_read_the_working_directorys_last(tmp_path: Path) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    for folder, text in ((home, "A=1\nB=of home\n"), (here, "# mine\nB=x=y z\n\n")):
        folder.mkdir()
        (folder / ".deepspeed_env").write_text(text)

    assert hostfile.variables(home, here, allow_code=True) == {"A": "1", "B": "x=y z"}
    (here / ".deepspeed_env").write_text("export C\n")
    with refused(UsageError, ".deepspeed_env:1"):
        hostfile.variables(home, here, allow_code=True)


@pytest.mark.parametrize(
    "name",
    ["PYTHONPATH", "LD_PRELOAD", "NCCL_NET_PLUGIN", "NCCL_DEBUG_FILE", "CC", "TORCH_EXTENSIONS_DIR", "nccl_debug", "X"],
)
def test_the_working_directorys_file_sets_nothing_that_can_run_code_unasked(tmp_path: Path, name: str) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    for folder in (home, here):
        folder.mkdir()
    (here / ".deepspeed_env").write_text(f"NCCL_SOCKET_IFNAME=eth0\n{name}=./evil\n")

    with refused(UsageError, ".deepspeed_env", name, "--allow-code"):
        hostfile.variables(home, here)

    assert hostfile.variables(home, here, allow_code=True)[name] == "./evil"
    assert hostfile.variables(here, here)[name] == "./evil", "the home folder is the user's own"
    (here / ".deepspeed_env").write_text("NCCL_SOCKET_IFNAME=eth0\nGLOO_SOCKET_IFNAME=eth0\nNCCL_DEBUG=INFO\n")
    assert len(hostfile.variables(home, here)) == 3


def test_a_file_that_ds_env_file_names_whole_is_the_users_choice(tmp_path: Path) -> None:
    home, here, named = tmp_path / "home", tmp_path / "here", tmp_path / "mine.env"
    named.write_text("A=1\n")

    assert hostfile.variables(home, here, str(named)) == {"A": "1"}
    (tmp_path / "here").mkdir()
    (here / "mine.env").write_text("A=2\n")
    with refused(UsageError, "mine.env", "A"):
        hostfile.variables(home, here, "mine.env")


def test_environment_files_that_are_no_text_are_one_message(tmp_path: Path) -> None:
    (tmp_path / ".deepspeed_env").write_bytes(b"A=\xff\n")

    with refused(UsageError, ".deepspeed_env:1:3"):
        hostfile.variables(tmp_path, tmp_path)


def test_a_hostfile_that_is_not_there_is_no_traceback_and_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    for name, problem in (("none", "there is no file"), ("pipe", "not a regular file")):
        with pytest.raises(UsageError, match=problem):
            hostfile.read_hostfile(tmp_path / name, None, None)
