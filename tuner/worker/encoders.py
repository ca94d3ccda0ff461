"""The encoder of a recipe's model: its tokenizer, or its processor if the model reads images."""

from __future__ import annotations

from tuner.data.image_encoder import ImageEncoder
from tuner.data.text_encoder import TextEncoder
from tuner.models.load import processor_of, tokenizer_of
from tuner.recipes.schema import RecipeConfig


def encoder_of(config: RecipeConfig, path: str) -> TextEncoder:
    """Load the tokenizer or the processor to train with.

    Args:
        config: The recipe.
        path: The result of `models.load.source` for the model.

    Raises:
        ModelError: the model has no tokenizer or processor, or it needs remote code.
        MachineError: the hub cannot be reached.
    """
    if not config.reads_images:
        return TextEncoder(tokenizer_of(config, path))
    return ImageEncoder.of(processor_of(config, path), config.train_dataloader.dataset)
