"""Distillation: TRL's DistillationTrainer on prompts that are prepared already. Seen with TRL 1.16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trl import DistillationConfig, DistillationTrainer

from tuner import vocabulary
from tuner.worker import compat
from tuner.worker.objectives.completions import GeneratingTrainer, GeneratingTraining
from tuner.worker.trainer_types import MixedIn


class GreedyDivergence(MixedIn):
    """Mixed in between `GeneratingTrainer` and TRL's trainer: a validation counts the tokens that it measures."""

    num_tokens_measured = 0
    """The tokens of the last batch of a validation."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self.log_completions = self.model.training  # TRL keeps the texts then; at a log it would print them
        try:
            output = super()._generate_and_score_completions(inputs)
        finally:
            self.log_completions = False
        if not self.model.training:
            self.num_tokens_measured = int(output["completion_mask"].sum())
        return output

    def prediction_step(self, *args: Any, **options: Any) -> Any:
        """Return the mean divergence of the tokens of greedy completions; of TRL's metrics the mean over tokens."""
        prediction = super().prediction_step(*args, **options)
        metrics = compat.eval_metrics(self)
        for name in [name for name in metrics if name != "entropy"]:
            del metrics[name]
        return prediction


class Distill(GeneratingTrainer, GreedyDivergence, DistillationTrainer):  # type: ignore[misc]
    """Distillation. Its completions come from the seeds of `Sampled`, and the teacher is loaded already."""

    def __init__(self, *, model: Any, ref_model: Any, **others: Any) -> None:
        """Make TRL's trainer.

        Raises:
            ModelError: the teacher has another vocabulary than the model.
        """
        ours, theirs = (each_model.config.get_text_config().vocab_size for each_model in (model, ref_model))
        if ours != theirs:
            raise vocabulary.other_size(ours, theirs, ref_model.name_or_path)
        super().__init__(model=model, teacher_model=ref_model, **others)

    def loss_of_objective(self, *args: Any, **options: Any) -> Any:
        """Return TRL's loss, as another tensor than the one that the engine's forward returned.

        DeepSpeed 0.19.8 divides the gradient of that one by the accumulation steps, also with scale_wrt_gas=False: its
        hook on the output runs before the hook that would tell it not to.
        """
        return super().loss_of_objective(*args, **options) * 1.0

    def num_items(self, inputs: Mapping[str, Any], num_rows: int) -> float:
        """Return the tokens of the completions."""
        return int(self.num_tokens_measured)


class DistillTraining(GeneratingTraining):
    """The rows are prompts."""

    trainer = Distill
    arguments_type = DistillationConfig
    of_trl = DistillationTrainer


TRAINING = DistillTraining()
