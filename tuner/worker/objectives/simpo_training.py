"""SimPO: a loss of TRL's CPOTrainer."""

from __future__ import annotations

from typing import ClassVar

from tuner.worker.objectives.cpo_training import CpoTraining


class SimpoTraining(CpoTraining):
    """The rows are pairs."""

    fixed_arguments: ClassVar = {**CpoTraining.fixed_arguments, "loss_type": "simpo"}


TRAINING = SimpoTraining()
