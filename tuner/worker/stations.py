"""What the stations of a rank's training share: the files of the run, and the process of the rank. Both are read-only.

`rank_data.RankRows` are the rows, `train.PreparedRank` and `train.BuiltRank` what two stations give to the next one.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tuner.files import JsonObject
from tuner.machine.topology import Rank
from tuner.recipes.schema import RecipeConfig, resolved_recipe
from tuner.runs.directory import RunDirectory
from tuner.runs.records import RunRecord
from tuner.runs.resume_point import ResumePoint
from tuner.worker.guard import Guard

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RunFiles:
    """What the files of the run directory say.

    Attributes:
        config: recipe.json.
        record: run.json.
        zero: deepspeed.json.
        point: The checkpoint that the run resumes from.
    """

    run_dir: RunDirectory
    config: RecipeConfig
    record: RunRecord
    zero: JsonObject
    point: ResumePoint | None

    @classmethod
    def read(cls, run_dir: RunDirectory) -> RunFiles:
        """Read the files of a run directory."""
        config = resolved_recipe(run_dir.read_json(run_dir.resolved_recipe), run_dir.resolved_recipe)
        record = run_dir.read_run()
        return cls(run_dir, config, record, run_dir.read_json(run_dir.deepspeed), ResumePoint.of(record))

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage of deepspeed.json."""
        return int(self.zero.get("zero_optimization", {}).get("stage", 0))


@dataclass(frozen=True)
class RankProcess:
    """The process of a rank, which has joined the others.

    Attributes:
        guard: Decides how it ends.
        device: Where it computes.
        at_the_end: Holds what is to be closed when training ends.
        started_s: When training began, by `time.monotonic`.
    """

    rank: Rank
    guard: Guard
    device: torch.device
    at_the_end: contextlib.ExitStack
    started_s: float
