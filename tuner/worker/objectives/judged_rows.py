"""How TRL's trainers with a reference model (DPO, KTO) take rows that are prepared already. Seen with TRL 1.16."""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from tuner.worker.trainers import TunerTrainer


class JudgedRowsTrainer(TunerTrainer):
    """Mixed into a trainer of TRL that has no switch for rows that are prepared already, as it has in SFT."""

    def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
        return dataset

    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        """Measure rows as they are; TRL would let the reference model judge them again, which is no longer there."""
        metrics: dict[str, float] = Trainer.evaluate(self, *args, **options)
        return metrics
