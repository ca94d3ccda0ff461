"""Supervised fine-tuning on conversations."""

from typing import ClassVar, Literal

from tuner.recipes.schema.objectives.objective_block import Objective, ObjectiveFacts


class Sft(Objective):
    """Loss on the assistant's turns."""

    facts: ClassVar = ObjectiveFacts(
        "SFT",
        rows="conversations",
        dropped="no token to train on within max_length",
        packs=True,
        chooses_loss=True,
    )
    type: Literal["sft"]
