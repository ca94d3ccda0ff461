"""Distillation: TRL's DistillationTrainer on prompts that are prepared already. Seen with TRL 1.16."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trl import DistillationConfig, DistillationTrainer

from tuner import vocabulary
from tuner.data import token_bytes
from tuner.data.text_encoder import TextEncoder
from tuner.errors import Key, ModelError
from tuner.machine.libraries import replaced
from tuner.models.load import teachers_tokenizer
from tuner.recipes.schema import RecipeConfig
from tuner.recipes.schema.objectives.distill import Distill as DistillBlock
from tuner.vocabulary import TEACHER
from tuner.worker import compat
from tuner.worker.objectives.completions import GeneratingTrainer, GeneratingTraining
from tuner.worker.objectives.matched_tokens import MatchedTokens, OtherVocabulary, Side
from tuner.worker.trainer_types import MixedIn

_PROBE = "One, two."


class GreedyDivergence(MixedIn):
    """Mixed in between `GeneratingTrainer` and TRL's trainer: a validation counts the tokens that it measures."""

    num_tokens_measured = 0
    """The tokens of the last batch of a validation; spans, of a teacher with another vocabulary."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        # TRL keeps the texts then; at a log it would print them.
        with replaced(self, log_completions=self.model.training):
            output = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            spans_BC = output.get("completion_spans")
            is_measured = (
                output["completion_mask"] if spans_BC is None else Side.of(output["completion_ids"], spans_BC).is_last_N
            )
            self.num_tokens_measured = int(is_measured.sum())
        return output

    def prediction_step(self, *args: Any, **options: Any) -> Any:
        """Return the mean divergence of the tokens of greedy completions; of TRL's metrics the mean over tokens."""
        prediction = super().prediction_step(*args, **options)
        metrics = compat.metrics_of(self, "eval")
        for name in [name for name in metrics if name != "entropy"]:
            del metrics[name]
        return prediction


class Distill(GeneratingTrainer, GreedyDivergence, MatchedTokens, DistillationTrainer):  # type: ignore[misc]
    """Distillation. Its completions come from the seeds of `Sampled`, and the teacher is loaded already."""

    def __init__(self, *, model: Any, ref_model: Any, other: OtherVocabulary | None = None, **others: Any) -> None:
        """Make TRL's trainer.

        Raises:
            ModelError: the teacher has another vocabulary than the model, and must not.
        """
        student_size, teacher_size = (
            each_model.config.get_text_config().vocab_size for each_model in (model, ref_model)
        )
        if other is None and student_size != teacher_size:
            raise vocabulary.other_size(student_size, teacher_size, ref_model.name_or_path)
        super().__init__(model=model, teacher_model=ref_model, other=other, **others)

    def loss_of_objective(self, *args: Any, **options: Any) -> Any:
        """Return TRL's loss, as another tensor than the one that the engine's forward returned.

        DeepSpeed 0.19.8 divides the gradient of that one by the accumulation steps, also with scale_wrt_gas=False: its
        hook on the output runs before the hook that would tell it not to.
        """
        return super().loss_of_objective(*args, **options) * 1.0

    def num_items(self, inputs: Mapping[str, Any], num_rows: int) -> float:
        return int(self.num_tokens_measured)


class DistillTraining(GeneratingTraining):
    """The teacher may have another vocabulary."""

    def before(self, arguments: Any, config: RecipeConfig, model: Any) -> None:
        super().before(arguments, config, model)
        compat.check_trainer(self.of_trl, "compares")

    def constructor(self, config: RecipeConfig, folder: Path, encoder: TextEncoder) -> dict[str, Any]:
        arguments, teacher = super().constructor(config, folder, encoder), config.objective.taught_by
        assert teacher is not None, "the objective's own"
        return arguments if teacher.shares_vocabulary else {**arguments, "other": _other_vocabulary(config, encoder)}


def _other_vocabulary(config: RecipeConfig, encoder: TextEncoder) -> OtherVocabulary:
    """Return how the teacher's tokens are compared with the student's.

    Raises:
        ModelError: it is not known what text the tokens of a tokenizer stand for.
    """
    block = config.objective
    assert isinstance(block, DistillBlock), "the objective's own"
    teacher = TextEncoder(teachers_tokenizer(config), day=encoder.day)
    rules = [json.loads(side.rules() or '{"model": {}}') for side in (encoder, teacher)]
    student_bytes, teacher_bytes = (token_bytes.token_bytes(of_side) for of_side in rules)
    if student_bytes is None:
        raise vocabulary.not_spelled(str(config.model.path), "model.path")
    if teacher_bytes is None:
        raise vocabulary.not_spelled(str(block.teacher), TEACHER)
    tokenizer = teacher.library_object
    probe = tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
    if b"".join(teacher_bytes.get(token, b"") for token in probe) != _PROBE.encode():
        problem = f"the tokenizer of the teacher {block.teacher!r} changes a text, such as by a space in front of it"
        fix = f"Use another teacher, or one with the student's vocabulary and {Key('vocabulary_matching', 'ids')}."
        raise ModelError(problem, where=TEACHER, fix=fix)
    eos_ids = [side.library_object.eos_token_id for side in (encoder, teacher)]
    answer_ends = [side.answer_end() if side.has_template else None for side in (encoder, teacher)]
    first, second = (eos_id if end is None else end for end, eos_id in zip(answer_ends, eos_ids, strict=True))
    same = None
    if block.vocabulary_matching == "hybrid":
        student_specials, teacher_specials = (token_bytes.special_tokens(of_side) for of_side in rules)
        same = token_bytes.same_tokens(student_bytes, teacher_bytes)
        same += [
            (student_specials[name], teacher_specials[name])
            for name in student_specials.keys() & teacher_specials.keys()
        ]
        same = sorted([*(pair for pair in same if pair[0] != first and pair[1] != second), (first, second)])
    matched, unmatched = block.uld_hybrid_matched_weight, block.uld_hybrid_unmatched_weight
    architecture = config.teacher_architecture
    return OtherVocabulary(
        teacher,
        student_bytes,
        teacher_bytes,
        (first, second),
        same,
        None if matched is None or unmatched is None else (matched, unmatched),
        architecture.max_position_embeddings if architecture else None,
    )


TRAINING = DistillTraining(Distill, DistillationConfig)
