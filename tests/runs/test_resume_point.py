"""Which states move from a disk to memory and back; all else that may hinder them: tests/launch/test_resuming.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.refused import refused
from tuner.runs.checkpoints import Checkpoint
from tuner.runs.records import CheckpointState, LoadAs, ManifestFacts
from tuner.runs.resume_point import IncompatibleStates, resume_from

STATE = CheckpointState(world_size=2, stage=3, deepspeed="my.json", dtype="bf16", optimizer="AdamW", nvme=True)


def _resumed(run: dict[str, Any], *, weights: bool = False) -> LoadAs:
    saved = Checkpoint(Path("checkpoint-2"), 2, ManifestFacts(step=2, state=STATE))
    point, _ = resume_from(saved, STATE.model_copy(update=run), weights=weights)
    assert point is not None
    return point.load_as


def test_states_on_a_disk_resume_on_a_disk() -> None:
    assert _resumed({}) is LoadAs.SAVED


@pytest.mark.parametrize("run", [{"nvme": False}, {"world_size": 4}, {"dtype": "fp32"}])
@pytest.mark.parametrize("weights", [False, True])
def test_states_on_a_disk_move_nowhere_else_and_neither_do_their_weights(run: dict[str, Any], weights: bool) -> None:
    with pytest.raises(IncompatibleStates) as caught:
        _resumed(run, weights=weights)
    assert "--resume-weights" not in str(caught.value)


def test_weights_on_a_disk_beside_an_optimizer_in_memory_are_not_resumed() -> None:
    with refused(IncompatibleStates, "--resume"):
        _resumed({"nvme_weights_alone": True})


@pytest.mark.parametrize("run", [{"tensor_parallel": 1}, {"tensor_parallel": 4, "world_size": 4}, {"world_size": 4}])
@pytest.mark.parametrize("weights", [False, True])
def test_parts_of_split_layers_are_loaded_by_as_many_ranks_that_split_them_alone(
    run: dict[str, Any], weights: bool
) -> None:
    split = {"nvme": False, "stage": 1, "tensor_parallel": 2}
    saved = Checkpoint(Path("checkpoint-2"), 2, ManifestFacts(step=2, state=STATE.model_copy(update=split)))

    assert resume_from(saved, STATE.model_copy(update=split), weights=weights)[0].load_as is LoadAs.SAVED
    with pytest.raises(IncompatibleStates) as caught:
        resume_from(saved, STATE.model_copy(update={**split, **run}), weights=weights)
    assert "--resume-weights" not in str(caught.value)
