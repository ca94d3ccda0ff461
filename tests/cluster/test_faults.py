"""Faults of two hosts that train one recipe: how each ends, how soon, and with which code.

The ranks are started by `tuner train --nnodes 2` on each host. Other launchers: tests/slurm, tests/lab.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.cluster.hosts import Host
from tests.e2e.runs import Finished, quick, wait_until, written_lines
from tests.faults.conftest import FAULTY, ROOT
from tuner.runs import checkpoints
from tuner.runs.directory import RunDirectory

LIMIT_S = 6
"""Of a run that stands still. A step of the tiny model takes a fifth of a second."""
ENDS_S = 90
"""Ten times what it takes on a machine that does nothing else, and far from half an hour."""
SHORT = ("--set", "max_steps=6")
ENDLESS = ("--set", "max_steps=100000", "--set", "checkpoint.interval=2", "--set", f"hang_timeout={LIMIT_S}")


class Nodes:
    """`tuner train` on all hosts; each host is a node with one rank."""

    def __init__(self, hosts: list[Host], folder: Path, *arguments: object) -> None:
        self.hosts, self.run = hosts, RunDirectory(folder / "run")
        where = ("--nnodes", len(hosts), "--nproc-per-node", 1, "--master-addr", hosts[0].name)
        recipe = quick(folder, "full")
        self.words = ["train", recipe, "--work-dir", self.run.path, "--deepspeed", "zero2", *where, *arguments]
        self.started: dict[int, subprocess.Popen[str]] = {}

    def start(self, node: int, **env: str) -> None:
        path = os.pathsep.join(filter(None, (env.pop("PYTHONPATH", None), str(ROOT), os.environ.get("PYTHONPATH"))))
        command = FAULTY if "TUNER_FAULT" in env else [sys.executable, "-m", "tuner"]
        words = (*command, *self.words, "--node-rank", node)
        self.started[node] = self.hosts[node].start(*words, PYTHONPATH=path, **env)

    def start_all(self, **env: str) -> None:
        for node in range(len(self.hosts)):
            self.start(node, **env)

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: written_lines(self.run.metrics) >= step or self.has_ended, timeout_s=120)
        assert not self.has_ended, self.ended()

    @property
    def has_ended(self) -> bool:
        return any(process.poll() is not None for process in self.started.values())

    def ended(self, timeout_s: float = ENDS_S) -> list[Finished]:
        """Wait for the end of all nodes, and return how each ended."""
        deadline = time.monotonic() + timeout_s
        finished = []
        for _, process in sorted(self.started.items()):
            text, _ = process.communicate(timeout=max(deadline - time.monotonic(), 1))
            finished.append(Finished(process.returncode, text, self.run.path))
        return finished

    @property
    def losses(self) -> dict[int, float]:
        lines = map(json.loads, self.run.metrics.read_text().splitlines())
        return {line["step"]: line["loss"] for line in lines if "loss" in line}


def test_a_killed_rank_ends_both_nodes_and_the_run_resumes_with_the_same_losses(
    hosts: list[Host], tmp_path: Path, undisturbed: Finished
) -> None:
    nodes = Nodes(hosts, tmp_path, *SHORT)
    nodes.start_all(TUNER_FAULT="kill@1:4")

    first, second = nodes.ended()
    assert 137 in (first.code, second.code) and 0 not in (first.code, second.code), first.text + second.text
    nodes.words += ["--resume", "auto"]
    nodes.start_all()
    ended = nodes.ended()

    assert [node.code for node in ended] == [0, 0], ended
    assert list(nodes.losses.values()) == undisturbed.losses


def test_a_node_that_dies_ends_the_other_one_by_its_time_limit(hosts: list[Host], tmp_path: Path) -> None:
    nodes = Nodes(hosts, tmp_path, *ENDLESS)
    nodes.start_all()
    nodes.wait_for_step(3)

    hosts[1].kill()
    first, second = nodes.ended()

    assert first.code not in (0, None), first.text
    assert second.code != 0
    assert nodes.run.read_status().state == "failed"
    newest, passed = checkpoints.newest_valid(nodes.run.checkpoints)
    assert newest and not passed


def test_a_cut_network_ends_both_nodes_by_their_time_limit(hosts: list[Host], tmp_path: Path) -> None:
    nodes = Nodes(hosts, tmp_path, *ENDLESS)
    nodes.start_all()
    nodes.wait_for_step(3)

    hosts[1].cut()
    ended = nodes.ended()

    assert [node.code for node in ended if node.code == 0] == [], ended
    assert nodes.run.read_status().state == "failed"
    newest, passed = checkpoints.newest_valid(nodes.run.checkpoints)
    assert newest and not passed


def test_a_node_that_starts_late_is_waited_for(hosts: list[Host], tmp_path: Path) -> None:
    nodes = Nodes(hosts, tmp_path, "--set", "max_steps=2")
    nodes.start(0)
    time.sleep(4)
    assert not nodes.has_ended, "there is nothing to wait for: it is late"

    nodes.start(1)

    ended = nodes.ended()
    assert [node.code for node in ended] == [0, 0], ended


def test_another_file_at_the_path_of_the_data_is_refused_on_both_nodes(hosts: list[Host], tmp_path: Path) -> None:
    for name, number in (("rows", 30), ("others", 10)):
        messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps({'messages': messages})}\n" * number)
    hosts[1].replace(tmp_path / "rows.jsonl", tmp_path / "others.jsonl")
    nodes = Nodes(hosts, tmp_path, "--data", tmp_path / "rows.jsonl")

    nodes.start_all()
    ended = nodes.ended()

    assert [node.code for node in ended] == [3, 3], ended
    assert "h1" in ended[0].text
    assert not nodes.run.metrics.exists() or not nodes.losses


def test_a_folder_that_is_slow_on_one_node_is_waited_for(hosts: list[Host], tmp_path: Path) -> None:
    (tmp_path / "slow").mkdir()
    slow = "import os, time\nreal = os.fsync\nos.fsync = lambda file: (time.sleep(0.3), real(file))[1]\n"
    (tmp_path / "slow" / "sitecustomize.py").write_text(slow)
    nodes = Nodes(hosts, tmp_path, "--set", "max_steps=2")
    nodes.start(0)

    nodes.start(1, PYTHONPATH=str(tmp_path / "slow"))

    ended = nodes.ended()
    assert [node.code for node in ended] == [0, 0], ended
    assert checkpoints.inspect(nodes.run.checkpoints / "checkpoint-2") is None
