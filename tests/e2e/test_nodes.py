"""Two launchers on one machine stand for two nodes: they meet at one address and train in one run directory."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.e2e.runs import COMMAND, Finished, Started, finish, fork, free_port, ok, quick, start

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def two_nodes(recipe: Path, work_dir: Path, *arguments: object, second: tuple[str, ...] = ()) -> list[Finished]:
    """Train on two nodes and return how each ended; `second` are words before the command of node 1.

    What starts its ranks is no part of what is shown here: a node without such words is forked.
    """
    where = {"NNODES": "2", "ADDR": "127.0.0.1", "PORT": str(free_port())}
    how = ("--work-dir", work_dir, "--deepspeed", "zero2", *arguments)

    nodes: list[Started] = [fork(recipe, *how, ranks=1, NODE_RANK="0", **where)]
    if second:
        nodes.append(start(recipe, *how, ranks=1, command=[*second, *COMMAND], NODE_RANK="1", **where))
    else:
        nodes.append(fork(recipe, *how, ranks=1, NODE_RANK="1", **where))
    try:
        texts = [node.communicate(timeout=900)[0] for node in nodes]
    finally:
        finish(nodes[1], work_dir)
    return [Finished(node.wait(), text, work_dir) for node, text in zip(nodes, texts, strict=True)]


def test_two_nodes_meet_and_train_in_one_run_directory(tmp_path: Path) -> None:
    first, second = two_nodes(quick(tmp_path, "full"), tmp_path / "run")

    assert ok(first).text.count("Trained 4 steps") == 1
    assert second.code == 0, second.text
    assert "Trained" not in second.text
    assert first.json("deepspeed.json")["train_batch_size"] == 2 * 2 * 2
    assert first.json("run.json")["num_nodes"] == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="another file at the same path needs a mount")
def test_nodes_with_other_rows_at_the_same_path_are_refused_before_the_first_step(tmp_path: Path) -> None:
    for name, number in (("rows", 30), ("others", 10)):
        messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps({'messages': messages})}\n" * number)
    mount = f'mount --bind {tmp_path}/others.jsonl {tmp_path}/rows.jsonl && exec "$@"'

    nodes = two_nodes(
        quick(tmp_path, "full"),
        tmp_path / "run",
        *("--data", tmp_path / "rows.jsonl"),
        second=("unshare", "--mount", "sh", "-c", mount, "sh"),
    )

    for node in nodes:
        assert node.code == 3, node.text
        assert "the nodes differ: the training data: " in node.text
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not nodes[0].losses
