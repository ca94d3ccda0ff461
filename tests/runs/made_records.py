"""The smallest run.json and states of checkpoints, for tests that say only what they need of one."""

from __future__ import annotations

import json
from typing import Any

from tuner.runs.beats import Beat
from tuner.runs.records import BatchCounts, CheckpointState, RunRecord

STATE = CheckpointState(world_size=1, deepspeed="none", stage=0, nvme=False, dtype="fp32", optimizer="AdamW")
RECORD = RunRecord(
    launch_id="first",
    world_size=1,
    batch=BatchCounts(micro_batch=1, accumulation=1, ranks=1, global_batch=1),
    state=STATE,
)


def run_json(**changes: Any) -> str:
    """Return a run.json with other values."""
    return json.dumps({**RECORD.to_json(), **changes})


def made_beat(rank: int, pid: int, host: str, count: int, doing: str, at_s: float, save_s: float, **more: Any) -> Beat:
    return Beat(rank=rank, pid=pid, host=host, count=count, doing=doing, at_s=at_s, save_s=save_s, **more)
