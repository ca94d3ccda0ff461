"""Nodes on hosts of their own meet, are told what is wrong on another one, and go on when a lost one is back."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.runs import Finished, environment, finish, quick, wait_until
from tests.launch.namespaces import Host, hosts, needs_root

pytestmark = [pytest.mark.e2e, pytest.mark.long, needs_root]
COMMAND = [sys.executable, "-m", "tuner", "train"]


@pytest.fixture(scope="module")
def both() -> Iterator[list[Host]]:
    with hosts(2) as made:
        yield made


def start(
    hosts: list[Host], rank: int, log: Path, *words: object, mount: str = "true", nodes: int = 2
) -> subprocess.Popen[str]:
    """Start one node on its host; what it prints goes into `log`."""
    host = hosts[rank]
    which = ("--nnodes", nodes, "--node-rank", rank, "--master-addr", hosts[0].address, "--nproc-per-node", 1)
    with log.open("w") as stream:
        return subprocess.Popen(
            host.words([*COMMAND, *map(str, (*words, *which))], mount=mount),
            env=environment(**host.variables),
            stdout=stream,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def ended(process: subprocess.Popen[str], log: Path, work_dir: Path, timeout_s: float) -> Finished:
    finished = finish(process, work_dir, timeout_s)
    return Finished(finished.code, log.read_text(), work_dir)


def test_a_node_that_never_comes_is_named_and_the_start_ends_in_time(both: list[Host], tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "0.txt"

    node = ended(start(both, 0, log, quick(tmp_path, "full"), "--work-dir", run, "--start-timeout", 8), log, run, 120)

    assert node.code == 124
    assert "node 1 of 2" in node.text and "never seen" in node.text
    assert not run.exists()


def test_nodes_without_a_shared_folder_are_refused_in_seconds(both: list[Host], tmp_path: Path) -> None:
    shared, recipe = tmp_path / "shared", quick(tmp_path, "full")
    shared.mkdir()
    logs = [tmp_path / "0.txt", tmp_path / "1.txt"]
    words = (recipe, "--work-dir", shared / "run")

    nodes = [
        start(both, 0, logs[0], *words),
        start(both, 1, logs[1], *words, mount=f"mount -t tmpfs own {shared}"),
    ]

    for process, log in zip(nodes, logs, strict=True):
        node = ended(process, log, shared / "run", 120)
        assert node.code == 2, node.text
        assert f"{shared}/run/meeting" in node.text
    assert not (shared / "run").exists()


def test_a_folder_that_one_node_cannot_write_ends_both_with_its_text(both: list[Host], tmp_path: Path) -> None:
    shared, recipe = tmp_path / "shared", quick(tmp_path, "full")
    shared.mkdir()
    logs = [tmp_path / "0.txt", tmp_path / "1.txt"]
    read_only = f"mount --bind {shared} {shared} && mount -o remount,ro,bind {shared}"
    words = (recipe, "--work-dir", shared / "run")

    nodes = [start(both, 0, logs[0], *words, mount=read_only), start(both, 1, logs[1], *words)]

    texts = [ended(process, log, shared / "run", 120) for process, log in zip(nodes, logs, strict=True)]
    assert [node.code for node in texts] == [74, 74], [node.text for node in texts]
    assert "node 0 (node-0)" in texts[1].text


def test_a_node_that_is_cut_off_is_named_in_seconds_and_the_run_goes_on_when_it_is_back(
    both: list[Host], tmp_path: Path
) -> None:
    run, recipe = tmp_path / "run", quick(tmp_path, "full")
    words = (recipe, "--work-dir", run, "--max-restarts", 1, "--set", "train_cfg.max_steps=40")
    logs = [tmp_path / "0.txt", tmp_path / "1.txt"]
    nodes = [start(both, rank, logs[rank], *words) for rank in (0, 1)]
    try:
        wait_until(lambda: (run / "checkpoints" / "checkpoint-4").is_dir())

        both[1].cut()
        cut_s = time.monotonic()
        wait_until(lambda: "node 1 (node-1, 10.77.0.2) is gone" in logs[0].read_text(), 100)
        assert time.monotonic() - cut_s < 60
        wait_until(lambda: "node 0 (node-0, 10.77.0.1) is gone" in logs[1].read_text(), 100)
        wait_until(lambda: "waiting for node 1 of 2" in logs[0].read_text(), 100)
        both[1].mend()

        nodes[1].wait(600)  # `finish` of one node ends what the other still writes
        finished = ended(nodes[0], logs[0], run, 600)
        assert (finished.code, nodes[1].returncode) == (0, 0), finished.text
        assert len(finished.json("run.json")["attempts"]) == 1
        assert "most recent call first" not in logs[0].read_text(), "the stacks of ranks that wait for a lost node"
    finally:
        both[1].mend()
        for node in nodes:
            if node.poll() is None:
                node.kill()
                node.wait()


def test_a_spare_takes_the_place_of_a_lost_node_0_and_its_lock(both: list[Host], tmp_path: Path) -> None:
    run, recipe = tmp_path / "run", quick(tmp_path, "full")
    words = (recipe, "--work-dir", run, "--max-restarts", 1, "--set", "train_cfg.max_steps=40")
    logs = [tmp_path / f"{name}.txt" for name in ("0", "1", "spare")]
    nodes = [start(both, rank, logs[rank], *words) for rank in (0, 1)]
    try:
        wait_until(lambda: (run / "checkpoints" / "checkpoint-4").is_dir())
        nodes[0].kill()
        wait_until(lambda: "node 0 (node-0, 10.77.0.1) is gone" in logs[1].read_text(), 100)
        wait_until(lambda: "waiting for node 0 of 2" in logs[1].read_text(), 100)

        spare = [replace(both[0], name="spare"), both[1]]
        nodes.append(start(spare, 0, logs[2], *words, "--resume", "auto"))

        nodes[1].wait(600)  # `finish` of one node ends what the other still writes
        finished = ended(nodes[2], logs[2], run, 600)
        assert (finished.code, nodes[1].returncode) == (0, 0), finished.text
        assert finished.json("run.json")["resume_step"] >= 4
    finally:
        for node in nodes:
            if node.poll() is None:
                node.kill()
            node.wait()
