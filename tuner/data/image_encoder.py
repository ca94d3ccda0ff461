"""The encoder of text with images: the processor of a vision-language model.

A row keeps its images as they are stored: tokens are counted here, pixels are made when a batch is (`image_batches`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import PIL.Image

from tuner import assets
from tuner.data import images, limits, masks, templates
from tuner.data.encoder import Unrendered
from tuner.data.rendering import Span, Template, rendered
from tuner.data.sample import Chat, Image, Message, images_of, text_of
from tuner.data.text_encoder import TextEncoder
from tuner.errors import DataError
from tuner.recipes.schema import Dataset

if TYPE_CHECKING:
    import torch
    from transformers import ProcessorMixin

Size = tuple[int, int]
"""Width and height in pixels."""


@dataclass
class ImageEncoder(TextEncoder):
    """The encoder of a processor: the placeholder of each image becomes as many tokens as the image has features.

    Args:
        max_pixels: Larger images are made smaller first; None: as the processor does.
        min_pixels: Smaller images are made larger first; None: as the processor does.
    """

    processor: ProcessorMixin
    max_pixels: int | None = None
    min_pixels: int | None = None
    _expanded: dict[Size, str] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, processor: ProcessorMixin, dataset: Dataset | None, day: date | None = None) -> ImageEncoder:
        """Return the encoder of a processor, with the limits of pixels of a data set; None: without limits."""
        limits = (dataset.image_max_pixels, dataset.image_min_pixels) if dataset else ()
        return cls(processor.tokenizer, processor, *limits, day=day)

    @property
    def library_object(self) -> ProcessorMixin:
        return self.processor

    @property
    def image_token(self) -> str:
        """The token that stands for a whole image in a chat template."""
        return str(self.processor.image_token)

    @cached_property
    def feature_token(self) -> str:
        """The token of one feature of an image: in most families the image token, in Gemma 3 another one."""
        return str(getattr(self.tokenizer, "image_token", None) or self.image_token)

    @cached_property
    def image_id(self) -> int:
        """The id of the feature token."""
        return int(self.tokenizer.convert_tokens_to_ids(self.feature_token))

    @property
    def token_types(self) -> str | None:
        """What the model calls the types of tokens, 1 for an image's; None if it takes none."""
        if not getattr(self.processor, "return_mm_token_type_ids", False):
            return None
        names = self.processor.model_input_names
        return "mm_token_type_ids" if "mm_token_type_ids" in names else "token_type_ids"

    @cached_property
    def template(self) -> Template:
        """The chat template, which renders an image as its placeholder."""
        return templates.with_images(templates.choose_template(self.tokenizer, self.day), self.image_token)

    def expand(self, chat: Chat, text: str, spans: list[Span], place: str) -> tuple[str, list[Span]]:
        """Return a rendered conversation with the tokens of its images, and where its answers are then.

        Raises:
            DataError: a text holds the placeholder of an image, the template renders another number of images, or an
                image cannot be read, or the processor does not take its size.
        """
        shown = images_of(chat.messages)
        pieces = text.split(self.image_token)
        if len(pieces) != len(shown) + 1:
            raise self._unequal(chat, len(pieces) - 1, place)
        texts = [self._text_of_image(image, place) for image in shown]
        before = 0
        ends = []  # of each placeholder: where it ends, and by how much the text behind it moves
        for piece, tokens in zip(pieces, texts, strict=False):
            before += len(piece) + len(self.image_token)
            ends.append((before, len(tokens) - len(self.image_token)))
        moved = [_moved(span, ends) for span in spans]
        return "".join([pieces[0], *(part for pair in zip(texts, pieces[1:], strict=True) for part in pair)]), moved

    def _unequal(self, chat: Chat, num_rendered: int, place: str) -> DataError:
        holder = next((turn["role"] for turn in chat.messages if self.image_token in text_of(turn["content"])), None)
        if holder is None:
            count = len(images_of(chat.messages))
            problem = f"the chat template renders {num_rendered} of the {count} images of the conversation"
            return DataError(problem, where=place, of_row=True, fix="Choose another model.chat_template.")
        turn = "an answer" if holder == "assistant" else f"a turn of the {holder}"
        problem = f"the text of {turn} holds {self.image_token!r}, which stands for an image in this model"
        return DataError(problem, where=place, of_row=True, fix="Remove it from the text.")

    def _text_of_image(self, image: Image, place: str) -> str:
        size = images.size_of(image)
        try:
            return self.text_of(size)
        except ValueError as error:  # Qwen-VL's refuses images that are 200 times as wide as high
            problem = f"the model's processor refuses {image} of {size[0]:,} x {size[1]:,} pixels: {error}"
            raise DataError(problem, where=place, of_row=True, fix="Crop the image, or remove the row.") from error

    def text_of(self, size: Size) -> str:
        """Return the text of an image of this size: its tokens, and those that the processor puts around them."""
        size = self.resized(size)
        if size not in self._expanded:
            blank = PIL.Image.new("RGB", size)
            ids = self.processor(images=[blank], text=[self.image_token], add_special_tokens=False)["input_ids"][0]
            self._expanded[size] = self.decode(ids, exact=True)
        return self._expanded[size]

    def num_tokens(self, size: Size) -> int:
        """Return how many tokens the model sees of an image of this size."""
        return self.text_of(size).count(self.feature_token)

    def images_in(self, chat: Chat) -> list[tuple[int, int, int]]:
        """Return the size that the processor is given and the number of tokens of each image."""
        sizes = [images.size_of(image) for image in images_of(chat.messages)]
        return [(*self.resized(size), self.num_tokens(size)) for size in sizes]

    def resized(self, size: Size) -> Size:
        """Return the size that an image has before the processor takes it."""
        return images.within(size, self.max_pixels, self.min_pixels)

    def pixels(self, shown: Sequence[Image]) -> dict[str, Any]:
        """Return what the model takes for these images, by its name there, as tensors.

        Raises:
            DataError: an image cannot be read.
        """
        return self.pixels_of([images.load(image) for image in shown])

    def fitted(self, opened: PIL.Image.Image) -> PIL.Image.Image:
        """Return an image within the limits of pixels."""
        size = self.resized(opened.size)
        return opened if size == opened.size else opened.resize(size)

    def pixels_of(self, opened: Sequence[PIL.Image.Image]) -> dict[str, Any]:
        """Return what the model takes for images that are read already."""
        text = [self.image_token] * len(opened)
        processed = self.processor(
            images=[[self.fitted(image)] for image in opened], text=text, return_tensors="pt", padding=True
        )
        return {name: values for name, values in processed.items() if name not in _OF_TEXT}

    def blank(self) -> dict[str, Any]:
        """Return the pixels of a small black image."""
        return self.pixels_of([PIL.Image.new("RGB", (_SIDE, _SIDE))])

    def prompt_ids(self, prompt: Chat | str, on_change: Callable[[str], object] = lambda reason: None) -> list[int]:
        """Return the tokens of a row's prompt. Errors as `TextEncoder.prompt_ids`."""
        if isinstance(prompt, str):
            return super().prompt_ids(prompt, on_change)
        chat = masks.quoted(self.tokenizer, prompt)
        try:
            text = rendered(self.template, chat, prompt=True)
        except Unrendered as error:
            raise DataError(f"the chat template rejects the conversation: {error}") from error
        for reason in masks.unwritten(chat.messages, text):
            on_change(reason)
        text, _ = self.expand(chat, text, [], "the conversation")
        limits.check_text(self.tokenizer, text, "the conversation")
        return masks.encode_rendered(self.tokenizer, text)

    def prompt(self, messages: Sequence[Message] | str, tools: Sequence[Any] | None = None) -> torch.Tensor:
        """Return a conversation and the prompt for the next answer. Errors as `TextEncoder.prompt`."""
        import torch  # heavy, and no rows need it

        if isinstance(messages, str):
            return super().prompt(messages)
        ids = self.serving_ids(Chat(list(messages), list(tools) if tools else None), prompt=True)
        return torch.tensor([ids])

    def pixels_in(self, messages: Sequence[Message], ids: torch.Tensor) -> dict[str, Any]:
        """Return the pixels of the images of a prompt, and the types of its tokens if the model takes them."""
        types = {self.token_types: (ids == self.image_id).long()} if self.token_types else {}
        shown = images_of(messages)
        return {**types, **self.pixels(shown)} if shown else types

    def content(self) -> list[object]:
        return [*super().content(), self.processor.image_processor.to_json_string(), self.max_pixels, self.min_pixels]

    def save(self, folder: Path) -> None:
        """Write the processor with its tokenizer and a chat template that renders images in plain transformers."""
        chat_template = self.tokenizer.chat_template
        if isinstance(chat_template, str) and self.template.image:
            llm = assets.without_image_parts(chat_template)
            self.tokenizer.chat_template = assets.with_image_parts(llm, self.image_token)
        super().save(folder)
        self.processor.chat_template = self.tokenizer.chat_template
        self.processor.save_pretrained(folder)


def _moved(span: Span, ends: Sequence[Span]) -> Span:
    start, end = (at + sum(growth for placeholder, growth in ends if placeholder <= at) for at in span)
    return start, end


_SIDE = 64
"""Pixels of a side of the blank image: more than the smallest image of every processor."""
_OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
