"""GRPO: TRL's GRPOTrainer on prompts that are prepared already."""

from __future__ import annotations

from trl import GRPOConfig, GRPOTrainer

from tuner.worker.objectives.generated_groups import GreedyReward, GroupRewardsTrainer, GroupRewardsTraining


class Grpo(GroupRewardsTrainer, GreedyReward, GRPOTrainer):  # type: ignore[misc]
    """GRPO. Its completions come from the seeds of `Sampled`."""


class GrpoTraining(GroupRewardsTraining):
    """The rows are prompts."""

    trainer = Grpo
    arguments = GRPOConfig
    of_trl = GRPOTrainer


TRAINING = GrpoTraining()
