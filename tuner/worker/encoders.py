"""The encoder of a recipe's model: its tokenizer, or its processor if the model reads images."""

from __future__ import annotations

from datetime import date

from tuner.data.image_encoder import ImageEncoder
from tuner.data.text_encoder import TextEncoder
from tuner.models.load import processor_of, tokenizer_of
from tuner.recipes.schema import RecipeConfig


def encoder_of(config: RecipeConfig, path: str, day: date | None = None) -> TextEncoder:
    """Load the tokenizer or the processor to train with.

    Args:
        path: The result of `models.load.source` for the model.
        day: What a chat template takes for today. None: today.

    Raises:
        ModelError: the model has no tokenizer or processor, or it needs remote code.
        MachineError: the hub cannot be reached.
    """
    if not config.reads_images:
        return TextEncoder(tokenizer_of(config, path), day=day)
    return ImageEncoder.of(processor_of(config, path), config.train_dataloader.dataset, day)
