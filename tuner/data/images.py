"""Temporary."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO

import PIL.Image
import PIL.ImageOps


@dataclass(frozen=True)
class Image:
    path: str | None = None
    data: bytes | None = None


def load(image: Image) -> PIL.Image.Image:
    opened = PIL.Image.open(image.path or BytesIO(image.data or b""))
    return PIL.ImageOps.exif_transpose(opened).convert("RGB")


def size_of(image: Image) -> tuple[int, int]:
    return load(image).size
