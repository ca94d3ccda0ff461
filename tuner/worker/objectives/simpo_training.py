"""SimPO: a loss of TRL's CPOTrainer."""

from __future__ import annotations

from trl.experimental.cpo import CPOConfig

from tuner.data import batches
from tuner.worker.objectives import Training
from tuner.worker.objectives.cpo_training import Cpo

TRAINING = Training(Cpo, CPOConfig, batches.odds, loss_type="simpo")
