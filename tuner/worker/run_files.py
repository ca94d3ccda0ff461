"""The files of the run directory as a rank reads them: recipe, DeepSpeed config, record of the run."""

from __future__ import annotations

from dataclasses import dataclass

from tuner.files import JsonObject
from tuner.recipes.schema import RecipeConfig, resolved_recipe
from tuner.runs.directory import RunDirectory
from tuner.runs.records import RunRecord
from tuner.runs.resume_point import ResumePoint


@dataclass(frozen=True)
class RunFiles:
    """recipe.json (`config`), run.json (`record`), deepspeed.json (`zero`), and the checkpoint to resume from."""

    run_dir: RunDirectory
    config: RecipeConfig
    record: RunRecord
    zero: JsonObject
    resume_point: ResumePoint | None

    @classmethod
    def read(cls, run_dir: RunDirectory) -> RunFiles:
        config = resolved_recipe(run_dir.read_json(run_dir.resolved_recipe), run_dir.resolved_recipe)
        record = run_dir.read_run()
        return cls(run_dir, config, record, run_dir.read_json(run_dir.deepspeed), ResumePoint.of(record))

    @property
    def zero_stage(self) -> int:
        return int(self.zero.get("zero_optimization", {}).get("stage", 0))
