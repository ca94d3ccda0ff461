"""The ranks that were started, against those that the run was planned for."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest

from tests.launch.plans import written_run
from tuner.errors import UsageError
from tuner.machine.topology import Rank
from tuner.worker.guard import Guard
from tuner.worker.train import prepare_rank


@pytest.mark.parametrize("started", [3, 5])
def test_ranks_that_are_fewer_or_more_than_the_planned_ones_are_refused(tmp_path: Path, started: int) -> None:
    several: dict[str, Any] = {"nnodes": 2, "node_rank": 0, "nproc_per_node": 2, "master_addr": "n1"}
    run = written_run(tmp_path / "run", flags=several)

    with contextlib.ExitStack() as at_the_end, pytest.raises(UsageError) as caught:
        prepare_rank(run, Rank(0, 0, started, supervised=True), cast(Guard, Mock(Guard)), at_the_end)

    assert f"{started} ranks" in caught.value.what and caught.value.where == "--nproc-per-node"
