"""What rank 0 writes into metrics.jsonl."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from tuner.runs import metrics
from tuner.runs.directory import RunDirectory
from tuner.worker.progress import MetricsCallback


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_learning_rate_is_that_of_the_step_and_not_of_the_next_one(tmp_path: Path) -> None:
    run, state = RunDirectory(tmp_path), SimpleNamespace(global_step=0, max_steps=3, num_input_tokens_seen=0)
    logged = MetricsCallback(run, {"world_size": 1}, None)
    optimizer = SimpleNamespace(param_groups=[{"lr": 2e-4}])
    logged.on_train_begin(None, state, None)

    logged.on_step_begin(None, state, None, optimizer=optimizer)
    optimizer.param_groups[0]["lr"] = state.global_step = 1  # the update, and the scheduler with it
    logged.on_log(None, state, None, {"loss": 2.5, "learning_rate": 1.0})

    assert metrics.latest(run)["learning_rate"] == 2e-4
