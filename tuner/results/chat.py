"""Answers of a loaded model, with the template and the stop tokens that it was trained with, within its context.

It prints nothing; whoever asks gets the text as it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from tuner.data import limits
from tuner.errors import DataError, ModelError, UsageError
from tuner.results.subject import Loaded, Subject

Message = dict[str, Any]
Told = Callable[[str], None]


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

    def __init__(self, tokenizer: Any, told: Told) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.ids: list[int] = []
        self._told = told

    def put(self, value: torch.Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.ids += value.flatten().tolist()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._told(text)


def check_can_answer(subject: Subject, tokenizer: Any) -> None:
    """Check that a model can be asked.

    Raises:
        ModelError: it scores answers instead of writing them, or has no chat template.
    """
    if subject.scores:
        what = f"{subject.told} scores answers and writes none"
        raise ModelError(what, fix="Judge it with: tuner eval.")
    if not tokenizer.chat_template:
        what = f"the tokenizer of {subject.told} has no chat template"
        raise ModelError(what, fix="Take a chat model, or train with model.chat_template.")


def check_room(subject: Subject, ids: torch.Tensor) -> None:
    """Check that the model's context has room for an answer to a prompt, shape (1, tokens).

    Raises:
        UsageError: it has none.
    """
    if subject.context_tokens is not None and ids.shape[1] >= subject.context_tokens:
        what = f"a prompt has {ids.shape[1]:,} tokens, and the model's context {subject.context_tokens:,}"
        raise UsageError(what, fix="Shorten it.")


class Chat:
    """A conversation with a model. `turns` are the user's and the model's, without the system prompt."""

    def __init__(self, loaded: Loaded, settings: Settings, system: str | None = None, seed: int = 42) -> None:
        """Begin a conversation; the same seed and questions give the same answers.

        Raises:
            ModelError: as `check_can_answer`.
        """
        check_can_answer(loaded.subject, loaded.tokenizer)
        self._loaded, self._settings, self.system = loaded, settings, system
        self.turns: list[Message] = []
        transformers.set_seed(seed)

    def ask(self, text: str, told: Told, *, interruptible: bool = False) -> Answer:
        """Return the answer, and hand it on in pieces while it comes.

        Args:
            text: What the user says.
            told: Takes the pieces.
            interruptible: Ctrl-C ends the answer, which is kept as far as it came, and not the program.

        Raises:
            UsageError: the context has no room for `text`.
            DataError: the chat template refuses the conversation.
        """
        turns = [*self.turns, {"role": "user", "content": text}]
        ids, num_dropped = self._fitting(turns)
        answer = _generate(self._loaded, ids, self._settings, told, interruptible)
        turns.append({"role": "assistant", "content": answer.text})
        self.turns = turns[num_dropped:]
        return Answer(answer.text, answer.num_tokens, answer.is_whole, num_dropped)

    def _fitting(self, turns: list[Message]) -> tuple[torch.Tensor, int]:
        """Return the prompt, without the oldest turns where the context has no room for them, and their number."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        most = self._loaded.subject.context_tokens
        room = None if most is None else most - min(self._settings.max_new_tokens, most // 2)
        for num_dropped in range(0, len(turns), 2):
            ids = prompt_ids(self._loaded.tokenizer, [*system, *turns[num_dropped:]])
            if room is None or ids.shape[1] <= room:
                return ids, num_dropped
        return ids, num_dropped


def answer(loaded: Loaded, messages: list[Message], settings: Settings) -> Answer:
    """Return the answer to a conversation that ends with the user's turn. Errors as `Chat.ask`."""
    ids = prompt_ids(loaded.tokenizer, messages)
    return _generate(loaded, ids, settings, lambda _: None, interruptible=False)


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
        raise DataError(f"the chat template refuses the conversation: {told}") from error


def prompt_ids(tokenizer: Any, messages: list[Message]) -> torch.Tensor:
    """Return a conversation as the tokens that ask for the next answer, shape (1, tokens).

    Raises:
        DataError: the chat template refuses it.
    """
    text = prompt_text(tokenizer, messages)
    limits.check_text(tokenizer, text, "the conversation")
    # No special tokens added: the template has written them.
    found = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    ids: torch.Tensor = found["input_ids"]
    return ids


def _generate(loaded: Loaded, ids: torch.Tensor, settings: Settings, told: Told, interruptible: bool) -> Answer:
    check_room(loaded.subject, ids)
    arguments = settings.arguments()
    if (most := loaded.subject.context_tokens) is not None:
        arguments["max_new_tokens"] = min(settings.max_new_tokens, most - ids.shape[1])
    ids = ids.to(loaded.model.device)
    stream = _Stream(loaded.tokenizer, told)
    with torch.inference_mode(), _ended_by_interrupt(interruptible):
        loaded.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            pad_token_id=loaded.tokenizer.pad_token_id,
            streamer=stream,
            **arguments,
        )
    stream.end()
    ends = loaded.model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    text = loaded.tokenizer.decode(stream.ids, skip_special_tokens=True)
    return Answer(str(text), len(stream.ids), bool(stream.ids) and stream.ids[-1] in ends)


@contextmanager
def _ended_by_interrupt(interruptible: bool) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        if not interruptible:
            raise
