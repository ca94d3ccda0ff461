"""Continued pretraining on plain text."""

from typing import ClassVar, Literal

from tuner.recipes.schema.objective import Objective, ObjectiveFacts


class Pretrain(Objective):
    """Loss on every token of plain text."""

    facts: ClassVar = ObjectiveFacts(
        "pretraining",
        rows="texts",
        dropped="empty texts",
        is_usual=True,
        packs=True,
        answers_prompts=False,
        can_chunk_logits=True,
    )
    type: Literal["pretrain"]
