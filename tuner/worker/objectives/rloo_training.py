"""RLOO: TRL's RLOOTrainer on prompts that are prepared already."""

from __future__ import annotations

from trl import RLOOConfig, RLOOTrainer

from tuner.worker.objectives.generated_groups import GreedyReward, GroupRewardsTrainer, GroupRewardsTraining


class Rloo(GroupRewardsTrainer, GreedyReward, RLOOTrainer):  # type: ignore[misc]
    """RLOO. Its completions come from the seeds of `Sampled`."""


TRAINING = GroupRewardsTraining(Rloo, RLOOConfig)
