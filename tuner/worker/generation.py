"""One answer of a model to a conversation in its chat template; the text is passed on while it is generated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel

from tuner.data.text_encoder import TextEncoder

_SEARCHES = (
    *("num_beams", "num_beam_groups", "diversity_penalty", "num_return_sequences", "penalty_alpha", "dola_layers"),
    *("constraints", "force_words_ids", "prompt_lookup_num_tokens", "assistant_early_exit"),
)

Message = dict[str, Any]
OnText = Callable[[str], None]


_MIN_TEMPERATURE = 1e-5
"""Source: vLLM, `_SAMPLING_EPS`, below which it takes the most probable token too."""


@dataclass(frozen=True)
class Settings:
    """How tokens are chosen. None takes the value of the model's generation_config; temperature 0 is greedy.

    So is one below `_MIN_TEMPERATURE`: scores that are divided by it are no numbers any more.
    """

    max_new_tokens: int = 512
    temperature: float | None = None
    top_p: float | None = None

    def arguments(self) -> dict[str, object]:
        if self.temperature is not None and self.temperature < _MIN_TEMPERATURE:
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

    def __init__(self, encoder: TextEncoder, on_text: OnText) -> None:
        super().__init__(encoder.library_object, skip_prompt=True, skip_special_tokens=True)
        self.ids: list[int] = []
        self._on_text = on_text

    def put(self, value: torch.Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.ids += value.flatten().tolist()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._on_text(text)


def generate(
    model: PreTrainedModel,
    encoder: TextEncoder,
    ids: torch.Tensor,
    settings: Settings,
    on_text: OnText = lambda _: None,
    *,
    pixels: Mapping[str, torch.Tensor] | None = None,
    interruptible: bool = False,
) -> Answer:
    """Return the answer to a prompt, and pass on its text while it is generated.

    Args:
        interruptible: Ctrl-C ends the answer and keeps its text so far; the program goes on.
    """
    ids = ids.to(model.device)
    stream = _Stream(encoder, on_text)
    with torch.inference_mode(), suppress(KeyboardInterrupt) if interruptible else nullcontext():
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            pad_token_id=encoder.pad_id,
            streamer=stream,
            **on_device(model, pixels or {}),
            **settings.arguments(),
        )
    stream.end()
    text = encoder.decode(stream.ids, skips_special=True)
    return Answer(text, len(stream.ids), bool(stream.ids) and stream.ids[-1] in end_ids(model.generation_config))


def on_device(model: PreTrainedModel, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors on the device of a model, those of numbers with a fraction in its type."""
    return {
        name: value.to(model.device, model.dtype if value.is_floating_point() else None)
        for name, value in values.items()
    }


def end_ids(generation: GenerationConfig) -> list[int]:
    ends = generation.eos_token_id
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def stop_where_answers_end(generation: GenerationConfig, encoder: TextEncoder) -> None:
    """Add the token that ends an answer in the chat template to the tokens that end generation."""
    # A base model's own end token ends a document: the model would go on after the <|im_end|> that it has learned.
    ends, end = end_ids(generation), encoder.answer_end()
    if end is not None and end not in ends:
        generation.eos_token_id = [*ends, end]


def ask_for_one_answer(generation: GenerationConfig) -> None:
    """Switch off searches among several answers: they cannot be streamed, and some run code from the hub."""
    for name in _SEARCHES:
        setattr(generation, name, None)
