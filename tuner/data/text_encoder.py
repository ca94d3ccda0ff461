"""The encoder of text, which turns conversations into tokens: a Hugging Face tokenizer with its chat template.

It does not load the tokenizer (`models.load` does), and it does not cut or pack.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner import vocabulary
from tuner.assets import names_in, without_generation_marks
from tuner.data import images, limits, masks, templates
from tuner.data.encoder import Part
from tuner.data.fast_tokens import FastTokens
from tuner.data.rendering import Span, Template, rendered, text_of
from tuner.data.sample import IGNORED, Chat, Message, Thinking, images_of
from tuner.errors import DataError
from tuner.vocabulary import Vocabulary

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


@dataclass
class TextEncoder:
    """Turns conversations and texts into tokens and labels, and tokens into text.

    Args:
        day: What a chat template takes for today; None: today.
        tools: The JSON schemas of the objective's tools, with which prompts are rendered; rows may have others.
    """

    tokenizer: PreTrainedTokenizerBase
    day: date | None = field(default=None, kw_only=True)
    tools: Sequence[Any] = field(default=(), kw_only=True)

    @property
    def library_object(self) -> PreTrainedTokenizerBase:
        """What the libraries take as `processing_class`."""
        return self.tokenizer

    @property
    def pad_id(self) -> int:
        number: int = self.tokenizer.pad_token_id
        return number

    @property
    def vocabulary(self) -> Vocabulary:
        """Every token with its id: the model's embedding needs a row for each."""
        tokenizer = self.tokenizer
        special = {str(token): id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
        named_tokens = [tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token]
        idle = vocabulary.idle(special, named_tokens, str(tokenizer.chat_template))
        return Vocabulary(tokenizer.get_vocab(), idle)

    @property
    def image_id(self) -> int | None:
        """The token that stands for a feature of an image; None: a tokenizer reads text alone."""
        return None

    def images_in(self, chat: Chat) -> list[tuple[int, int, int]]:
        """Return width and height in pixels, as the model sees it, and number of tokens of each image: here none."""
        return []

    @property
    def has_template(self) -> bool:
        """Whether it can render conversations."""
        return bool(self.tokenizer.chat_template)

    def uses(self, name: str) -> bool:
        """Return whether the chat template, or the one for tools, uses a name; True if Jinja cannot tell."""
        template = self.tokenizer.chat_template
        names_of_templates = [
            names_in(text) for text in (template.values() if isinstance(template, dict) else [template]) if text
        ]
        return any(names is None or name in names for names in names_of_templates)

    @cached_property
    def template(self) -> Template:
        """The chat template. Texts need none: a tokenizer without one is no error before the first conversation."""
        return templates.choose_template(self.tokenizer, self.day)

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
        """Return the tokens and labels of conversations and texts, each given with its place; images carry no loss.

        A conversation has several parts if its chat template renders an answer otherwise once other turns follow.

        Args:
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
        texts = [(place, text) for place, text in placed if isinstance(text, str)]
        chats = [(place, chat) for place, chat in placed if isinstance(chat, Chat)]
        for place, chat in chats:
            if self.image_id is None and images_of(chat.messages):
                raise images.for_text_alone("the conversation", place)
            if special_tokens:
                problem = "special_tokens is for rows of plain text, and the row is a conversation"
                fix = "Set dataset.special_tokens to False: the chat template writes the tokens of a conversation."
                raise DataError(problem, where=place, fix=fix)
        of_texts: Iterator[list[Part]] = iter(())
        of_chats: Iterator[list[Part]] = iter(())
        if texts:
            tokens = masks.encode_texts(self.tokenizer, texts, fast, special_tokens=special_tokens, on_change=on_change)
            of_texts = ([Part(labelled)] for labelled in tokens)
        if chats:
            of_chats = iter(
                masks.encode_chats(
                    self.template,
                    chats,
                    train_all=train_all,
                    thinking=thinking,
                    fast=fast,
                    on_change=on_change,
                    expand=self.expand,
                )
            )
        encoded = [next(of_texts if isinstance(sample, str) else of_chats) for _, sample in placed]
        if self.image_id is not None:
            for part in itertools.chain.from_iterable(encoded):
                ids, labels = part.labelled
                labels[ids == self.image_id] = IGNORED
        return encoded

    def expand(self, chat: Chat, text: str, spans: list[Span], place: str) -> tuple[str, list[Span]]:
        """Return the text of a rendered conversation with the tokens of its images: here there are no images."""
        return text, spans

    def fast_tokens(self) -> FastTokens | None:
        """Return a faster encoder of the same tokens for many rows, if fastokens has all of the tokenizer's rules."""
        return FastTokens.of(self.tokenizer)

    def serving_ids(self, chat: Chat, *, prompt: bool) -> list[int]:
        """Return the tokens of a conversation as a server renders it. Arguments and errors as for `rendered`."""
        text, _ = self.expand(chat, rendered(self.template, chat, prompt=prompt), [], "the conversation")
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def prompt_ids(self, prompt: Chat | str, on_change: Callable[[str], object] = lambda reason: None) -> list[int]:
        """Return the tokens of a row's prompt up to where the answer begins; what its texts spell stays text.

        `on_change` is called with what the chat template leaves out of it.

        Raises:
            DataError: the chat template rejects it, or it is too long.
        """
        if isinstance(prompt, str):
            limits.check_text(self.tokenizer, prompt, "the prompt")
            ids: list[int] = self.tokenizer(prompt, split_special_tokens=True, verbose=False)["input_ids"]
            return ids
        chat = masks.quoted(self.tokenizer, replace(prompt, tools=prompt.tools or [*self.tools] or None))
        names = chat.chat_template_kwargs
        text = prompt_text(self.tokenizer, chat.messages, chat.tools, names=names, day=self.day)
        limits.check_text(self.tokenizer, text, "the conversation")
        for reason in masks.unwritten(chat.messages, text):
            on_change(reason)
        return masks.encode_rendered(self.tokenizer, text)

    def prompt(self, messages: Sequence[Message] | str, tools: Sequence[Any] | None = None) -> torch.Tensor:
        """Return a conversation and the prompt for the next answer as tokens of shape [1, tokens]; a text as it is.

        Raises:
            DataError: the chat template rejects it.
        """
        if isinstance(messages, str):
            limits.check_text(self.tokenizer, messages, "the prompt")
            of_text: torch.Tensor = self.tokenizer(messages, return_tensors="pt")["input_ids"]
            return of_text
        text = prompt_text(self.tokenizer, messages, tools, day=self.day)
        limits.check_text(self.tokenizer, text, "the conversation")
        # The template has already written the special tokens.
        ids: torch.Tensor = self.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        return ids

    def pixels_in(self, messages: Sequence[Message], ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what the model takes beside the result of `prompt`: the pixels of its images; here none."""
        return {}

    def answer_end(self) -> int | None:
        """Return the token that ends an answer in the chat template; None if no single token does."""
        return templates.answers_end(self.tokenizer)

    def decode(self, ids: Sequence[int], *, skips_special: bool = False, exact: bool = False) -> str:
        """Return the text of tokens, with the clean-up of spaces that the tokenizer asks for unless it is `exact`."""
        cleans_up = False if exact else None  # None: as the tokenizer's own setting says
        options = {"skip_special_tokens": skips_special, "clean_up_tokenization_spaces": cleans_up}
        return str(self.tokenizer.decode(list(ids), **options))

    def rules(self) -> str:
        """Return the rules of the tokenizer as text; empty if it is written in Python."""
        return str(self.tokenizer.backend_tokenizer.to_str()) if self.tokenizer.is_fast else ""

    def content(self) -> list[object]:
        """Return everything that its tokens depend on: part of the key of the cache of prepared rows."""
        tokenizer = self.tokenizer
        has_day = "strftime_now" in str(tokenizer.chat_template)
        day = str(self.day or date.today()) if has_day else None
        return [
            self.rules() or repr(tokenizer),
            tokenizer.chat_template,
            tokenizer.special_tokens_map,
            day,
            *self.tools,
        ]

    def save(self, folder: Path) -> None:
        """Write the tokenizer with its chat template, without marks that only training reads."""
        if isinstance(self.tokenizer.chat_template, str):
            self.tokenizer.chat_template = without_generation_marks(self.tokenizer.chat_template)
        self.tokenizer.save_pretrained(folder)


def prompt_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Any] | None = None,
    *,
    names: Mapping[str, Any] | None = None,
    asks: bool = True,
    day: date | None = None,
) -> str:
    """Return a conversation and its tools as text; with `asks` it ends with the prompt for the next answer.

    `names` are further ones that the template knows.

    Raises:
        DataError: the chat template rejects it.
    """
    try:
        described = list(tools) if tools else None
        template = tokenizer.get_chat_template(tools=described)
        known_names = tokenizer.special_tokens_map | (names or {})
        return text_of(template, messages, names=known_names, tools=described, prompt=asks, day=day)[0]
    except ValueError as error:  # of a tokenizer without a template too
        raise DataError(f"the chat template rejects the conversation: {str(error).rstrip('.')}") from error
