"""Supervised fine-tuning on conversations."""

from typing import ClassVar, Literal

from tuner.recipes.schema.objective import NO_LOSS, Objective, ObjectiveFacts


class Sft(Objective):
    """Loss on the assistant's turns."""

    facts: ClassVar = ObjectiveFacts(
        "SFT",
        rows="conversations",
        dropped=NO_LOSS,
        packs=True,
        chooses_loss=True,
    )
    type: Literal["sft"]
