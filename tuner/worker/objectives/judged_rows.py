"""How TRL's trainers of judged answers take rows that are prepared already. Seen with TRL 1.16."""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from tuner.worker.trainers import TunerTrainer


class JudgedRowsTrainer(TunerTrainer):
    """Mixed into TRL's DPO and KTO, which have no switch for rows that are prepared already, as SFT has."""

    def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
        return dataset

    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        """Measure rows as they are; TRL would let the reference model judge them again, which is no longer there."""
        metrics: dict[str, float] = Trainer.evaluate(self, *args, **options)
        return metrics


class PairsTrainer(TunerTrainer):
    """Mixed into TRL's ORPO and CPO, which tokenize the rows that their constructor gets, and no later ones."""

    def __init__(self, *, train_dataset: Any, eval_dataset: Any, **others: Any) -> None:
        nothing = train_dataset.select(())
        super().__init__(train_dataset=nothing, eval_dataset=nothing if eval_dataset else None, **others)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset

    def concatenated_forward(self, model: Any, batch: dict[str, Any]) -> tuple[Any, ...]:
        """Return TRL's outputs, and log the loss of a mixture of experts' router, which TRL adds without logging it.

        The likelihood of the chosen samples is a mean over the tokens of a micro-batch in TRL, and of a step here: the
        split of a step changes nothing.
        """
        outputs: tuple[Any, ...] = super().concatenated_forward(model, batch)
        if self.rows_of_batch and self.trained_of_batch is not None and self.items_of_step is not None:
            # The losses of micro-batches are weighed by their rows.
            share = self.trained_of_batch * self.rows_of_step / (self.rows_of_batch * self.items_of_step)
            outputs = (*outputs[:4], outputs[4] * share, *outputs[5:])
        if self.aux_loss_enabled:
            aux_loss = self.accelerator.gather_for_metrics(outputs[5].detach()).mean().item()
            self.store_metrics({"aux_loss": aux_loss})
        return outputs
