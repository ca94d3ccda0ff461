"""Ranks that mpirun, a script or ssh has started learn what our own learn; what needs no run is in tests/machine."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.runs import (
    COMMAND,
    Finished,
    Once,
    environment,
    finish,
    free_port,
    ok,
    quick,
    start,
    wait_until,
    written_lines,
)

pytestmark = [pytest.mark.e2e, pytest.mark.long]
MPIRUN = ["mpirun", "-np", "2", "--allow-run-as-root", "--oversubscribe"]
SSHD = shutil.which("sshd", path=f"/usr/sbin:{os.environ.get('PATH', '')}")
needs_mpi = pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun (openmpi-bin)")
needs_sshd = pytest.mark.skipif(not (SSHD and shutil.which("ssh")), reason="no sshd and ssh (openssh-server)")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quick(tmp_path_factory.mktemp("recipe"), "lora")


@pytest.fixture(scope="module")
def losses(once: Once) -> list[float]:
    """Return the losses of two ranks that tuner starts."""
    return once(quick, "lora", "--deepspeed", "zero2").losses


def by_mpi(recipe: Path, run: Path, *arguments: object) -> subprocess.Popen[str]:
    given = (recipe, "--deepspeed", "zero2", "--launcher", "mpi", "--work-dir", run, *arguments)
    return start(*given, ranks=0, command=[*MPIRUN, *COMMAND])


@needs_mpi
def test_mpiruns_ranks_learn_what_our_own_learn(recipe: Path, losses: list[float], tmp_path: Path) -> None:
    run = ok(finish(by_mpi(recipe, tmp_path / "run"), tmp_path / "run"))

    assert run.losses == losses
    assert run.text.count("training on the CPU with 2 processes (mpi) in fp32") == 1, "rank 0 speaks"
    assert "\x1b" not in run.text, "mpirun writes into a pipe"
    assert run.text.count("Trained 4 steps") == 1
    assert "step 1/4" in run.text, "lines, although Open MPI gives each rank a terminal"


@needs_mpi
def test_a_run_that_mpirun_is_told_to_stop_goes_on_from_there(
    recipe: Path, losses: list[float], tmp_path: Path
) -> None:
    path = tmp_path / "run"
    process = by_mpi(recipe, path, "--set", "train_cfg.max_steps=1000")
    wait_until(lambda: written_lines(path / "metrics.jsonl") >= 2)

    process.send_signal(signal.SIGUSR2)

    stopped = finish(process, path)
    assert stopped.code == 75, stopped.text
    done = len(stopped.losses)
    again = ok(finish(by_mpi(recipe, path, "--resume", "auto", "--set", f"train_cfg.max_steps={done + 2}"), path))
    assert len(again.losses) == done + 2
    assert again.losses[: min(done, 4)] == losses[: min(done, 4)]


@needs_mpi
def test_a_mistake_under_mpirun_is_told_once(tmp_path: Path) -> None:
    process = start("tiny_lra_sample_e1", "--launcher", "mpi", ranks=0, command=[*MPIRUN, *COMMAND])

    done = finish(process, tmp_path)

    assert done.code == 2
    assert done.text.count("Did you mean 'tiny_lora_sample_e1'?") == 1, done.text


def test_processes_that_a_script_starts_join_as_ranks(recipe: Path, losses: list[float], tmp_path: Path) -> None:
    run = tmp_path / "run"
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    given = (recipe, "--deepspeed", "zero2", "--launcher", "env", "--work-dir", run)

    ranks = [start(*given, ranks=0, RANK=rank, LOCAL_RANK=rank, **place) for rank in ("1", "0")]

    texts = [rank.communicate(timeout=900)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], texts
    assert Finished(0, texts[1], run).losses == losses


def test_processes_that_torchrun_starts_join_as_ranks(recipe: Path, losses: list[float], tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "tuner"]
    given = (recipe, "--deepspeed", "zero2", "--launcher", "env", "--work-dir", tmp_path / "run")

    assert ok(finish(start(*given, ranks=0, command=torchrun), tmp_path / "run")).losses == losses


# ssh, to this machine under two names


@pytest.fixture
def ssh(tmp_path: Path) -> Iterator[str]:
    """Return the command that reaches n1 and n2, through a server with keys of its own."""
    folder, port = tmp_path / "ssh", free_port()
    folder.mkdir(mode=0o700)
    for name in ("host", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    (folder / "sshd").write_text(
        f"ListenAddress 127.0.0.1:{port}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/key.pub\n"
        f"PidFile {folder}/pid\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n"
    )
    (folder / "ssh").write_text(
        f"Host n1 n2\nHostName 127.0.0.1\nPort {port}\nUser {getpass.getuser()}\nIdentityFile {folder}/key\n"
        f"IdentitiesOnly yes\nUserKnownHostsFile {folder}/known\nStrictHostKeyChecking accept-new\n"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where sshd of Debian shuts its unprivileged half in
    assert SSHD
    server = subprocess.Popen([SSHD, "-D", "-f", folder / "sshd"], stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: _listens(port), 20)
        yield f"ssh -F {folder}/ssh"
    finally:
        server.terminate()
        server.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def by_ssh(ssh: str, recipe: Path, run: Path, *arguments: object) -> subprocess.Popen[str]:
    hosts = run.parent / "hosts"
    hosts.write_text("n1 slots=1\nn2 slots=1\n")
    where = ("--hostfile", hosts, "--ssh", ssh, "--master-addr", "127.0.0.1", "--master-port", free_port())
    given = [*COMMAND, "train", recipe, "--deepspeed", "zero2", "--work-dir", run, *where, *arguments]
    return subprocess.Popen(
        list(map(str, given)), env=environment(PYTHONPATH=os.environ.get("PYTHONPATH", "")), cwd=run.parent,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


@needs_sshd
def test_the_hosts_of_a_hostfile_learn_what_one_machine_learns(
    ssh: str, recipe: Path, losses: list[float], tmp_path: Path
) -> None:
    run = ok(finish(by_ssh(ssh, recipe, tmp_path / "run"), tmp_path / "run"))

    assert run.losses == losses
    assert run.json("run.json")["num_nodes"] == 2
    assert "n1: Trained 4 steps" in run.text


@needs_sshd
def test_ctrl_c_on_a_hostfile_saves_on_all_hosts_and_a_killed_rank_ends_them(
    ssh: str, recipe: Path, tmp_path: Path
) -> None:
    path, long = tmp_path / "run", ("--set", "train_cfg.max_steps=1000")
    process = by_ssh(ssh, recipe, path, *long)
    wait_until(lambda: written_lines(path / "metrics.jsonl") >= 2)
    process.send_signal(signal.SIGINT)
    stopped = finish(process, path)
    assert stopped.code == 75, stopped.text

    taken = len(stopped.losses)
    process = by_ssh(ssh, recipe, path, *long, "--resume", "auto")
    wait_until(lambda: written_lines(path / "metrics.jsonl") > taken + 1)
    pid = next(int(line.split()[1]) for line in _ranks(path) if line.startswith("1 "))
    os.kill(pid, signal.SIGKILL)
    killed = finish(process, path)
    assert killed.code == 128 + signal.SIGKILL, killed.text


def _ranks(run: Path) -> list[str]:
    from tuner.runs import beats
    from tuner.runs.directory import RunDirectory

    return [f"{rank} {beat.pid}" for rank, beat in beats.here(RunDirectory(run)).items()]
