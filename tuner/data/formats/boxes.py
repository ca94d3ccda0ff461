"""Reads rows with a box in an image, as XTuner writes RefCOCO: a description, its box in pixels, and the image's size.

Each row is one question in one of seven forms, which follows from the row: the same in every epoch and run.
"""

from __future__ import annotations

import hashlib
import math

from tuner.data.formats import cells, chats
from tuner.data.formats.cells import Misfit, Row
from tuner.data.sample import Chat

COLUMNS = ("sents", "bbox", "width", "height", "image", "images", "id")

_REFER = (
    "[refer] {}",
    "[refer] give me the location of {}",
    "[refer] where is {} ?",
    "[refer] from this image, tell me the location of {}",
    "[refer] the location of {} is",
    "[refer] could you tell me the location for {} ?",
    "[refer] where can I locate the {} ?",
)
_IDENTIFY = (
    "[identify] {}",
    "[identify] what object is in this location {}",
    "[identify] identify the object present at this location {}",
    "[identify] what is it in {}",
    "[identify] describe this object in {}",
    "[identify] this {} is",
    "[identify] the object in {} is",
)
"""XTuner's questions (xtuner/dataset/refcoco_json.py in 0.1.23)."""
_MAX_PIXELS = 1_000_000
"""A side of an image is shorter."""


def read_referring(row: Row) -> Chat:
    """Read a question for the box of a description."""
    description, box = _described(row)
    return _chat(_form(_REFER, row).format(description), box, row)


def read_identifying(row: Row) -> Chat:
    """Read a question for the description of a box."""
    description, box = _described(row)
    return _chat(_form(_IDENTIFY, row).format(box), description, row)


def _chat(question: str, answer: str, row: Row) -> Chat:
    # XTuner puts an image before the text of its turn.
    return chats.chat([chats.user(f"<image>\n{question}"), chats.answer(answer)], row)


def _form(forms: tuple[str, ...], row: Row) -> str:
    key = f"{row.get('image')} {row['sents']} {row['bbox']}"
    return forms[hashlib.sha256(key.encode(errors="surrogatepass")).digest()[0] % len(forms)]


def _described(row: Row) -> tuple[str, str]:
    """Return the description, and the box as text: left, top, right and bottom in hundredths of the image.

    Raises:
        Misfit: a column is missing, or the box is not inside the image.
    """
    if not any(row.get(name) for name in ("image", "images")):
        raise Misfit("it has no image")
    values = cells.listed(cells.column(row, "bbox"))
    if not isinstance(values, list | tuple) or len(values) != 4:
        raise Misfit("bbox is not four numbers: left, top, width, height")
    left, top, across, down = (_number(value, "bbox") for value in values)
    width, height = (_number(cells.column(row, name), name) for name in ("width", "height"))
    is_inside = left + across <= width + 1 and top + down <= height + 1  # COCO rounds boxes
    if not (across and down and width and height and is_inside):
        raise Misfit(f"the box {[left, top, across, down]} is not inside an image of {width:g} x {height:g} pixels")
    edges = left / width, top / height, (left + across) / width, (top + down) / height
    return cells.text_of(row, "sents"), "{" + "".join(f"<{int(edge * 100)}>" for edge in edges) + "}"


def _number(value: object, name: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not 0 <= value < _MAX_PIXELS:  # type: ignore[arg-type, operator]
        raise Misfit(f"{name} holds {cells.kind(value)}, not a number of pixels")
    return float(value)  # type: ignore[arg-type]
