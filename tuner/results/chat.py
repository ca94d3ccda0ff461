"""A conversation with a loaded model, within its context length: the oldest turns are dropped if needed.

It prints nothing; the caller receives the text while it is generated.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import torch

from tuner import paths
from tuner.data import images
from tuner.data.sample import Image
from tuner.data.text_encoder import TextEncoder
from tuner.errors import DataError, ModelError, UsageError
from tuner.machine.hardware import Hardware
from tuner.results.loaded_model import LoadedModel, ModelSpec, encoder_of, load, spec_of, unchanged_random_state
from tuner.worker.generation import Answer, Message, OnText, Settings, generate


def check_can_answer(spec: ModelSpec, encoder: TextEncoder) -> None:
    """Check that a model can answer.

    Raises:
        ModelError: it scores answers instead of generating them, or has no chat template.
    """
    if spec.scores:
        problem = f"{spec.description} is a reward model: it scores answers and writes none"
        raise ModelError(problem, fix="Evaluate it with: tuner eval.")
    if not encoder.has_template:
        problem = f"the tokenizer of {spec.description} has no chat template"
        raise ModelError(problem, fix="Use a chat model, or train with model.chat_template.")


def check_room(spec: ModelSpec, ids: torch.Tensor) -> None:
    """Check that the model's context has room for an answer to a prompt, shape (1, tokens).

    Raises:
        UsageError: the prompt fills the context.
    """
    if spec.context_tokens is not None and ids.shape[1] >= spec.context_tokens:
        problem = f"a prompt has {ids.shape[1]:,} tokens, and the model's context has {spec.context_tokens:,}"
        raise UsageError(problem, fix="Shorten it.")


def begin(
    source: str,
    hardware: Hardware,
    settings: Settings,
    *,
    adapter: str | None = None,
    trust_remote_code: bool = False,
    bits: int | None = None,
    system: str | None = None,
    seed: int = 42,
) -> Chat:
    """Load the model that `source` names, and start a conversation.

    Args:
        source, adapter, trust_remote_code: As for `spec_of`.
        bits: As for `load`.
        seed: Of the sampling.

    Raises:
        TunerError: as `spec_of`, `load` and `Chat`.
    """
    spec = spec_of(source, adapter, trust_remote_code=trust_remote_code)
    check_can_answer(spec, encoder_of(spec))  # before the weights are read
    return Chat(load(spec, hardware, bits), settings, system, seed)


class Chat:
    """A conversation with a model. `turns` are the turns of user and model, without the system prompt."""

    def __init__(self, loaded: LoadedModel, settings: Settings, system: str | None = None, seed: int = 42) -> None:
        """Start a conversation; the same seed and questions give the same answers.

        Raises:
            ModelError: as `check_can_answer`.
        """
        check_can_answer(loaded.spec, loaded.encoder)
        self._loaded, self._settings, self.system = loaded, settings, system
        self.turns: list[Message] = []
        self._shown: list[Image] = []
        self._seeds = itertools.count(seed)

    @property
    def description(self) -> str:
        return self._loaded.description

    def __repr__(self) -> str:
        return f"Chat({self.description}, {len(self.turns)} turns)"

    def show(self, path: str) -> tuple[int, int]:
        """Show an image with the next question; return its width and height in pixels.

        Raises:
            UsageError: the model reads text alone.
            DataError: the file is missing, or is no image.
        """
        if self._loaded.encoder.image_id is None:
            raise UsageError(f"{self.description} reads text alone, and no images", fix="Use a vision-language model.")
        image = Image(path=str(paths.expanded(path).absolute()))
        try:
            size = images.load(image).size
        except DataError as error:  # its remedies are for rows
            raise DataError(error.what, fix="Use another image.") from error
        self._shown.append(image)
        return size

    def forget(self) -> None:
        """Clear the conversation, and images that wait for a question."""
        self.turns = []
        self._shown.clear()

    def ask(self, text: str, on_text: OnText = lambda _: None, *, interruptible: bool = False) -> Answer:
        """Return the answer, and pass its pieces to `on_text` while they are generated.

        Args:
            interruptible: Ctrl-C ends the answer, not the program; the part so far is kept.

        Raises:
            UsageError: the context has no room for `text`.
            DataError: the chat template refuses the conversation.
        """
        shown = [{"type": "image", "image": image} for image in self._shown]
        self._shown.clear()  # an image that does not fit the context would refuse each later question
        content = [*shown, {"type": "text", "text": text}] if shown else text
        turns = [*self.turns, {"role": "user", "content": content}]
        ids, num_dropped = self._fitting(turns)
        pixels = self._loaded.encoder.pixels_in(turns[num_dropped:], ids)
        with unchanged_random_state():
            torch.manual_seed(next(self._seeds))
            reply = answer(self._loaded, ids, self._settings, on_text, pixels=pixels, interruptible=interruptible)
        turns.append({"role": "assistant", "content": reply.text})
        self.turns = turns[num_dropped:]
        return replace(reply, num_dropped=num_dropped)

    def _fitting(self, turns: list[Message]) -> tuple[torch.Tensor, int]:
        """Return the prompt that fits the context, and how many of the oldest turns were dropped."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        context_tokens = self._loaded.spec.context_tokens
        room = (
            None if context_tokens is None else context_tokens - min(self._settings.max_new_tokens, context_tokens // 2)
        )
        for num_dropped in range(0, len(turns), 2):
            ids = self._loaded.encoder.prompt([*system, *turns[num_dropped:]])
            if room is None or ids.shape[1] <= room:
                return ids, num_dropped
        return ids, num_dropped


def answer(
    loaded: LoadedModel,
    ids: torch.Tensor,
    settings: Settings,
    on_text: OnText = lambda _: None,
    *,
    pixels: Mapping[str, torch.Tensor] | None = None,
    interruptible: bool = False,
) -> Answer:
    """Return the answer to a prompt, shape (1, tokens), within the model's context. Errors as `Chat.ask`."""
    check_room(loaded.spec, ids)
    if (context_tokens := loaded.spec.context_tokens) is not None:
        settings = replace(settings, max_new_tokens=min(settings.max_new_tokens, context_tokens - ids.shape[1]))
    encoder = loaded.encoder
    return generate(loaded.model, encoder, ids, settings, on_text, pixels=pixels, interruptible=interruptible)
