"""KTO: TRL's KTOTrainer on rows that are prepared already."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import datasets
from torch import Tensor
from trl import KTOConfig, KTOTrainer

from tuner.data import batches
from tuner.recipes.schema import RecipeConfig
from tuner.worker.objectives import Collate, Training
from tuner.worker.objectives.judged_rows import JudgedRowsTrainer


class Kto(JudgedRowsTrainer, KTOTrainer):  # type: ignore[misc]
    """KTO on rows that are prepared already."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any) -> Any:
        if "ref_KL_logps" in inputs:
            inputs = {**inputs, "ref_KL_logps": inputs["ref_KL_logps"] * self._weight_of_kl()}
        return super()._compute_loss(model, inputs, *args)

    def _compute_kl_logps(self, *args: Any) -> Tensor | None:
        log_probs: Tensor | None = super()._compute_kl_logps(*args)
        return None if log_probs is None else log_probs * self._weight_of_kl()

    def _weight_of_kl(self) -> float:
        """Return this rank's rows in units of the mean of the ranks that have some.

        TRL takes the mean of the ranks' means as the distance to the reference; so it is the mean over rows.
        """
        if self.rows_of_ranks is None or not self.rows_of_ranks.any():
            return 1.0
        assert self.rows_of_batch is not None
        return float(self.rows_of_batch * (self.rows_of_ranks > 0).sum() / self.rows_of_ranks.sum())


class KtoTraining(Training):
    """The rows are judged answers."""

    logit_metrics: ClassVar[tuple[str, ...]] = ("entropy", "mean_logits")

    def collator(self, config: RecipeConfig, pad_id: int) -> Collate:
        compares = config.objective.least_batch_size > 1  # answers of two rows, to estimate the distance
        max_length = config.train_dataloader.dataset.max_length if compares else None
        return partial(batches.feedback, pad_id=pad_id, max_length=max_length)

    def judged_before(self, config: RecipeConfig, rows: datasets.Dataset, micro_batch: int) -> datasets.Dataset:
        if config.objective.least_batch_size == 1:
            return rows
        return rows.map(batches.with_others, batched=True, batch_size=micro_batch, keep_in_memory=True)

    def ordered(self, config: RecipeConfig, rows: datasets.Dataset) -> datasets.Dataset:
        """Shuffle the rows once: the trainer takes them in their order, so that batches stay the same in all epochs."""
        return rows.shuffle(seed=config.randomness.seed, keep_in_memory=True)


TRAINING = KtoTraining(Kto, KTOConfig)
