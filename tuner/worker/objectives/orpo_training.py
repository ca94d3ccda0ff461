"""ORPO: TRL's ORPOTrainer on rows that are prepared already."""

from __future__ import annotations

from functools import partial

from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from tuner.data import batches
from tuner.recipes.schema import RecipeConfig
from tuner.worker.objectives import Collate, Training
from tuner.worker.objectives.judged_rows import PairsTrainer


class Orpo(PairsTrainer, ORPOTrainer):  # type: ignore[misc]
    """ORPO."""


class OrpoTraining(Training):
    """The rows are pairs."""

    trainer = Orpo
    arguments_type = ORPOConfig

    def collator(self, config: RecipeConfig, pad_id: int) -> Collate:
        return partial(batches.odds, pad_id=pad_id, counts_prompt=True)


TRAINING = OrpoTraining()
