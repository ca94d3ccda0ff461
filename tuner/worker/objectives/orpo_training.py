"""ORPO: TRL's ORPOTrainer on rows that are prepared already."""

from __future__ import annotations

from functools import partial
from typing import Any

from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from tuner.data import batches
from tuner.recipes.schema import RecipeConfig
from tuner.worker.objectives import Collate, Training
from tuner.worker.trainers import TunerTrainer


class Orpo(TunerTrainer, ORPOTrainer):  # type: ignore[misc]
    """ORPO. TRL tokenizes the rows that its constructor gets, and no later ones."""

    def __init__(self, *, train_dataset: Any, eval_dataset: Any, **others: Any) -> None:
        nothing = train_dataset.select(())
        super().__init__(train_dataset=nothing, eval_dataset=nothing if eval_dataset else None, **others)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset

    def concatenated_forward(self, model: Any, batch: dict[str, Any]) -> tuple[Any, ...]:
        """Return TRL's outputs, and log the loss of a mixture of experts' router, which TRL adds without logging it."""
        outputs: tuple[Any, ...] = super().concatenated_forward(model, batch)
        if self.aux_loss_enabled:
            aux_loss = self.accelerator.gather_for_metrics(outputs[5].detach()).mean().item()
            self.store_metrics({"aux_loss": aux_loss})
        return outputs


class OrpoTraining(Training):
    """The rows are pairs."""

    trainer = Orpo
    arguments_type = ORPOConfig

    def collator(self, config: RecipeConfig, pad_id: int) -> Collate:
        return partial(batches.odds, pad_id=pad_id)


TRAINING = OrpoTraining()
