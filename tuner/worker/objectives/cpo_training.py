"""CPO: TRL's CPOTrainer on rows that are prepared already."""

from __future__ import annotations

from trl.experimental.cpo import CPOConfig, CPOTrainer

from tuner.data import batches
from tuner.worker.objectives import Training
from tuner.worker.objectives.judged_rows import PairsTrainer


class Cpo(PairsTrainer, CPOTrainer):  # type: ignore[misc]
    """CPO, and SimPO, one of its losses."""


TRAINING = Training(Cpo, CPOConfig, batches.odds)
