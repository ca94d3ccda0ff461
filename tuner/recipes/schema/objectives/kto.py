"""Kahneman-Tversky optimization."""

from typing import ClassVar, Literal

from pydantic import PositiveFloat

from tuner.recipes.schema.objective import EQUAL_OR_NO_LOSS, ObjectiveFacts
from tuner.recipes.schema.precomputed_reference import PrecomputedReference


class Kto(PrecomputedReference):
    """Kahneman-Tversky optimization on single answers marked good or bad."""

    facts: ClassVar = ObjectiveFacts(
        "KTO", rows="judged", dropped=EQUAL_OR_NO_LOSS, is_usual=True, has_reference=True, can_chunk_logits=True
    )
    type: Literal["kto"]
    # The weight of the distance to the reference model.
    beta: PositiveFloat = 0.1
    # 'kto' estimates that distance on the micro-batch; 'apo_zero_unpaired' does not use it.
    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"
    # The weight of good answers.
    desirable_weight: PositiveFloat = 1.0
    # The weight of bad answers.
    undesirable_weight: PositiveFloat = 1.0

    @property
    def least_batch_size(self) -> int:
        """TRL's 'kto' loss compares an answer with the others of its micro-batch."""
        return 2 if self.loss_type == "kto" else 1

    @property
    def depends_on_micro_batch(self) -> bool:
        """With the `loss_type` 'kto': TRL 1.16 estimates the distance to the reference on it."""
        return self.loss_type == "kto"

    @property
    def depends_on_ranks(self) -> bool:
        """With the `loss_type` 'kto': TRL 1.16 takes the mean of that estimate over all ranks."""
        return self.loss_type == "kto"
