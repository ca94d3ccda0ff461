"""One answer of a model to a conversation, as its chat template writes it; the text is handed on while it comes.

It loads nothing and prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from tuner.data import limits
from tuner.data.templates import answers_end
from tuner.errors import DataError

_SEARCHES = (
    *("num_beams", "num_beam_groups", "diversity_penalty", "num_return_sequences", "penalty_alpha", "dola_layers"),
    *("constraints", "force_words_ids", "prompt_lookup_num_tokens", "assistant_early_exit"),
)

Message = dict[str, Any]
OnText = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """How answers are chosen. None: as the model's own generation_config says; temperature 0: the likeliest token."""

    max_new_tokens: int = 512
    temperature: float | None = None
    top_p: float | None = None

    def arguments(self) -> dict[str, Any]:
        """Return them as `generate` takes them."""
        if self.temperature == 0:
            return {"max_new_tokens": self.max_new_tokens, "do_sample": False}
        given = {"temperature": self.temperature, "top_p": self.top_p}
        given = {name: value for name, value in given.items() if value is not None}
        return {"max_new_tokens": self.max_new_tokens, **given, **({"do_sample": True} if given else {})}


@dataclass(frozen=True)
class Answer:
    """What a model said. `is_whole`: it ended by itself. `num_dropped`: turns that its context had no room for."""

    text: str
    num_tokens: int
    is_whole: bool
    num_dropped: int = 0


class _Stream(transformers.TextStreamer):  # type: ignore[misc]
    """Hands on text as soon as its words are whole, and keeps the tokens: an interrupted answer is one too."""

    def __init__(self, tokenizer: Any, on_text: OnText) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.ids: list[int] = []
        self._on_text = on_text

    def put(self, value: torch.Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.ids += value.flatten().tolist()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._on_text(text)


def prompt_text(tokenizer: Any, messages: list[Message], *, asks: bool = True) -> str:
    """Return a conversation as text, which where it `asks` ends with what asks for the next answer.

    Raises:
        DataError: the chat template refuses it.
    """
    slow = DataError(f"the chat template takes more than {limits.MAX_TEMPLATE_S} s of processor time")
    try:
        with limits.memory(), limits.processor_time(slow):
            return str(tokenizer.apply_chat_template(messages, add_generation_prompt=asks, tokenize=False))
    except DataError:
        raise
    except Exception as error:  # a template is someone else's program: it can raise whatever it likes
        told = str(error).rstrip(".") or type(error).__name__
        raise DataError(f"the chat template rejects the conversation: {told}") from error


def prompt_ids(tokenizer: Any, messages: list[Message]) -> torch.Tensor:
    """Return a conversation as the tokens that ask for the next answer, shape (1, tokens).

    Raises:
        DataError: the chat template refuses it.
    """
    text = prompt_text(tokenizer, messages)
    limits.check_text(tokenizer, text, "the conversation")
    # No special tokens added: the template has written them.
    ids: torch.Tensor = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    return ids


def generate(
    model: Any,
    tokenizer: Any,
    ids: torch.Tensor,
    settings: Settings,
    on_text: OnText = lambda _: None,
    *,
    interruptible: bool = False,
) -> Answer:
    """Return the answer to a prompt, and hand it on in pieces while it comes.

    Args:
        model: In eval mode.
        tokenizer: The model's.
        ids: What `prompt_ids` returned.
        settings: How to choose.
        on_text: Takes the pieces.
        interruptible: Ctrl-C ends the answer, which is kept as far as it came, and not the program.
    """
    ids = ids.to(model.device)
    stream = _Stream(tokenizer, on_text)
    with torch.inference_mode(), suppress(KeyboardInterrupt) if interruptible else nullcontext():
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            pad_token_id=tokenizer.pad_token_id,
            streamer=stream,
            **settings.arguments(),
        )
    stream.end()
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    text = tokenizer.decode(stream.ids, skip_special_tokens=True)
    return Answer(str(text), len(stream.ids), bool(stream.ids) and stream.ids[-1] in ends)


def stop_where_answers_end(generation: Any, tokenizer: Any) -> None:
    """Add the token that closes an answer in the tokenizer's chat template to those that end generation."""
    # A base model's own end is that of a document: it would go on after the <|im_end|> that it has learned to write.
    known, end = generation.eos_token_id, answers_end(tokenizer)
    ends = list(known) if isinstance(known, list) else [known] if known is not None else []
    if end is not None and end not in ends:
        generation.eos_token_id = [*ends, end]


def ask_for_one_answer(generation: Any) -> None:
    """Switch off searches among several answers: they cannot be streamed, and some run code of the hub's."""
    for name in _SEARCHES:
        setattr(generation, name, None)
