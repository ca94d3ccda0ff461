"""What is swapped to a disk trains as what is offloaded to memory does, and leaves nothing on the disk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import quick, train
from tuner.machine import hardware


def config(path: Path, **device: Any) -> Path:
    offload = {**device, "pin_memory": False}
    zero = {"stage": 3, "offload_optimizer": offload, "offload_param": offload}
    path.write_text(json.dumps({"zero_optimization": zero}))
    return path


@pytest.mark.timeout(1800)
@pytest.mark.long  # three ops are compiled where no earlier run has, which takes minutes
@pytest.mark.skipif(not hardware.has_libaio(os.environ), reason="libaio's header is not here (libaio-dev)")
def test_a_disk_gives_the_losses_of_memory_and_is_empty_afterwards(tmp_path: Path) -> None:
    recipe, swap = quick(tmp_path, "full"), tmp_path / "swap"
    to_disk = config(tmp_path / "disk.json", device="nvme", nvme_path=str(swap))
    to_memory = config(tmp_path / "memory.json", device="cpu")

    whole = train(recipe, tmp_path / "whole", "--deepspeed", to_disk)
    memory = train(recipe, tmp_path / "memory", "--deepspeed", to_memory)
    again = ("--deepspeed", to_disk, "--resume", tmp_path / "whole" / "checkpoints" / "checkpoint-2")
    resumed = train(recipe, tmp_path / "resumed", *again)

    codes = (whole.code, memory.code, resumed.code)
    assert codes == (0, 0, 0), whole.text + memory.text + resumed.text
    assert "GB/s of writes" in whole.text
    assert whole.losses == pytest.approx(memory.losses, abs=1e-6)
    assert resumed.losses == pytest.approx(whole.losses[2:], rel=1e-6)
    assert list(swap.iterdir()) == []
