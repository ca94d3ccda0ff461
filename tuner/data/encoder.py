"""What turns conversations and texts into tokens, as the rest of tuner sees it, and the types of its results.

A tokenizer encodes text (`text_encoder`); a vision model's processor encodes text with images (`image_encoder`). This
module loads no library but numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tuner.data.fast_tokens import FastTokens
from tuner.data.sample import Chat, Message, Sample, Thinking
from tuner.data.tokens import Tokens, Weights
from tuner.vocabulary import Vocabulary

if TYPE_CHECKING:
    import PIL.Image
    import torch

Labelled = tuple[Tokens, Tokens]
"""Input ids and labels, int32 of shape [tokens]; a label of -100 carries no loss."""
Row = dict[str, Any]
"""One row by its columns; see `layouts`."""


class Part(NamedTuple):
    """The tokens of the first `num_turns` turns of a conversation; of a text, 0 turns.

    `weights` are those of the tokens that carry loss; None: each has 1.
    """

    labelled: Labelled
    num_turns: int = 0
    weights: Weights | None = None


@dataclass(frozen=True)
class Encoded:
    """A sample and its tokens: one sequence, or the two sides of a pair. `weights`, of one sequence, as in `Part`."""

    place: str
    sample: Sample
    sides: list[Labelled]
    weights: Weights | None = None


class Unrendered(ValueError):
    """The chat template cannot render a conversation, or its assistant turns cannot be told apart."""


class PixelMaker(Protocol):
    """Makes the tensors of images: the encoder of a model that reads them."""

    @property
    def image_id(self) -> int | None:
        """The token that stands for a feature of an image."""

    @property
    def token_types(self) -> str | None:
        """What the model calls the types of tokens, 1 for an image's; None if it takes none."""

    def pixels_of(self, opened: Sequence[PIL.Image.Image]) -> dict[str, torch.Tensor]:
        """Return what the model takes for images, by its name there."""

    def blank(self) -> dict[str, torch.Tensor]:
        """Return the pixels of a small black image."""


class Encoder(Protocol):
    """Turns conversations and texts into tokens and labels, and tokens into text."""

    @property
    def library_object(self) -> Any:
        """What the libraries take as `processing_class`: a tokenizer, or the processor of a vision model."""

    @property
    def pad_id(self) -> int:
        """The id of the padding token."""

    @property
    def vocabulary(self) -> Vocabulary:
        """Every token with its id: the model's embedding needs a row for each."""

    @property
    def image_id(self) -> int | None:
        """The token that stands for a feature of an image; None if the model reads text alone."""

    @property
    def tools(self) -> Sequence[Any]:
        """The JSON schemas of the tools that prompts are rendered with, of the objective; rows may have others."""

    def images_in(self, chat: Chat) -> list[tuple[int, int, int]]:
        """Return width and height in pixels, as the model sees it, and number of tokens of each image."""

    @property
    def has_template(self) -> bool:
        """Whether it can render conversations."""

    def uses(self, name: str) -> bool:
        """Return whether the chat template, as far as Jinja can tell, uses a variable that a row may set."""

    def encode(
        self,
        placed: Sequence[tuple[str, Chat | str]],
        *,
        train_all: bool = False,
        thinking: Thinking | None = None,
        special_tokens: bool = False,
        fast: FastTokens | None = None,
        on_change: Callable[[str, str], object] = lambda place, reason: None,
    ) -> list[list[Part]]:
        """Return the tokens and labels of conversations and texts, each given with its place.

        A conversation has several parts if its chat template renders an answer otherwise once other turns follow.

        Args:
            placed: The place of each, for messages, and the conversation or text.
            train_all: Put loss on every token; by default a conversation has it on the assistant's turns alone.
            thinking: What happens to the thinking of answers (`dataset.thinking`).
            special_tokens: The special tokens that a text spells become tokens (`dataset.special_tokens`).
            fast: Encodes instead of the tokenizer, which then checks samples of the result.
            on_change: Called with the place and the reason if the template renders an answer differently.

        Raises:
            DataError: there is no chat template, it refuses a conversation, a text is too long, or `special_tokens` is
                set for a conversation.
            Differs: `fast` gives other tokens than the tokenizer.
        """

    def fast_tokens(self) -> FastTokens | None:
        """Return a faster encoder of the same tokens for many rows, or None."""

    def serving_ids(self, chat: Chat, *, prompt: bool) -> list[int]:
        """Return the tokens of a conversation as a server renders it; `prompt` adds the start of an answer.

        Raises:
            Unrendered: the template refuses it.
        """

    def prompt_ids(self, prompt: Chat | str) -> list[int]:
        """Return the tokens of a row's prompt up to where the answer begins; what its texts spell stays text.

        Raises:
            DataError: the chat template rejects it, or it is too long.
        """

    def prompt(self, messages: Sequence[Message] | str, tools: Sequence[Any] | None = None) -> torch.Tensor:
        """Return a conversation and the prompt for the next answer as tokens of shape [1, tokens]; a text as it is.

        Args:
            messages: The conversation up to the answer, or a text.
            tools: The JSON schemas of the tools that the chat template describes.

        Raises:
            DataError: the chat template rejects it.
        """

    def pixels_in(self, messages: Sequence[Message], ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what the model takes beside the result of `prompt`: the pixels of its images; empty without images."""

    def answer_end(self) -> int | None:
        """Return the token that ends an answer in the chat template; None if no single token does."""

    def decode(self, ids: Sequence[int], *, skips_special: bool = False, exact: bool = False) -> str:
        """Return the text of tokens, by default with the clean-up of spaces that the tokenizer asks for.

        Args:
            ids: The tokens.
            skips_special: Leave out special tokens.
            exact: Keep every space, whatever the tokenizer asks for.
        """

    def rules(self) -> str:
        """Return the rules of the tokenizer as text; empty if it is written in Python."""

    def content(self) -> list[object]:
        """Return everything that its tokens depend on: part of the key of the cache of prepared rows."""

    def save(self, folder: Path) -> None:
        """Write its files, with a chat template that every reader knows."""
