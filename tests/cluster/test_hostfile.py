"""`tuner train --hostfile` over a real ssh between hosts: one is lost, and a spare one takes its place."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.cluster import hosts as network
from tests.cluster.hosts import Host
from tests.cluster.test_meeting import GOES_ON, STARTS_S, TRAINS_S, says
from tests.e2e.runs import environment, quick, wait_until
from tuner.runs import beats
from tuner.runs.directory import RunDirectory

SSHD = shutil.which("sshd", path=f"/usr/sbin:{os.environ.get('PATH', '')}")
pytestmark = pytest.mark.skipif(not (SSHD and shutil.which("ssh")), reason="no sshd and ssh (openssh-server)")


@contextmanager
def reachable(hosts: list[Host], folder: Path) -> Iterator[str]:
    """Serve ssh on each host, with keys of its own; yield the command that reaches them."""
    folder.mkdir(mode=0o700)
    for name in ("host", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    (folder / "sshd").write_text(
        f"Port 2222\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/key.pub\n"
        f"PidFile none\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n"
    )
    (folder / "ssh").write_text(
        f"Host h*\nPort 2222\nUser root\nIdentityFile {folder}/key\n"
        f"IdentitiesOnly yes\nUserKnownHostsFile {folder}/known\nStrictHostKeyChecking accept-new\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)  # where sshd of Debian shuts its unprivileged half in
    with ExitStack() as at_the_end:
        for host in hosts:
            server = subprocess.Popen(host.inside(SSHD, "-D", "-f", folder / "sshd"), stderr=subprocess.DEVNULL)
            at_the_end.callback(server.wait)
            at_the_end.callback(server.kill)
        for host in hosts:
            probe = f"import socket; socket.create_connection(('{host.name}', 2222)).close()"
            command = hosts[0].inside(sys.executable, "-c", probe)
            wait_until(lambda command=command: not subprocess.run(command, capture_output=True).returncode, 20)
        yield f"ssh -F {folder}/ssh"


def start(hosts: list[Host], ssh: str, folder: Path, *arguments: object) -> tuple[subprocess.Popen[str], Path]:
    """Start a run on all hosts from the first one; return its process, and the file with what it says."""
    (folder / "hosts.txt").write_text("".join(f"{host.name} slots=1\n" for host in hosts))
    words = ("--hostfile", folder / "hosts.txt", "--ssh", ssh, "--master-addr", hosts[0].address)
    recipe = (quick(folder, "full"), "--work-dir", folder / "run", "--deepspeed", "zero2")
    log = folder / "log.txt"
    with log.open("w") as stream:
        return subprocess.Popen(
            hosts[0].inside(sys.executable, "-m", "tuner", "train", *recipe, *words, *arguments),
            env=environment(PYTHONPATH=os.environ.get("PYTHONPATH", "")),
            stdout=stream, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        ), log  # fmt: skip


def test_a_spare_host_takes_the_place_of_one_that_dies(tmp_path: Path) -> None:
    with network.hosts(3, tmp_path) as hosts, reachable(hosts, tmp_path / "ssh") as ssh:
        launcher, log = start(hosts, ssh, tmp_path, *GOES_ON, "--spare-nodes", 1)
        wait_until((tmp_path / "run" / "checkpoints" / "checkpoint-4").is_dir, TRAINS_S)

        hosts[1].kill()

        says(log, "node 1 is started again on h2")
        assert launcher.wait(TRAINS_S) == 0, log.read_text()
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["num_nodes"], len(record["attempts"])) == (2, 1)
    assert record["resume_step"] >= 4


def test_a_lost_ssh_connection_ends_nothing_and_a_host_that_is_cut_off_ends_the_run_in_seconds(tmp_path: Path) -> None:
    with network.hosts(2, tmp_path) as hosts, reachable(hosts, tmp_path / "ssh") as ssh:
        launcher, log = start(hosts, ssh, tmp_path, "--set", "max_steps=100000", "--set", "checkpoint.interval=2")
        run = RunDirectory(tmp_path / "run")
        wait_until((run.checkpoints / "checkpoint-4").is_dir, TRAINS_S)

        hosts[1].ask("pkill", "-f", "^sshd.*@notty")
        says(log, "connection to h1 is gone; its ranks still answer")
        step = beats.read_beats(run)[1].step
        wait_until(lambda: beats.read_beats(run)[1].step >= step + 4, TRAINS_S)
        assert launcher.poll() is None, log.read_text()

        hosts[1].cut()
        cut_s = time.monotonic()

        assert launcher.wait(STARTS_S) not in (0, None), log.read_text()
        print(f"ended after {time.monotonic() - cut_s:.0f} s")
        assert time.monotonic() - cut_s < 120, "and not after hang_timeout, or never"
        assert "h1, 10.77.0.2) is gone" in log.read_text()


def test_the_doctor_compares_hosts_over_ssh_and_names_the_one_that_does_not_answer(tmp_path: Path) -> None:
    with network.hosts(2, tmp_path) as hosts, reachable(hosts, tmp_path / "ssh") as ssh:
        (tmp_path / "hosts.txt").write_text("h0 slots=1\nh1 slots=1\n")
        words = ("doctor", "--nodes", "--hostfile", tmp_path / "hosts.txt", "--ssh", ssh)
        command = hosts[0].inside(sys.executable, "-m", "tuner", *words)
        env = environment(PYTHONPATH=os.environ.get("PYTHONPATH", ""))

        both = subprocess.run(command, env=env, capture_output=True, text=True, timeout=STARTS_S)
        hosts[1].cut()
        finished = subprocess.run(command, env=env, capture_output=True, text=True, timeout=STARTS_S)

    assert both.returncode == 0, both.stdout + both.stderr
    assert "ranks: 2, nodes: 2" in both.stdout
    assert finished.returncode != 0
    assert "h1" in finished.stdout + finished.stderr
