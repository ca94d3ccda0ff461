"""The images of requests to transformers' server: read as in training, from data URIs alone.

The server itself would download addresses and open files of this machine, and leave out the images for a model of text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tuner.data import images
from tuner.data.formats import image_places
from tuner.data.formats.cells import Misfit
from tuner.data.image_encoder import ImageEncoder
from tuner.errors import DataError

if TYPE_CHECKING:
    import PIL.Image
    from transformers.cli.serving.utils import Modality

    from tuner.data.encoder import Encoder

_TEXTS = ("text", "input_text", "output_text", "refusal")
_IMAGES = ("image_url", "input_image")
Request = Sequence[dict[str, Any]]
"""The messages of a request, as OpenAI's clients send them."""


def read_images(encoder: Encoder) -> None:
    """Make transformers' server in this process read the images of requests with `encoder`.

    A request with an image that is no data URI, or with an image for a model of text alone, gets status 400.
    """
    from transformers.cli.serving.utils import BaseHandler  # an extra

    as_it_was = BaseHandler.get_processor_inputs_from_messages

    def with_images(messages: Request, modality: Modality) -> Request:
        opened = iter(_opened(messages, encoder))
        turns: Request = as_it_was(list(messages), modality)
        for part in _parts(turns):
            if part["type"] == "image":
                part["image"] = next(opened)
                del part["url"]
        return turns

    BaseHandler.get_processor_inputs_from_messages = staticmethod(with_images)


def _parts(messages: Request) -> Iterator[dict[str, Any]]:
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and "tool_calls" not in message:  # the server ignores the content beside calls
            yield from content


def _opened(messages: Request, encoder: Encoder) -> list[PIL.Image.Image]:
    """Return the images of the messages in their order."""
    from fastapi import HTTPException  # an extra

    try:
        return [_image(part, encoder) for part in _parts(messages) if part["type"] not in _TEXTS]
    except (Misfit, DataError) as error:
        raise HTTPException(400, error.what if isinstance(error, DataError) else str(error)) from error


def _image(part: dict[str, Any], encoder: Encoder) -> PIL.Image.Image:
    if part["type"] not in _IMAGES:
        raise Misfit(f"this server reads text and images, and no {part['type']!r}")
    if not isinstance(encoder, ImageEncoder):
        raise Misfit("the request has an image, and this model reads text alone")
    address = part.get("image_url")
    address = address.get("url") if isinstance(address, dict) else address
    image = image_places.of_data_uri(address) if isinstance(address, str) else None
    if image is None:
        raise Misfit(
            "an image must be a data URI (data:image/png;base64,...): this server opens no files and addresses"
        )
    return encoder.fitted(images.load(image))
