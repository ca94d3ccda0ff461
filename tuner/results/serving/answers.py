"""Answers in OpenAI's objects: text up to a stop string, log probabilities, tool calls; whole or as a stream.

It generates no tokens and knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from tuner.data.text_encoder import TextEncoder
from tuner.results import compat
from tuner.results.serving.engine import Engine, Prompt, Sampler, Sampling
from tuner.results.serving.prompts import Prompts, Written
from tuner.results.serving.requests import ChatRequest, CompletionRequest, Refused, refuse_not_generated

_REPLACEMENT = "\ufffd"


class AnswerText:
    """The text of an answer while its tokens arrive.

    Attributes:
        text: The text so far; without a stop string and what follows it.
        is_stopped: A stop string was found.
        starts: Of each token, where its text begins.
    """

    def __init__(self, encoder: TextEncoder, stops: Sequence[str]) -> None:
        self._encoder, self._stops = encoder, stops
        self._ids: list[int] = []
        self._read, self._decoded = 0, 0  # tokens before the window, and those whose text is in `text`
        self._num_taken = 0
        self.text, self.is_stopped = "", False
        self.starts: list[int] = []

    def add(self, token: int) -> None:
        self._ids.append(token)
        self.starts.append(len(self.text))
        piece = self._new()
        # Half of a character: the next token brings the rest.
        if piece and not piece.endswith(_REPLACEMENT):
            self._grow(piece)
            self._read, self._decoded = self._decoded, len(self._ids)

    def end(self) -> None:
        """Take what is left: there are no more tokens."""
        if not self.is_stopped and (piece := self._new()):
            self._grow(piece)

    def take(self, *, is_last: bool = False) -> str:
        """Return the text since the last call that no stop string can begin in; at the end all."""
        num_held = 0 if is_last or self.is_stopped else self._num_that_may_stop()
        end = len(self.text) - num_held
        piece, self._num_taken = self.text[self._num_taken : end], max(end, self._num_taken)
        return piece

    def _new(self) -> str:
        # A token's text depends on those before it: a word's first token in SentencePiece begins with a space.
        before = self._encoder.decode(self._ids[self._read : self._decoded], skips_special=True)
        return self._encoder.decode(self._ids[self._read :], skips_special=True)[len(before) :]

    def _grow(self, piece: str) -> None:
        longest = max(map(len, self._stops), default=0)
        start = max(0, len(self.text) - longest)
        self.text += piece
        ends = [place for stop in self._stops if (place := self.text.find(stop, start)) >= 0]
        if ends:
            self.text, self.is_stopped = self.text[: min(ends)], True

    def _num_that_may_stop(self) -> int:
        longest = max(map(len, self._stops), default=1) - 1
        tails = range(min(longest, len(self.text)), 0, -1)
        return next((size for size in tails if any(stop.startswith(self.text[-size:]) for stop in self._stops)), 0)


@dataclass(frozen=True)
class _Piece:
    """A part of one choice: text, and the tokens in it, each by its number and where its text begins.

    The last one has the reason of its end.
    """

    index: int
    text: str
    tokens: Sequence[tuple[int, int]] = ()
    finish: str | None = None


class _Choice:
    """One choice: its generation, text and sampler."""

    def __init__(self, index: int, prompt: Prompt, sampler: Sampler, text: AnswerText) -> None:
        self.index, self.prompt, self.sampler, self.answer = index, prompt, sampler, text
        self.ids: list[int] = []
        self.finish = "length"

    async def pieces(self, engine: Engine, limit: int, ends: frozenset[int]) -> AsyncIterator[_Piece]:
        answer, num_shown = self.answer, 0
        async with aclosing(engine.tokens(self.prompt, self.sampler.choose, limit)) as tokens:  # type: ignore[type-var]
            async for token in tokens:
                self.ids.append(token)
                if token in ends:
                    self.finish = "stop"
                    break
                answer.add(token)
                if answer.is_stopped:
                    break
                if piece := answer.take():
                    yield _Piece(self.index, piece, self._shown(num_shown))
                    num_shown = len(answer.starts)
        answer.end()
        if answer.is_stopped:
            self.finish = "stop"
        yield _Piece(self.index, answer.take(is_last=True), self._shown(num_shown), self.finish)

    def _shown(self, start: int) -> list[tuple[int, int]]:
        """Return the tokens from the token `start` on that have text in the answer."""
        answer = self.answer
        shown = enumerate(answer.starts[start:], start)
        return [(number, place) for number, place in shown if not answer.is_stopped or place < len(answer.text)]


class Answers:
    def __init__(
        self, name: str, encoder: TextEncoder, prompts: Prompts, engine: Engine, sampling: Sampling, model_type: str
    ) -> None:
        self._name, self._encoder, self._prompts = name, encoder, prompts
        self._engine, self._sampling = engine, sampling
        self._template = compat.response_template(encoder.tokenizer, model_type)

    @property
    def is_alive(self) -> bool:
        return self._engine.is_alive

    async def begin(self, request: ChatRequest | CompletionRequest) -> Answer:
        """Check a request, make its prompts, and return its answer, not yet generated.

        Raises:
            Refused: it cannot be answered.
        """
        refuse_not_generated(request)
        if isinstance(request, ChatRequest):
            if request.offered_tools and self._template is None:
                problem = "transformers does not know how the answers of this model hold tool calls"
                raise Refused(400, problem, parameter="tools", code="unsupported_parameter")
            prompts = [await self._prompts.of_chat(request)]
        else:
            prompts = [await self._prompts.of_text(text) for text in request.prompts]
        context_tokens = self._engine.context_tokens
        if context_tokens is not None and any(len(prompt.ids) >= context_tokens for prompt in prompts):
            raise Refused(
                400, f"the prompt fills the {context_tokens:,} tokens of memory here", code="context_length_exceeded"
            )
        choices = [
            self._choice(index, prompt, request)
            for index, prompt in enumerate(prompt for prompt in prompts for _ in range(request.n or 1))
        ]
        return Answer(self, request, prompts, choices)

    def _choice(self, index: int, prompt: Prompt, request: ChatRequest | CompletionRequest) -> _Choice:
        sampler = self._sampling.sampler(
            prompt,
            temperature=request.temperature,
            top_p=request.top_p,
            seed=None if request.seed is None else (request.seed + index + 2**63) % 2**64 - 2**63,  # torch takes these
            num_logprobs=request.num_logprobs,
        )
        return _Choice(index, prompt, sampler, AnswerText(self._encoder, request.stops))


class Answer:
    def __init__(
        self,
        answers: Answers,
        request: ChatRequest | CompletionRequest,
        prompts: Sequence[Prompt],
        choices: Sequence[_Choice],
    ) -> None:
        self._answers, self._request, self._prompts, self._choices = answers, request, prompts, choices
        self._is_chat = isinstance(request, ChatRequest)
        prefix = "chatcmpl-" if self._is_chat else "cmpl-"
        self._head = {"id": f"{prefix}{uuid.uuid4().hex}", "created": int(time.time()), "model": answers._name}

    async def whole(self) -> dict[str, Any]:
        """Return the answer as one object."""
        pieces: list[list[_Piece]] = [[] for _ in self._choices]
        async with aclosing(self._pieces()) as arriving:
            async for piece in arriving:
                pieces[piece.index].append(piece)
        choices = [await self._whole(choice, parts) for choice, parts in zip(self._choices, pieces, strict=True)]
        kind = "chat.completion" if self._is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": self._usage()}

    async def parts(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the answer in the parts of a stream."""
        if self._is_chat:
            for choice in self._choices:
                yield self._part(choice.index, {"role": "assistant", "content": ""})
        async with aclosing(self._pieces()) as arriving:
            async for piece in arriving:
                async for part in self._parts_of(piece):
                    yield part
        options = self._request.stream_options
        if options and options.include_usage:
            kind = "chat.completion.chunk" if self._is_chat else "text_completion"
            yield {**self._head, "object": kind, "choices": [], "usage": self._usage()}

    async def _pieces(self) -> AsyncGenerator[_Piece]:
        """Yield the parts of all choices as they arrive: all are generated at once."""
        arriving: asyncio.Queue[_Piece | Exception] = asyncio.Queue()

        async def run(choice: _Choice) -> None:
            try:
                async with aclosing(self._of(choice)) as pieces:
                    async for piece in pieces:
                        arriving.put_nowait(piece)
            except Exception as error:
                arriving.put_nowait(error)

        running = [asyncio.create_task(run(choice)) for choice in self._choices]
        try:
            num_running = len(running)
            while num_running:
                piece = await arriving.get()
                if isinstance(piece, Exception):
                    raise piece
                num_running -= piece.finish is not None
                yield piece
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _of(self, choice: _Choice) -> Any:
        engine, max_tokens = self._answers._engine, self._request.most_tokens
        room = None if engine.context_tokens is None else engine.context_tokens - len(choice.prompt.ids)
        limits = [limit for limit in (max_tokens, room) if limit is not None]
        return choice.pieces(engine, min(limits, default=_UNKNOWN_CONTEXT), self._answers._sampling.ends)

    # Objects

    async def _parts_of(self, piece: _Piece) -> AsyncIterator[dict[str, Any]]:
        choice = self._choices[piece.index]
        if self._offers_tools:
            # A call is one when its last token is there: such an answer arrives at its end.
            if piece.finish:
                message, finish = await self._message(choice)
                calls = [{"index": number, **call} for number, call in enumerate(message.get("tool_calls", ()))]
                delta = {key: value for key, value in message.items() if key not in ("role", "tool_calls") and value}
                yield self._part(piece.index, delta | ({"tool_calls": calls} if calls else {}), self._logprobs(choice))
                yield self._part(piece.index, {}, finish=finish)
            return
        if piece.text or piece.tokens:
            yield self._part(piece.index, {"content": piece.text}, self._logprobs(choice, piece.tokens))
        if piece.finish:
            yield self._part(piece.index, {"content": ""} if not self._is_chat else {}, finish=piece.finish)

    def _part(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, *, finish: str | None = None
    ) -> dict[str, Any]:
        body = {"delta": delta} if self._is_chat else {"text": delta["content"]}
        choice = {"index": index, **body, "logprobs": logprobs, "finish_reason": finish}
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": [choice]}

    async def _whole(self, choice: _Choice, pieces: Sequence[_Piece]) -> dict[str, Any]:
        logprobs = self._logprobs(choice, [token for piece in pieces for token in piece.tokens])
        message, finish = await self._message(choice)
        body = {"message": message} if self._is_chat else {"text": choice.answer.text}
        return {"index": choice.index, **body, "logprobs": logprobs, "finish_reason": finish}

    @property
    def _offers_tools(self) -> bool:
        return isinstance(self._request, ChatRequest) and bool(self._request.offered_tools)

    async def _message(self, choice: _Choice) -> tuple[dict[str, Any], str]:
        """Return the message, with tool calls if tools were offered, and the reason of its end."""
        message: dict[str, Any] = {"role": "assistant", "content": choice.answer.text}
        if not self._offers_tools:
            return message, choice.finish
        answers, request = self._answers, self._request
        assert isinstance(request, ChatRequest) and answers._template is not None
        written = Written(choice.ids, request.stops, choice.prompt.ids, answers._template, request.offered_tools)
        read = await answers._prompts.message_of(written)
        if read is None:  # the client sees what the model wrote
            return message, choice.finish
        if read.thought:
            message["reasoning_content"] = read.thought
        message["content"] = read.content or (None if read.calls else "")
        if read.calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{uuid.uuid4().hex[:24]}",
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
                for name, arguments in read.calls
            ]
        return message, "tool_calls" if read.calls and choice.finish == "stop" else choice.finish

    def _usage(self) -> dict[str, int]:
        prompt = sum(len(prompt.ids) for prompt in self._prompts)
        answer = sum(len(choice.ids) for choice in self._choices)
        return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}

    def _logprobs(self, choice: _Choice, tokens: Sequence[tuple[int, int]] | None = None) -> dict[str, Any] | None:
        if self._request.num_logprobs is None:
            return None
        if tokens is None:
            tokens = list(enumerate(choice.answer.starts))
        if self._is_chat:
            return {"content": [self._of_chat(choice, number) for number, _ in tokens], "refusal": None}
        places = [choice.sampler.logprobs[number] for number, _ in tokens]
        return {
            "tokens": [self._text(choice.ids[number]) for number, _ in tokens],
            "token_logprobs": [logprobs.chosen for logprobs in places],
            "top_logprobs": [{self._text(token): value for token, value in logprobs.top} for logprobs in places],
            "text_offset": [place for _, place in tokens],
        }

    def _of_chat(self, choice: _Choice, number: int) -> dict[str, Any]:
        logprobs = choice.sampler.logprobs[number]
        top = [self._token(token, value) for token, value in logprobs.top]
        return {**self._token(choice.ids[number], logprobs.chosen), "top_logprobs": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        is_whole = _REPLACEMENT not in text  # the bytes of half a character are not told by its text
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if is_whole else None}

    def _text(self, token: int) -> str:
        return self._answers._encoder.decode([token], exact=True)


_UNKNOWN_CONTEXT = 1024
"""The longest answer where neither the request nor the model's config says."""
