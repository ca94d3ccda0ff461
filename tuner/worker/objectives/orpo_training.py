"""ORPO: TRL's ORPOTrainer on rows that are prepared already."""

from __future__ import annotations

from functools import partial

from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from tuner.data import batches
from tuner.worker.objectives import Training
from tuner.worker.objectives.judged_rows import PairsTrainer


class Orpo(PairsTrainer, ORPOTrainer):  # type: ignore[misc]
    """ORPO."""


TRAINING = Training(Orpo, ORPOConfig, partial(batches.odds, counts_prompt=True))
