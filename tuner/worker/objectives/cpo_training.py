"""CPO: TRL's CPOTrainer on rows that are prepared already."""

from __future__ import annotations

from functools import partial

from trl.experimental.cpo import CPOConfig, CPOTrainer

from tuner.data import batches
from tuner.recipes.schema import RecipeConfig
from tuner.worker.objectives import Collate, Training
from tuner.worker.objectives.judged_rows import PairsTrainer


class Cpo(PairsTrainer, CPOTrainer):  # type: ignore[misc]
    """CPO, and SimPO, one of its losses."""


class CpoTraining(Training):
    """The rows are pairs."""

    trainer = Cpo
    arguments_type = CPOConfig

    def collator(self, config: RecipeConfig, pad_id: int) -> Collate:
        return partial(batches.odds, pad_id=pad_id)


TRAINING = CpoTraining()
