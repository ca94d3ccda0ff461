"""DPO: TRL's DPOTrainer on rows that are prepared already."""

from __future__ import annotations

from functools import partial
from typing import Any

from trl import DPOConfig, DPOTrainer

from tuner.data import batches
from tuner.recipes.schema import RecipeConfig
from tuner.recipes.schema.objectives.dpo import Dpo as DpoBlock
from tuner.worker.objectives import Collate, Training
from tuner.worker.trainers import TunerTrainer


class Dpo(TunerTrainer, DPOTrainer):  # type: ignore[misc]
    """DPO. TRL has no switch for rows that are prepared already, as it has in SFT."""

    def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
        return dataset


class DpoTraining(Training):
    """The rows are pairs; log-probabilities of the reference may be columns of theirs."""

    trainer = Dpo
    arguments = DPOConfig
    logit_metrics = ("entropy", "mean_logits", "is_top1")

    def collator(self, config: RecipeConfig, pad_id: int) -> Collate:
        return partial(batches.pairs, pad_id=pad_id)

    def whole_logit_metrics(self, built: Any, config: RecipeConfig) -> tuple[str, ...]:
        assert isinstance(config.objective, DpoBlock)
        return (*self.logit_metrics, *(("log_sum_sq_probs",) if config.objective.use_weighting else ()))


TRAINING = DpoTraining()
