"""Nodes meet before their ranks start, are told what is wrong on another one, and go on when a lost one is back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import hosts as network
from tests.cluster.hosts import Host
from tests.e2e.runs import environment, quick, wait_until
from tests.faults.conftest import ROOT
from tuner.runs import beats
from tuner.runs.directory import RunDirectory

STARTS_S, TRAINS_S = 120, 600
"""Ten times what it takes on a machine that does nothing else."""
GOES_ON = ("--max-restarts", 1, "--set", "max_steps=40", "--set", "checkpoint.interval=2")


class Launch:
    """`tuner train` on hosts, one rank on each; the run directory is in a folder that one may mount otherwise."""

    def __init__(
        self, hosts: list[Host], folder: Path, *arguments: object, nnodes: object = 2, module: str = "tuner"
    ) -> None:
        self.module = module
        self.folder, self.run = folder / "shared", folder / "shared" / "run"
        self.folder.mkdir(parents=True)
        where = ("--nnodes", nnodes, "--nproc-per-node", 1, "--master-addr", hosts[0].address)
        self.words = (
            "train",
            quick(folder, "full"),
            "--work-dir",
            self.run,
            "--deepspeed",
            "zero2",
            *where,
            *arguments,
        )
        self.logs: list[Path] = []
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self.env = environment(PYTHONPATH=path) if module != "tuner" else environment()

    def start(self, host: Host, rank: int, *more: object) -> tuple[subprocess.Popen[str], Path]:
        """Start a node; return its process, and the file with what it says."""
        log = self.folder.parent / f"{len(self.logs)}.txt"
        self.logs.append(log)
        command = host.inside(sys.executable, "-m", self.module, *self.words, "--node-rank", rank, *more)
        with log.open("w") as stream:
            return subprocess.Popen(
                command, env=self.env, stdout=stream, stderr=subprocess.STDOUT, text=True, start_new_session=True
            ), log

    def losses(self) -> list[float]:
        lines = map(json.loads, (self.run / "metrics.jsonl").read_text().splitlines())
        return [line["loss"] for line in lines if "loss" in line]

    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run / "run.json").read_text())
        return found

    def trains(self) -> bool:
        return (self.run / "checkpoints" / "checkpoint-4").is_dir()


def says(log: Path, text: str) -> None:
    wait_until(lambda: text in log.read_text(), STARTS_S)


def test_a_node_that_never_comes_is_named_and_the_start_ends_in_time(hosts: list[Host], tmp_path: Path) -> None:
    launch = Launch(hosts, tmp_path, "--start-timeout", 8)

    node, log = launch.start(hosts[0], 0)

    assert node.wait(STARTS_S) == 124
    assert "node 1 of 2" in log.read_text() and "never seen" in log.read_text()
    assert not launch.run.exists()


def test_nodes_without_a_shared_folder_are_refused_in_seconds(hosts: list[Host], tmp_path: Path) -> None:
    launch = Launch(hosts, tmp_path)
    hosts[1].ask("mount", "-t", "tmpfs", "own", launch.folder)

    nodes = [launch.start(host, rank) for rank, host in enumerate(hosts)]

    assert [node.wait(STARTS_S) for node, _ in nodes] == [2, 2]
    assert all(f"{launch.run}/meeting" in log.read_text() for _, log in nodes)
    assert not launch.run.exists()


def test_a_folder_that_one_node_cannot_write_ends_both_with_its_text(hosts: list[Host], tmp_path: Path) -> None:
    launch = Launch(hosts, tmp_path)
    hosts[0].ask("mount", "--bind", launch.folder, launch.folder)
    hosts[0].ask("mount", "-o", "remount,ro,bind", launch.folder)

    nodes = [launch.start(host, rank) for rank, host in enumerate(hosts)]

    assert [node.wait(STARTS_S) for node, _ in nodes] == [74, 74]
    assert f"node 0 (h0): --work-dir: cannot write to {launch.folder}" in nodes[1][1].read_text()


def test_a_node_that_is_cut_off_is_named_in_seconds_and_the_run_goes_on_when_it_is_back(
    hosts: list[Host], tmp_path: Path
) -> None:
    launch = Launch(hosts, tmp_path, *GOES_ON)
    (first, first_log), (second, second_log) = (launch.start(host, rank) for rank, host in enumerate(hosts))
    wait_until(launch.trains, TRAINS_S)

    hosts[1].cut()
    cut_s = time.monotonic()
    says(first_log, f"node 1 (h1, {hosts[1].address}) is gone")
    assert time.monotonic() - cut_s < 60, "not after hang_timeout, which is half an hour"
    says(second_log, f"node 0 (h0, {hosts[0].address}) is gone")
    says(first_log, "waiting for node 1 of 2")
    hosts[1].join()

    assert [first.wait(TRAINS_S), second.wait(TRAINS_S)] == [0, 0], first_log.read_text() + second_log.read_text()
    # A busy machine may lose it once more while it starts anew.
    assert {ended["cause"] for ended in launch.json()["attempts"]} == {"lost-peer"}
    assert "most recent call first" not in first_log.read_text(), "the stacks of ranks that wait for a lost node"


def test_a_spare_takes_the_address_and_the_lock_of_a_lost_node_0(tmp_path: Path) -> None:
    with network.hosts(3, tmp_path) as hosts:
        launch = Launch(hosts, tmp_path, *GOES_ON)
        (first, _), (second, second_log) = (launch.start(hosts[rank], rank) for rank in (0, 1))
        wait_until(launch.trains, TRAINS_S)

        hosts[0].kill()
        says(second_log, f"node 0 (h0, {hosts[0].address}) is gone")
        says(second_log, "waiting for node 0 of 2")
        hosts[2].ask("ip", "address", "add", f"{hosts[0].address}/24", "dev", "eth0")
        spare, spare_log = launch.start(hosts[2], 0, "--resume", "auto")

        assert [spare.wait(TRAINS_S), second.wait(TRAINS_S)] == [0, 0], spare_log.read_text() + second_log.read_text()
        assert launch.json()["resume_step"] >= 4
        assert first.wait(STARTS_S) != 0


def test_a_run_goes_on_with_fewer_nodes_on_the_same_batch_and_takes_a_node_back_at_the_next_restart(
    tmp_path: Path,
) -> None:
    few = ("--set", "train_dataloader.batch_size=1", "--set", "train_cfg.global_batch_size=4")
    more = ("--max-restarts", 3, "--set", "max_steps=40", "--set", "checkpoint.interval=2", *few)
    with network.hosts(2, tmp_path) as hosts:
        undisturbed = Launch(hosts, tmp_path / "undisturbed", *more)
        nodes = [undisturbed.start(host, rank)[0] for rank, host in enumerate(hosts)]
        assert [node.wait(TRAINS_S) for node in nodes] == [0, 0]
        launch = Launch(hosts, tmp_path / "two", *more, nnodes="1:2", module="tests.cluster.soon")
        (first, first_log), (second, _) = (launch.start(host, rank) for rank, host in enumerate(hosts))
        wait_until(launch.trains, TRAINS_S)

        second.kill()
        second.wait()
        hosts[1].ask("pkill", "-9", "python")
        says(first_log, "goes on without node 1")
        wait_until(lambda: launch.json()["num_nodes"] == 1, STARTS_S)
        fewer = launch.json()
        assert (fewer["batch"]["global_batch"], fewer["batch"]["accumulation"], fewer["world_size"]) == (4, 4, 1)
        run = RunDirectory(launch.run)
        wait_until(lambda: 0 in beats.read_beats(run), STARTS_S)
        rank_0 = beats.read_beats(run)[0].pid
        hosts[0].ask("kill", "-STOP", rank_0)  # a forked rank would be done before a node has started
        back, back_log = launch.start(hosts[1], 1)
        says(back_log, "joins at their next restart")
        hosts[0].ask("kill", "-CONT", rank_0)
        step = fewer["resume_step"] + 4
        wait_until((launch.run / "checkpoints" / f"checkpoint-{step}").is_dir, TRAINS_S)
        hosts[0].ask("kill", "-9", rank_0)

        assert [first.wait(TRAINS_S), back.wait(TRAINS_S)] == [0, 0], first_log.read_text() + back_log.read_text()
    assert launch.json()["num_nodes"] == 2
    assert launch.losses() == pytest.approx(undisturbed.losses(), rel=1e-5)
