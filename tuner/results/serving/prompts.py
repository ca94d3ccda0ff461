"""Prompts of requests as tokens, and answers as messages, made in a process of its own.

A chat template and the patterns of a response template are foreign programs: one that takes too long or too much
memory ends there, and the server goes on. It generates nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy

from tuner.data import images, limits
from tuner.data.encoder import Unrendered
from tuner.data.formats import image_places
from tuner.data.formats import turns as conversation
from tuner.data.formats.cells import Misfit
from tuner.data.image_encoder import ImageEncoder
from tuner.data.processes import Worker
from tuner.data.sample import Message as Turn
from tuner.data.sample import text_of
from tuner.data.text_encoder import TextEncoder
from tuner.errors import DataError, MachineError
from tuner.results.serving.engine import Prompt
from tuner.results.serving.requests import ChatRequest, Refused

_MAX_S = 30.0
"""For one prompt, by the clock. Template and tokens of 8 MiB take some seconds; C code that hangs takes for ever."""
_MAX_ANSWER_S = 5.0
"""For the tool calls of one answer: patterns are looked for in some thousand characters."""


@dataclass(frozen=True)
class _Job:
    """A prompt to make: a text, tokens, or the body's turns with the tools."""

    source: str | list[int] | list[dict[str, Any]]
    tools: Sequence[dict[str, Any]] = ()


@dataclass(frozen=True)
class Written:
    """The tokens of an answer, and what they are read with: `template` says how such answers hold tool calls.

    The tokens of the prompt may begin the message.
    """

    ids: Sequence[int]
    stops: Sequence[str]
    prompt_ids: Sequence[int]
    template: dict[str, Any]
    tools: Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Message:
    """An answer that was read: its text, its thoughts, and the name and the arguments (JSON text) of each call."""

    content: str | None
    thought: str | None
    calls: Sequence[tuple[str, str]]


class Prompts:
    """Makes prompts; `end` it."""

    def __init__(self, encoder: TextEncoder, context_tokens: int | None) -> None:
        """Start the process; call it before this one has threads, which a fork does not copy."""
        self._lock = asyncio.Lock()
        # That process waits for one of its own, which it can end and fork anew: it has no threads, as this one will.
        self._process = Worker(_Watched(_Maker(encoder, context_tokens)))

    async def of_chat(self, request: ChatRequest) -> Prompt:
        """Return a conversation with the start of the answer.

        Raises:
            Refused: the model cannot be asked that, or the context has no room for an answer.
        """
        turns = [turn.model_dump(exclude_none=True) for turn in request.messages]
        return await self._made(_Job(turns, request.offered_tools), "messages")

    async def of_text(self, text: str | list[int]) -> Prompt:
        """Return a text as tokens; tokens as they are. Errors as `of_chat`."""
        return await self._made(_Job(text), "prompt")

    async def message_of(self, answer: Written) -> Message | None:
        """Return the message in an answer; None if the model wrote none, such as a call that is no JSON."""
        try:
            message: Message = await self._to_its_end(answer)
        except (DataError, MachineError):
            return None
        return message

    async def _made(self, job: _Job, parameter: str) -> Prompt:
        try:
            result: Prompt | str = await self._to_its_end(job)
        except DataError as error:
            raise Refused(400, error.what, parameter=parameter) from error
        except MachineError as error:
            raise Refused(503, "the server cannot make prompts any more, or is stopping") from error
        if isinstance(result, str):  # it is too long
            raise Refused(400, result, parameter=parameter, code="context_length_exceeded")
        return result

    async def _to_its_end(self, job: _Job | Written) -> Any:
        async def run() -> Any:
            async with self._lock:
                return await asyncio.to_thread(self._process.run, job)

        # Even if the client leaves: what one job gives must not be taken for another's.
        running = asyncio.create_task(run())
        running.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may be left to ask
        return await asyncio.shield(running)

    def end(self) -> None:
        """End the process, whatever it does; requests that wait for it are refused."""
        self._process.end()


class _Watched:
    """Calls a function in a process that a deadline ends; a new one takes the next value."""

    def __init__(self, maker: _Maker) -> None:
        self._maker = maker
        self._worker: Worker | None = None  # a child of the process that calls, which alone can end it

    def __call__(self, job: _Job | Written) -> Any:
        worker = self._worker = self._worker or Worker(self._maker)
        most_s = _MAX_ANSWER_S if isinstance(job, Written) else _MAX_S
        try:
            worker.begin(job)
            if worker.is_done(most_s):
                return worker.result()
            problem = f"its prompt is not made within {most_s:g} s"
        except MachineError:
            problem = "the process that made its prompt was killed: it took too much memory"
        worker.end()
        self._worker = None
        raise DataError(problem)


class _Maker:
    def __init__(self, encoder: TextEncoder, context_tokens: int | None) -> None:
        self._encoder, self._context = encoder, context_tokens
        self._longest = max(map(len, encoder.tokenizer.get_vocab()), default=1)

    def __call__(self, job: _Job | Written) -> Prompt | str | Message:
        if isinstance(job, Written):
            return _message(self._encoder, job)
        # Of texts alone, `prompt` limits the memory of the template, and not of the tokenizer, which takes more.
        has_images = isinstance(self._encoder, ImageEncoder)
        try:
            with limits.memory() if has_images else nullcontext():
                return self._of(job)
        except MemoryError as error:
            raise DataError("its images or its chat template take too much memory") from error
        except (Misfit, Unrendered) as error:
            raise DataError(str(error)) from error

    def _of(self, job: _Job) -> Prompt | str:
        """Return a prompt, or that it is too long."""
        source: Any = job.source
        # Tokens of megabytes take half a minute: most of what is too long is known without them.
        at_least = _num_characters(source) // self._longest
        if self._context is not None and at_least > self._context:
            return self._too_long(f"at least {at_least:,}")
        if isinstance(source, list) and source and isinstance(source[0], int):
            ids = self._known(source)
        else:
            turns = source if isinstance(source, str) else self._turns(source)
            offered = list(job.tools) or None
            ids = self._encoder.prompt(turns, offered)[0].tolist()
            if offered and ids == self._encoder.prompt(turns)[0].tolist():
                raise Misfit("the model's chat template does not show it tools")
        if not ids:
            raise Misfit("the prompt is empty")
        if self._context is not None and len(ids) >= self._context:
            return self._too_long(f"{len(ids):,}")
        return Prompt(ids, self._pixels(source, ids))

    def _too_long(self, num_tokens: str) -> str:
        return f"the prompt has {num_tokens} tokens, and the model's context has {self._context:,}"

    def _known(self, ids: list[int]) -> list[int]:
        count = len(self._encoder.tokenizer)
        if wrong := next((number for number in ids if not 0 <= number < count), None):
            raise Misfit(f"the tokenizer has no token {wrong}")
        return ids

    def _turns(self, source: list[dict[str, Any]]) -> list[Turn]:
        turns = conversation.messages_of(source)
        mark = self._encoder.image_token if isinstance(self._encoder, ImageEncoder) else None
        if mark and any(mark in text_of(turn["content"]) for turn in turns):
            raise Misfit(f"a text holds {mark!r}, which stands for an image in this model")
        return [{**turn, "content": self._content(turn["content"])} for turn in turns]

    def _content(self, content: Any) -> Any:
        if isinstance(content, str):
            return content
        if not isinstance(self._encoder, ImageEncoder):
            raise Misfit("the request has an image, and this model reads text alone")
        return [
            part if part["type"] == "text" else {"type": "image", "image": _image(part["image"])} for part in content
        ]

    def _pixels(self, source: Any, ids: list[int]) -> dict[str, numpy.ndarray]:
        if not isinstance(self._encoder, ImageEncoder) or isinstance(source, str) or isinstance(source[0], int):
            return {}
        import torch  # a prompt of text alone makes no tensors

        torch.set_num_threads(1)  # effect: the threads of the parent did not come along
        tensors = self._encoder.pixels_in(self._turns(source), torch.tensor([ids]))
        return {name: values.numpy() for name, values in tensors.items()}


def _message(encoder: TextEncoder, answer: Written) -> Message:
    text = encoder.decode(answer.ids, exact=True)
    for stop in answer.stops:
        text = text.partition(stop)[0]
    prefix = encoder.decode(answer.prompt_ids, exact=True)
    try:
        with limits.memory():
            parsed = encoder.tokenizer.parse_response(text, answer.template, prefix=prefix, tools=[*answer.tools])
        calls = [_called(call["function"]) for call in parsed.get("tool_calls") or ()]
        content, thought = parsed.get("content"), parsed.get("reasoning_content") or parsed.get("thinking")
        if not (isinstance(content, str | None) and isinstance(thought, str | None)):
            raise TypeError("no text")
    except (LookupError, ValueError, TypeError, AttributeError, MemoryError, RecursionError) as error:
        raise DataError(f"its answer is no message: {error}") from error
    return Message(content, thought, calls)


def _called(function: Any) -> tuple[str, str]:
    name, arguments = function["name"], function["arguments"]
    if not isinstance(name, str):
        raise TypeError("a function without a name")
    return name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _num_characters(source: Any) -> int:
    """Return the characters of a text, or of what the user says: every chat template shows that whole."""
    if isinstance(source, str):
        return len(source)
    turns = [turn for turn in source if isinstance(turn, dict) and turn["role"] == "user"]
    return sum(len(text_of(turn.get("content") or "")) for turn in turns)


def _image(address: Any) -> Any:
    url = address["url"] if isinstance(address, dict) else address
    image = image_places.of_data_uri(url)
    if image is None:
        problem = "an image must be a data URI (data:image/png;base64,...): this server opens no files and addresses"
        raise Misfit(problem)
    images.size_of(image)  # an image that cannot be read is refused before the others are made pixels
    return image
