"""Batches of rows with images: the text is collated at once, the pixels are made by workers while a step computes.

Shapes: B rows of T tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from tuner.data import images
from tuner.data.encoder import Row
from tuner.data.image_encoder import ImageEncoder
from tuner.data.layouts import IMAGES
from tuner.data.sample import Image
from tuner.errors import DataError

Pixels = dict[str, torch.Tensor]
"""What the model takes for the images of a batch, by its name there."""
PIXELS = "pixels"
_AHEAD = 2
"""The batches that have pixels in memory: those of a CLIP image of 336 pixels take 1.3 MB, of Qwen-VL's often 7 MB."""


@dataclass(eq=False)
class BatchImages:
    """The images of one batch, in the order of their tokens, and their pixels once they are made."""

    shown: Sequence[Row]
    """Rows of the column `layouts.IMAGES`."""
    pixels: Future[Pixels] | None = field(default=None)


@dataclass(frozen=True)
class ImageCollator:
    """Collates rows of text and images."""

    collate: Callable[[Sequence[Row]], dict[str, Any]]
    encoder: ImageEncoder

    def __call__(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Return the batch of text, with `pixels` and the types of its tokens if the model takes them."""
        batch = self.collate([{name: value for name, value in row.items() if name != IMAGES} for row in rows])
        if name := self.encoder.token_types:
            batch[name] = (batch["input_ids"] == self.encoder.image_id).long()
        return {**batch, PIXELS: BatchImages([image for row in rows for image in row[IMAGES]])}


class PixelLoader:
    """Makes the pixels of batches in threads: PIL and numpy release the interpreter's lock while they work.

    With 0 workers, pixels are made when they are asked for.
    """

    def __init__(self, encoder: ImageEncoder, num_workers: int) -> None:
        self._encoder = encoder
        self._threads = ThreadPoolExecutor(num_workers, "images") if num_workers else None
        self._waiting: deque[BatchImages] = deque()
        self._source: Iterator[dict[str, Any]] | None = None
        self._batches: Iterator[dict[str, Any]] = iter(())

    def ahead(self, batches: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Return an iterator over the same batches that reads some ahead; the same one while `batches` is the same."""
        if batches is not self._source:
            self._source, self._batches = batches, self._read(batches)
            self._waiting.clear()
        return self._batches

    def _read(self, batches: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        read: deque[dict[str, Any]] = deque()
        for batch in batches:
            read.append(batch)
            self._waiting.append(batch[PIXELS])
            self._start()
            if len(read) > _AHEAD:
                yield read.popleft()
        yield from read

    def _start(self) -> None:
        if self._threads:
            for batch in islice(self._waiting, _AHEAD):
                batch.pixels = batch.pixels or self._threads.submit(self._make, batch.shown)

    def pixels(self, batch: BatchImages) -> Pixels | None:
        """Return the pixels of a batch; None if it has no image.

        Raises:
            DataError: an image is not what it was when its row was prepared.
        """
        if batch in self._waiting:
            self._waiting.remove(batch)
        self._start()
        if not batch.shown:
            return None
        return batch.pixels.result() if batch.pixels else self._make(batch.shown)

    def _make(self, shown: Sequence[Row]) -> Pixels:
        opened = [_opened(row) for row in shown]
        return self._encoder.pixels_of(opened) if opened else {}


def _opened(row: Row) -> Any:
    opened = images.load(Image(row["path"], row["data"]))
    if opened.size != (row["width"], row["height"]):
        problem = f"the image had {row['width']} x {row['height']} pixels when its row was prepared"
        fix = "Give a changed image another name, so that its row is prepared again."
        raise DataError(f"{problem}, and now has {opened.width} x {opened.height}", where=row["path"], fix=fix)
    return opened
