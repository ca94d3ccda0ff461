"""The images of a row: which files they are, and where in its conversation each one stands.

It reads no image. A row and its sample leave here with as many images as there are places for them, or not at all.
"""

from __future__ import annotations

import base64
import binascii
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from tuner.data.formats import cells
from tuner.data.formats.cells import Misfit, Row
from tuner.data.sample import Chat, Image, Message, Sample, turns_of
from tuner.errors import DataError
from tuner.paths import expanded

if TYPE_CHECKING:
    import PIL.Image

COLUMNS = ("images", "image")
MARK = "<image>"
"""Where an image stands in a text, as LLaVA's rows have it."""
_PLACE = re.compile(rf"(?:\n[ \t]*)?{MARK}(?:[ \t]*\n)?")
"""LLaVA's mark with the line breaks next to it: a chat template writes its own."""
_DATA_URI = re.compile(r"data:image/[\w.+-]+;base64,", re.IGNORECASE)
_URL = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_ENDING = re.compile(r"\.(?:avif|bmp|gif|jpe?g|png|tiff?|webp)$", re.IGNORECASE)

_MAX_PATH = 4096
"""Bytes. Source: PATH_MAX of Linux."""


@dataclass(frozen=True)
class ImagePaths:
    """Where the paths of images begin: `folder`, or else the folder of the row's file, which is one of `files`."""

    folder: Path | None = None
    files: tuple[Path, ...] = ()

    def absolute(self, path: str, place: str) -> str:
        """Return the absolute path of an image. Raises DataError: it is outside of `folder`, also by a link."""
        if self.folder is None:
            return str((self._folder_of(place) / expanded(path)).absolute())
        inside, full_path = self.folder.resolve(), (self.folder / path).resolve()
        if not full_path.is_relative_to(inside):
            fix = "Correct the path, or choose an image_folder that holds all images."
            raise DataError(
                f"the image {path} is outside of image_folder = {self.folder}", where=place, fix=fix, of_row=True
            )
        return str(full_path)

    def _folder_of(self, place: str) -> Path:
        # The longest: a file's name may begin with another's.
        rows_file = max(
            (file for file in self.files if place.startswith(str(file))), key=lambda file: len(str(file)), default=None
        )
        return rows_file.parent if rows_file else Path()


def with_images(sample: Sample, row: Row, paths: ImagePaths, place: str) -> Sample:
    """Return the sample with its images in their places; the sample itself if neither it nor its row has one.

    A place is `<image>` in a text of the user, the system or a tool, or a part {"type": "image"} without an image of
    its own. They take the images of the column `images` in their order. Without any place, all images come before the
    first text of the user.

    Raises:
        DataError: there are more images than places or fewer, or one of them is no path or file.
    """
    if isinstance(sample, str):
        return sample
    turns = turns_of(sample)
    images_of_columns = [image for name in COLUMNS if name in row for image in _listed(row[name])]
    if not images_of_columns and not any(isinstance(turn["content"], list) for turn in turns):
        return sample
    # Without images beside the text, the mark may be a word of the text. `columns` refuses it if it is a placeholder.
    pool = [_image(value, paths, place) for value in images_of_columns]
    placed = _filled([_split(turn) for turn in turns] if images_of_columns else turns, pool, paths, place)
    return replace(sample, messages=placed) if isinstance(sample, Chat) else replace(sample, prompt=placed)


def is_image(value: object) -> bool:
    """Return whether a value is an image, or a list with one: the name of a file, a data URI, bytes or an object."""
    if isinstance(value, list | tuple):
        return any(map(is_image, value))
    if isinstance(value, Mapping):
        return any(map(is_image, value.values()))
    if isinstance(value, str):
        return (_ENDING.search(value) or _DATA_URI.match(value)) is not None
    return isinstance(value, bytes) or _is_picture(value)


def _parts_of(turn: Message) -> list[Message]:
    content = turn["content"]
    return content if isinstance(content, list) else []


def _listed(value: object) -> list[object]:
    items = cells.listed(value)
    if isinstance(items, list | tuple):
        return [image for item in items for image in _listed(item)]
    is_nothing = items is None or items == "" or (isinstance(items, Mapping) and not any(items.values()))
    return [] if is_nothing else [items]


def _split(turn: Message) -> Message:
    """Return a turn with each mark in its text made a part of its own."""
    if turn["role"] == "assistant":
        return turn
    content = turn["content"]
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    if not any(MARK in part.get("text", "") for part in parts):
        return turn
    return {**turn, "content": [piece for part in parts for piece in _pieces(part)]}


def _pieces(part: Message) -> Iterable[Message]:
    if part["type"] != "text":
        return [part]
    texts = _PLACE.split(part["text"])
    pieces: list[Message] = []
    for number, text in enumerate(texts):
        pieces += [{"type": "image", "image": None}] if number else []
        pieces += [{"type": "text", "text": text}] if text else []
    return pieces


def _filled(turns: list[Message], pool: list[Image], paths: ImagePaths, place: str) -> list[Message]:
    """Return turns with an image in each place."""
    all_parts = [part for turn in turns for part in _parts_of(turn)]
    num_places = sum(part["type"] == "image" and part["image"] is None for part in all_parts)
    if pool and not num_places:
        turns, num_places = _before_first_question(turns, len(pool)), len(pool)
    if num_places != len(pool):
        raise _uneven(len(pool), num_places, place)
    rest = iter(pool)

    def filled(part: Message) -> Message:
        if part["type"] != "image":
            return part
        image = next(rest) if part["image"] is None else _image(part["image"], paths, place)
        return {"type": "image", "image": image}

    return [{**turn, "content": list(map(filled, parts))} if (parts := _parts_of(turn)) else turn for turn in turns]


def _uneven(num_images: int, num_places: int, place: str) -> DataError:
    places = f"{num_places} place{'s' * (num_places != 1)}"
    problem = f"the row has {num_images} image{'s' * (num_images != 1)} and {places} for images"
    fix = f"Write {MARK} in the text once for each image, or correct the column 'images'."
    if not num_images:  # the places are parts: without images beside the text, its marks are words
        problem = "a part of type 'image' has no image, and the row has no column 'images'"
        fix = 'Write the image into the part, {"type": "image", "image": PATH}, or into a column \'images\'.'
    return DataError(problem, where=place, fix=fix, of_row=True)


def _before_first_question(turns: list[Message], count: int) -> list[Message]:
    first = next((number for number, turn in enumerate(turns) if turn["role"] == "user"), None)
    if first is None:
        raise Misfit("it has images and no turn of the user to put them in")
    content = turns[first]["content"]
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    places = [{"type": "image", "image": None} for _ in range(count)]
    return [*turns[:first], {**turns[first], "content": [*places, *parts]}, *turns[first + 1 :]]


def _image(value: object, paths: ImagePaths, place: str) -> Image:
    """Return the image of a cell or of a part: a path, a data URI, the bytes of a file, or an object of these."""
    if _is_picture(value):
        return Image(data=_file_of(value))
    if isinstance(value, bytes | bytearray):
        return Image(data=bytes(value))
    if isinstance(value, Mapping):
        return _image(value.get("bytes") or value.get("path") or value.get("url"), paths, place)
    if not isinstance(value, str) or not value.strip():
        raise Misfit(f"an image is {cells.kind(value)}, not a path, a data URI or the bytes of a file")
    if (image := of_data_uri(value)) is not None:
        return image
    path = value.removeprefix("file://")
    if _URL.match(path) or path.startswith("data:"):
        fix = "Download the image, and write its path in the row."
        raise DataError(f"the image {value[:100]} is not a file here", where=place, fix=fix, of_row=True)
    if len(path) > _MAX_PATH:
        problem = f"an image is a text of {len(path):,} characters, which is no path: {path[:40]}..."
        fix = "Write base64 as a data URI: data:image/png;base64,..."
        raise DataError(problem, where=place, fix=fix, of_row=True)
    return Image(path=paths.absolute(path, place))


def of_data_uri(text: str) -> Image | None:
    """Return the image in a data URI; None for any other text. Raises Misfit: its base64 is wrong."""
    header = _DATA_URI.match(text)
    if header is None:
        return None
    try:
        return Image(data=base64.b64decode(text[header.end() :], validate=True))
    except binascii.Error as error:
        raise Misfit(f"an image is a data URI with wrong base64: {error}") from error


def data_uri(value: object) -> str:
    """Return an image of PIL, or the bytes of a file, as the data URI that a row of JSON holds.

    Raises:
        TypeError: it is something else.
    """
    data = _file_of(value) if _is_picture(value) else value
    if not isinstance(data, bytes | bytearray):
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")  # as json's own
    return f"data:image/octet-stream;base64,{base64.b64encode(data).decode()}"


def _is_picture(value: object) -> TypeGuard[PIL.Image.Image]:
    pil = sys.modules.get("PIL.Image")  # who holds a picture has imported it; a plan, which needs none, saves 10 ms
    return pil is not None and isinstance(value, pil.Image)


def _file_of(picture: PIL.Image.Image) -> bytes:
    file = BytesIO()
    kind = "TIFF" if picture.mode in ("CMYK", "F", "LAB", "YCbCr") else "PNG"
    picture.save(file, kind, exif=picture.getexif())  # it may still have to be turned
    return file.getvalue()
