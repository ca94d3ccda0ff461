"""GMPO: TRL's GMPOTrainer on prompts that are prepared already."""

from __future__ import annotations

from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from tuner.worker.objectives.generated_groups import GreedyReward, GroupRewardsTrainer
from tuner.worker.objectives.grpo_training import GrpoTraining
from tuner.worker.objectives.tool_turns import ToolTurns


class Gmpo(ToolTurns, GroupRewardsTrainer, GreedyReward, GMPOTrainer):  # type: ignore[misc]
    """GMPO. Its completions come from the seeds of `Sampled`."""


TRAINING = GrpoTraining(Gmpo, GMPOConfig)
