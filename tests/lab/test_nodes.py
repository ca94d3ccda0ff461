"""Nodes that are compared: on this machine, on the CPU; the driver's side is tests/machine/test_health.py."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from tests.e2e.runs import free_port
from tests.machine.gpus import CPU
from tuner.lab import nodes
from tuner.lab.probes import Row
from tuner.machine import health
from tuner.machine.topology import Topology, local
from tuner.worker.speed import PARTS, Figures


def four(*product_s: float, node_reduce_s: tuple[float, float] = (0.01, 0.01)) -> list[Figures]:
    """Return the figures of two nodes with two ranks each."""
    return [
        Figures(rank, rank // 2, f"node-{rank // 2}", seconds, node_reduce_s[rank // 2], 0.02)
        for rank, seconds in enumerate(product_s)
    ]


def warned(rows: list[Row]) -> list[tuple[str, str]]:
    return [(row.name, row.text) for row in rows if row.status == "warning"]


def test_a_slow_rank_is_named_with_its_node() -> None:
    ((name, text),) = warned(list(nodes.compared(four(0.1, 0.1, 0.1, 0.19))))

    assert name == "node-1" and text.startswith("rank 3: ") and "1.9 x" in text


def test_a_node_whose_links_are_slow_is_named() -> None:
    ((name, text),) = warned(list(nodes.compared(four(0.1, 0.1, 0.1, 0.1, node_reduce_s=(0.03, 0.01)))))

    assert name == "node-0" and "3.0 x" in text


def test_equal_nodes_have_one_line_with_the_figures() -> None:
    (row,) = nodes.compared(four(0.1, 0.1, 0.1, 0.1))

    assert row.status == "ok" and "100.00 ms" in row.text and "20.00 ms" in row.text


def test_what_is_wrong_with_this_node_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_of_speed", lambda *args: [])
    monkeypatch.setattr(health, "gpus", lambda uuids: [health.Ailment("GPU 1: ill", "Reset it.", is_fatal=True)])

    (row,) = (row for row in nodes.examine(CPU, local(1), tmp_path, {}) if row.status == "failed")

    assert (row.name, row.text, row.fix) == (socket.gethostname(), "GPU 1: ill", "Reset it.")


def two(node_rank: int, port: int) -> Topology:
    return Topology("local", 2, node_rank, 1, 2, master_addr="127.0.0.1", master_port=port)


@pytest.mark.long  # processes that load torch
def test_two_nodes_meet_and_are_compared(tmp_path: Path) -> None:
    port = free_port()
    rows: dict[int, list[Row]] = {}

    def examine(rank: int) -> None:
        rows[rank] = nodes.examine(CPU, two(rank, port), tmp_path, os.environ)

    threads = [threading.Thread(target=examine, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [row.name for row in rows[0]][-1] == "speed" and "ranks: 2, nodes: 2" in rows[0][-1].text
    assert [row for row in (*rows[0], *rows[1]) if row.status == "failed"] == []


@pytest.mark.long  # processes that load torch
def test_a_node_that_does_not_come_is_named(tmp_path: Path) -> None:
    rows = nodes.examine(CPU, two(0, free_port()), tmp_path, os.environ, wait_s=2.0)

    (row,) = (row for row in rows if row.status == "failed")
    assert row.text.startswith("node 1 did not join")


def test_a_rank_that_computes_wrong_fails_with_its_node_and_what_rests_on_it_is_not_blamed() -> None:
    ranks = [part._replace(wrong=PARTS[2]) for part in four(0.1, 0.1, 0.1, 0.1)]
    ranks[2] = ranks[2]._replace(wrong=PARTS[0])

    (row,) = (row for row in nodes.compared(ranks) if row.status == "failed")

    assert row.name == "node-1" and row.text.startswith("rank 2: a matrix product")
