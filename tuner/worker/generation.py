"""One answer of a model to a conversation in its chat template; the text is passed on while it is generated.

It loads nothing and prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers

from tuner.data import limits
from tuner.data.templates import answers_end
from tuner.errors import DataError

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

_SEARCHES = (
    *("num_beams", "num_beam_groups", "diversity_penalty", "num_return_sequences", "penalty_alpha", "dola_layers"),
    *("constraints", "force_words_ids", "prompt_lookup_num_tokens", "assistant_early_exit"),
)

Message = dict[str, Any]
OnText = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """How tokens are chosen. None takes the value of the model's generation_config; temperature 0 is greedy."""

    max_new_tokens: int = 512
    temperature: float | None = None
    top_p: float | None = None

    def arguments(self) -> dict[str, object]:
        """Return the keyword arguments of transformers' `generate`."""
        if self.temperature == 0:
            return {"max_new_tokens": self.max_new_tokens, "do_sample": False}
        options = {"temperature": self.temperature, "top_p": self.top_p}
        options = {name: value for name, value in options.items() if value is not None}
        return {"max_new_tokens": self.max_new_tokens, **options, **({"do_sample": True} if options else {})}


@dataclass(frozen=True)
class Answer:
    """An answer. `is_whole`: it ended by itself. `num_dropped`: turns that did not fit into the context."""

    text: str
    num_tokens: int
    is_whole: bool
    num_dropped: int = 0


class _Stream(transformers.TextStreamer):  # type: ignore[misc]
    """Passes on text as soon as a word is complete, and keeps the tokens, also of an interrupted answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: OnText) -> None:
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


def prompt_text(tokenizer: PreTrainedTokenizerBase, messages: list[Message], *, asks: bool = True) -> str:
    """Return a conversation as text; with `asks` it ends with the prompt for the next answer.

    Raises:
        DataError: the chat template rejects it.
    """
    slow = DataError(f"the chat template takes more than {limits.MAX_TEMPLATE_S} s of processor time")
    try:
        with limits.memory(), limits.processor_time(slow):
            return str(tokenizer.apply_chat_template(messages, add_generation_prompt=asks, tokenize=False))
    except DataError:
        raise
    except Exception as error:  # a template is a foreign program: it can raise any error
        reason = str(error).rstrip(".") or type(error).__name__
        raise DataError(f"the chat template rejects the conversation: {reason}") from error


def prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> torch.Tensor:
    """Return a conversation and the prompt for the next answer as tokens of shape (1, tokens).

    Raises:
        DataError: the chat template rejects it.
    """
    text = prompt_text(tokenizer, messages)
    limits.check_text(tokenizer, text, "the conversation")
    # The template has already written the special tokens.
    ids: torch.Tensor = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    return ids


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: torch.Tensor,
    settings: Settings,
    on_text: OnText = lambda _: None,
    *,
    interruptible: bool = False,
) -> Answer:
    """Return the answer to a prompt, and pass on its text while it is generated.

    Args:
        model: The model in eval mode.
        tokenizer: The model's tokenizer.
        ids: The result of `prompt_ids`.
        settings: How tokens are chosen.
        on_text: Called with each piece of text.
        interruptible: Ctrl-C ends the answer and keeps its text so far; the program goes on.
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


def stop_where_answers_end(generation: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add the token that ends an answer in the chat template to the tokens that end generation."""
    # A base model's own end token ends a document: the model would go on after the <|im_end|> that it has learned.
    known, end = generation.eos_token_id, answers_end(tokenizer)
    ends = list(known) if isinstance(known, list) else [known] if known is not None else []
    if end is not None and end not in ends:
        generation.eos_token_id = [*ends, end]


def ask_for_one_answer(generation: GenerationConfig) -> None:
    """Switch off searches among several answers: they cannot be streamed, and some run code from the hub."""
    for name in _SEARCHES:
        setattr(generation, name, None)
