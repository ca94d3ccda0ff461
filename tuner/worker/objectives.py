"""TRL's trainer of each objective on prepared rows, with what all of ours do otherwise, and what it takes of TRL.

It sets none up: the arguments that a recipe means are in `trainers`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainingArguments
from trl import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
)
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from tuner.data import batches
from tuner.data.sample import IGNORED
from tuner.worker.batching import TrainsOnEachRowOnce
from tuner.worker.compat import TrainerHooks
from tuner.worker.consensus import TellsLosses
from tuner.worker.evaluation import EvaluatesEachRowOnce
from tuner.worker.loss import MeanOfTokens


class _AsPrepared:
    """Takes rows that `prepare` has made; these trainers have no switch for it, as SFTTrainer has."""

    def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
        return dataset


class WarmsUpFromFirstUpdate:
    """Mixed into a trainer: update u of w in the warm-up, from 1, has u / w of the rate; all later ones are as before.

    transformers gives it (u - 1) / w, so that the first update of every run changes nothing, and a run of one update
    learns nothing at all.
    """

    def create_scheduler(self: Any, num_training_steps: int, optimizer: Any = None) -> LambdaLR:
        if self.lr_scheduler is None:
            made = super().create_scheduler(num_training_steps, optimizer)  # type: ignore[misc]
            num_warmup = self.args.get_warmup_steps(num_training_steps)
            factors = [partial(_factor, course, num_warmup) for course in made.lr_lambdas]
            self.lr_scheduler = LambdaLR(made.optimizer, factors)
        return self.lr_scheduler


def _factor(course: Callable[[int], float], num_warmup: int, num_updates: int) -> float:
    """Return the part of the rate that the update after `num_updates` has."""
    return (num_updates + 1) / num_warmup if num_updates < num_warmup else course(num_updates)


class LeavesOutRouterLoss:
    """Mixed into a trainer: a validation has no loss that balances the experts, which is none on the tokens."""

    aux_loss_enabled = False

    def prediction_step(self, *given: Any, **named: Any) -> Any:
        adds, self.aux_loss_enabled = self.aux_loss_enabled, False
        try:
            return super().prediction_step(*given, **named)  # type: ignore[misc]
        finally:
            self.aux_loss_enabled = adds


class _Shared(
    TrainerHooks,
    WarmsUpFromFirstUpdate,
    TellsLosses,
    TrainsOnEachRowOnce,
    LeavesOutRouterLoss,
    EvaluatesEachRowOnce,
):
    """What the trainers of all objectives do otherwise than TRL's."""


class Sft(_Shared, MeanOfTokens):
    """SFT and pre-training, whose loss is normalised by the step's trained tokens."""

    weighs_rows = False

    @staticmethod
    def stand_in(row: dict[str, Any]) -> dict[str, Any]:
        ids = row["input_ids"][:2]
        return {"input_ids": ids, "labels": [IGNORED] * len(ids), "seq_lengths": [len(ids)]}


class Dpo(_Shared, _AsPrepared, DPOTrainer):  # type: ignore[misc]
    """DPO on prepared rows."""


class Kto(_Shared, _AsPrepared, KTOTrainer):  # type: ignore[misc]
    """KTO on prepared rows."""


class Reward(_Shared, RewardTrainer):  # type: ignore[misc]
    """A reward model on prepared rows."""


class Orpo(_Shared, ORPOTrainer):  # type: ignore[misc]
    """ORPO on prepared rows."""

    def __init__(self, *, train_dataset: Any, eval_dataset: Any, **others: Any) -> None:
        # It tokenizes what its constructor is given, and nothing later.
        nothing = train_dataset.select(())
        super().__init__(train_dataset=nothing, eval_dataset=nothing if eval_dataset else None, **others)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset

    def concatenated_forward(self, model: Any, batch: dict[str, Any]) -> tuple[Any, ...]:
        """Measure the loss of a mixture of experts' router, which TRL adds here without a word."""
        found: tuple[Any, ...] = super().concatenated_forward(model, batch)
        if self.aux_loss_enabled:
            aux_loss = self.accelerator.gather_for_metrics(found[5].detach()).mean().item()
            self.store_metrics({"aux_loss": aux_loss})
        return found


@dataclass(frozen=True)
class Kind:
    """What an objective takes of TRL.

    `settings`: arguments that are not the recipe's to choose. `metrics`: what its trainer reads of whole logits.
    """

    trainer: type[Any]
    arguments: type[TrainingArguments]
    settings: dict[str, Any]
    collate: Callable[..., Any] | None = None
    metrics: tuple[str, ...] = ()


# The rows come tokenized and packed; the collator separates the samples of a row by their position_ids, or pads rows.
SFT = Kind(
    Sft,
    SFTConfig,
    {
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "packing": False,
        "shuffle_dataset": False,
    },
)
KINDS = {
    "sft": SFT,
    "pretrain": SFT,
    "dpo": Kind(Dpo, DPOConfig, {}, batches.pairs, ("entropy", "mean_logits", "is_top1")),
    "orpo": Kind(Orpo, ORPOConfig, {}, batches.odds),
    "kto": Kind(Kto, KTOConfig, {}, batches.feedback, ("entropy", "mean_logits")),
    "reward": Kind(Reward, RewardConfig, {}),
}
