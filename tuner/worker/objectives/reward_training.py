"""A reward model: TRL's RewardTrainer, which takes tokenized pairs as they are, and collates them."""

from __future__ import annotations

from trl import RewardConfig, RewardTrainer

from tuner.worker.objectives import Training
from tuner.worker.trainers import TunerTrainer


class Reward(TunerTrainer, RewardTrainer):  # type: ignore[misc]
    """A reward model."""


TRAINING = Training(Reward, RewardConfig)
