"""KTO: TRL's KTOTrainer on rows that are prepared already."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from trl import KTOConfig, KTOTrainer

from tuner.data import batches
from tuner.recipes.schema import RecipeConfig
from tuner.worker.objectives import Collate, Training
from tuner.worker.trainers import TunerTrainer

if TYPE_CHECKING:
    import datasets


class Kto(TunerTrainer, KTOTrainer):  # type: ignore[misc]
    """KTO. TRL has no switch for rows that are prepared already, as it has in SFT."""

    def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
        return dataset


class KtoTraining(Training):
    """The rows are judged answers."""

    trainer = Kto
    arguments = KTOConfig
    logit_metrics = ("entropy", "mean_logits")

    def collator(self, config: RecipeConfig, pad_id: int) -> Collate:
        compares = config.objective.least_batch_size > 1  # answers of two rows, to estimate the distance
        max_length = config.train_dataloader.dataset.max_length if compares else None
        return partial(batches.feedback, pad_id=pad_id, max_length=max_length)

    def ordered(self, config: RecipeConfig, rows: datasets.Dataset) -> datasets.Dataset:
        """Shuffle the rows once: the trainer takes them in their order, so that batches stay the same in all epochs."""
        return rows.shuffle(seed=config.randomness.seed, keep_in_memory=True)


TRAINING = KtoTraining()
