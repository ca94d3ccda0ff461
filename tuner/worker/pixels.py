"""A trainer that reads images: its batches get pixels, and every rank runs the tower in each pass.

Which ranks have images in a micro-batch depends on the rows; see `models.vision.TowerOnEveryRank`.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from tuner.data.image_batches import PIXELS, ImageCollator, PixelLoader
from tuner.data.image_encoder import ImageEncoder
from tuner.models.vision import TowerOnEveryRank
from tuner.worker.generation import on_device


class ImageReader:
    """Gives the batches of a trainer their pixels, which `num_workers` threads make."""

    def __init__(self, model: PreTrainedModel, encoder: ImageEncoder, num_workers: int) -> None:
        self._loader = PixelLoader(encoder, num_workers)
        self.ahead = self._loader.ahead
        """Returns batches while the pixels of the next ones are made."""
        base: PreTrainedModel = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._model = base
        # On one rank too: where the LLM is frozen, a batch of text alone would have no gradient.
        self._tower = TowerOnEveryRank(base)
        self._blank = encoder.blank()

    def add_pixels(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a batch with its pixels on the device of its tokens; call it right before the pass."""
        pixels = self._loader.pixels(batch[PIXELS])
        self._tower.blank = on_device(self._model, self._blank) if pixels is None else None
        text = {name: value for name, value in batch.items() if name != PIXELS}
        return text if pixels is None else text | on_device(self._model, pixels)


def read_images(trainer: Any, model: PreTrainedModel, encoder: ImageEncoder, num_workers: int) -> None:
    trainer.data_collator = ImageCollator(trainer.data_collator, encoder)
    trainer.images = ImageReader(model, encoder, num_workers)
