"""What ranks of a restart measure of each other before they train."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tuner.errors import MachineError
from tuner.machine.topology import Rank
from tuner.runs.directory import RunDirectory
from tuner.worker import speed, train
from tuner.worker.speed import PARTS, Figures

EQUAL = [Figures(rank, rank // 2, f"node-{rank // 2}", 0.1, 0.01, 0.02) for rank in range(4)]


def compare(monkeypatch: pytest.MonkeyPatch, run: RunDirectory, changed: Figures, rank: int = 0) -> None:
    figures = [changed if figures_of_rank.rank == changed.rank else figures_of_rank for figures_of_rank in EQUAL]
    monkeypatch.setattr(speed, "measured", lambda device, rank, begin: figures)
    guard: Any = SimpleNamespace(rank=SimpleNamespace(rank=rank), limited=lambda *_: nullcontext())
    train._compare_ranks(run, guard, torch.device("cpu"))


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    (tmp_path / "ranks").mkdir()
    return RunDirectory(tmp_path)


def test_a_slow_rank_is_a_warning_of_rank_0_with_its_machine(
    monkeypatch: pytest.MonkeyPatch, run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(4):
        compare(monkeypatch, run, EQUAL[3]._replace(product_s=0.4), rank)

    deadline, line = capsys.readouterr().out.splitlines()
    assert "180 s at most" in deadline
    assert "node-1" in line and "rank 3" in line


def test_a_rank_that_computes_wrong_ends_every_rank_with_its_machines_name(
    monkeypatch: pytest.MonkeyPatch, run: RunDirectory
) -> None:
    for rank in range(4):
        with pytest.raises(MachineError) as caught:
            compare(monkeypatch, run, EQUAL[2]._replace(wrong=PARTS[0]), rank)
        assert caught.value.where == "node-1"


@pytest.mark.parametrize(
    ("rank", "places", "nodes"),
    [
        (Rank(3, 0, 4, supervised=False, ranks_here=1), ["n1", "n1", "n1", "n2"], [[0, 1, 2], [3]]),
        (Rank(1, 0, 4, supervised=False, ranks_here=2), ["n1", "n2", "n1", "n2"], [[0, 2], [1, 3]]),
        (Rank(2, 0, 4, supervised=True, ranks_here=2), [0, 0, 1, 1], [[0, 1], [2, 3]]),
    ],
)
def test_ranks_are_compared_with_those_of_their_node_however_they_are_spread(
    monkeypatch: pytest.MonkeyPatch, rank: Rank, places: list[object], nodes: list[list[int]]
) -> None:
    told: list[object] = []

    def gather(gathered: list[object], own: object) -> None:
        told.append(own)
        gathered[:] = places

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    monkeypatch.setattr(speed.socket, "gethostname", lambda: places[rank.rank])

    assert speed._nodes(rank, 4) == nodes
    assert told == [places[rank.rank]]


def test_only_nodes_of_as_many_ranks_are_compared() -> None:
    three = [Figures(rank, 0, "n1", 0.1, 0.05, 0.1) for rank in range(3)]
    alone = Figures(3, 1, "n2", 0.1, 0.001, 0.1)

    assert list(speed.slow([*three, alone])) == []
    more = [Figures(rank, 2, "n3", 0.1, 0.5, 0.1) for rank in range(4, 7)]
    assert [found.host for found in speed.slow([*three, alone, *more])] == ["n3"]
