"""Two launchers on one machine stand for two nodes: they meet at one address and train in one run directory."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.e2e.runs import Finished, finish, ok, quick, start

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def test_two_nodes_meet_and_train_in_one_run_directory(tmp_path: Path) -> None:
    recipe, work_dir = quick(tmp_path, "full"), tmp_path / "run"
    with socket.socket() as probe:  # both nodes must know the port beforehand, so it cannot be the rendezvous' choice
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    where = {"NNODES": "2", "ADDR": "127.0.0.1", "PORT": port}

    nodes = [
        start(recipe, "--work-dir", work_dir, "--deepspeed", "zero2", ranks=1, NODE_RANK=rank, **where)
        for rank in ("1", "0")
    ]
    try:
        texts = [node.communicate(timeout=900)[0] for node in nodes]
    finally:
        finish(nodes[0], work_dir)
    second, first = (Finished(node.returncode, text, work_dir) for node, text in zip(nodes, texts, strict=True))

    assert ok(first).text.count("Trained 4 steps") == 1
    assert second.code == 0, second.text
    assert "Trained" not in second.text
    assert first.json("deepspeed.json")["train_batch_size"] == 2 * 2 * 2
    assert first.json("run.json")["num_nodes"] == 2
