"""A reward model: TRL's RewardTrainer, which takes tokenized pairs as they are."""

from __future__ import annotations

from trl import RewardConfig, RewardTrainer

from tuner.worker.objectives import Training
from tuner.worker.trainers import TunerTrainer


class Reward(TunerTrainer, RewardTrainer):  # type: ignore[misc]
    """A reward model. TRL takes rows that are tokenized as they are."""


class RewardTraining(Training):
    """The rows are pairs, collated by TRL."""

    trainer = Reward
    arguments_type = RewardConfig


TRAINING = RewardTraining()
