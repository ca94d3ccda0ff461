"""DPO: TRL's DPOTrainer on rows that are prepared already."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any, ClassVar

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from trl import DPOConfig, DPOTrainer

from tuner.data import batches
from tuner.machine.libraries import replaced
from tuner.recipes.schema import RecipeConfig
from tuner.recipes.schema.objectives.dpo import CONSERVATIVE
from tuner.recipes.schema.objectives.dpo import Dpo as DpoBlock
from tuner.worker.objectives import Training
from tuner.worker.objectives.judged_rows import JudgedRowsTrainer


class Smoothed(TorchFunctionMode):  # type: ignore[misc]
    """Inside, log sigmoid(x) is (1 - e) log sigmoid(x) + e log sigmoid(-x): conservative DPO's loss with smoothing e.

    Mitchell, A note on DPO with noisy preferences and relationship to IPO, 2023. log sigmoid(-x) = log sigmoid(x) - x.
    """

    def __init__(self, smoothing: float) -> None:
        super().__init__()
        self.smoothing = smoothing

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result - self.smoothing * args[0] if function is F.logsigmoid else result


class Losses(list[str]):
    """The losses in TRL's order. While TRL computes one that it does not smooth itself, `Smoothed` is in effect."""

    def __init__(self, names: Iterable[str], smoothing: float) -> None:
        super().__init__(names)
        self.smoothing = smoothing

    def __iter__(self) -> Iterator[str]:
        for name in super().__iter__():
            with Smoothed(self.smoothing) if self.smoothing and name in CONSERVATIVE else nullcontext():
                yield name


class Dpo(JudgedRowsTrainer, DPOTrainer):  # type: ignore[misc]
    """DPO, where label_smoothing counts for the losses 'sigmoid' and 'sigmoid_norm' too."""

    loss_types: list[str]
    """TRL's."""

    def _compute_loss(self, *args: Any, **options: Any) -> Any:
        with replaced(self, loss_types=Losses(self.loss_types, self.label_smoothing)):
            return super()._compute_loss(*args, **options)


class DpoTraining(Training):
    """The rows are pairs; log-probabilities of the reference may be columns of theirs."""

    logit_metrics: ClassVar[tuple[str, ...]] = ("entropy", "mean_logits", "is_top1")

    def whole_logit_metrics(self, built: Any, config: RecipeConfig) -> tuple[str, ...]:
        assert isinstance(config.objective, DpoBlock)
        return (*self.logit_metrics, *(("log_sum_sq_probs",) if config.objective.use_weighting else ()))


TRAINING = DpoTraining(Dpo, DPOConfig, batches.pairs)
