"""SimPO: TRL's CPOTrainer on rows that are prepared already."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from trl.experimental.cpo import CPOConfig, CPOTrainer

from tuner.data import batches
from tuner.recipes.schema import RecipeConfig
from tuner.worker.objectives import Collate, Training
from tuner.worker.objectives.judged_rows import PairsTrainer


class Simpo(PairsTrainer, CPOTrainer):  # type: ignore[misc]
    """SimPO, a loss of TRL's CPO."""


class SimpoTraining(Training):
    """The rows are pairs. CPO's own likelihood term is no part of SimPO."""

    trainer = Simpo
    arguments_type = CPOConfig
    fixed_arguments: ClassVar = {**Training.fixed_arguments, "loss_type": "simpo", "cpo_alpha": 0.0}

    def collator(self, config: RecipeConfig, pad_id: int) -> Collate:
        return partial(batches.odds, pad_id=pad_id)


TRAINING = SimpoTraining()
