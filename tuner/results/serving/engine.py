"""Generates the tokens of several requests at once with transformers, each by its own settings.

It renders no prompts and decodes no answers. transformers' `ContinuousBatchingManager` batches requests; each one
chooses its tokens by itself (`Sampler`), since the manager has one setting of greedy or not, and one seed, for all.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.continuous_batching.requests import FutureRequestState

from tuner.data.text_encoder import TextEncoder
from tuner.results import compat
from tuner.worker.generation import Settings, end_ids, on_device

_LOG = logging.getLogger(__name__)
_MAX_AT_ONCE = 64
"""Requests in one batch: each takes the scores of a whole vocabulary. The others wait."""
_PAGE = 256
_MAX_CPU_TOKENS = 32_768
"""Of several requests, on a CPU; one whole context if that is longer. On GPUs the manager takes what is free."""
_MAX_CPU_BATCH = 512
_STOP_S = 2.0
Choose = Callable[[Sequence[int] | torch.Tensor, torch.Tensor], int]
"""Returns the next token, from the tokens so far and the scores of the whole vocabulary."""


@dataclass(frozen=True)
class Prompt:
    """A prompt's tokens, and the pixels of its images by their name in the model."""

    ids: list[int]
    pixels: dict[str, numpy.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenLogprobs:
    """The log probability of a chosen token, and the most probable tokens there with theirs."""

    chosen: float
    top: list[tuple[int, float]]


class Sampler:
    """Chooses the tokens of one answer.

    Attributes:
        logprobs: Of each chosen token, by the model itself, before temperature and top_p; empty unless asked for.
    """

    def __init__(
        self,
        processors: LogitsProcessorList,
        *,
        draws: bool,
        device: torch.device,
        seed: int | None = None,
        num_logprobs: int | None = None,
    ) -> None:
        """Begin an answer.

        Args:
            processors: What is done to the scores first.
            draws: Draw by probability; else take the most probable token.
            seed: None: another answer each time.
            num_logprobs: How many of the most probable tokens `logprobs` holds; None: `logprobs` stays empty.
        """
        self._processors, self._draws, self._num_logprobs = processors, draws, num_logprobs
        self._random = torch.Generator(device)
        if seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(seed)
        self.logprobs: list[TokenLogprobs] = []

    def choose(self, ids: Sequence[int] | torch.Tensor, scores_V: torch.Tensor) -> int:
        """Return the next token, from the scores of the whole vocabulary after `ids`."""
        scores_V = scores_V.float()
        processed_V = scores_V
        if len(self._processors):
            ids_T = torch.as_tensor(ids, device=scores_V.device)
            processed_V = self._processors(ids_T[None], scores_V[None].clone())[0]
        if self._draws:
            token = int(torch.multinomial(processed_V.softmax(-1), 1, generator=self._random))
        else:
            token = int(processed_V.argmax())
        if self._num_logprobs is not None:
            logprobs_V = scores_V.log_softmax(-1)
            values, tokens = logprobs_V.topk(min(self._num_logprobs, len(logprobs_V)))
            top = list(zip(tokens.tolist(), values.tolist(), strict=True))
            self.logprobs.append(TokenLogprobs(float(logprobs_V[token]), top))
        return token


class GenerationFailed(Exception):
    """The library's generation ended with an error, which the request has not caused."""


class Sampling:
    """Makes the samplers of a model: its own generation config with what a request says."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Copy the model's config: `begin` sets another one."""
        self._model, self._config = model, deepcopy(model.generation_config)
        self.ends = frozenset(end_ids(self._config))

    def sampler(
        self,
        prompt: Prompt,
        *,
        temperature: float | None,
        top_p: float | None,
        seed: int | None,
        num_logprobs: int | None,
    ) -> Sampler:
        """Return the sampler of an answer to a prompt; None takes the value of the model's generation config."""
        config = deepcopy(self._config)
        settings = Settings(temperature=temperature, top_p=top_p).arguments()
        if settings.get("do_sample") is False:
            settings |= {"temperature": None, "top_p": None, "top_k": None}
        config.update(**settings)
        return Sampler(
            compat.logits_processors(self._model, config, len(prompt.ids)),
            draws=bool(config.do_sample),
            device=self._model.device,
            seed=seed,
            num_logprobs=num_logprobs,
        )


def whole_model(model: Any) -> PreTrainedModel:
    """Return transformers' model inside of PEFT's; the adapter's weights are in its layers, its config is the same."""
    if not hasattr(model, "get_base_model"):
        return model
    base_model: PreTrainedModel = model.get_base_model()
    base_model.generation_config = model.generation_config  # the tokens that end an answer of the adapter
    return base_model


def begin(model: PreTrainedModel, encoder: TextEncoder, context_tokens: int | None) -> Engine:
    """Return the engine for a model: the manager where it gives what the model itself gives, else one by one."""
    ends = end_ids(model.generation_config)
    # What a request chooses is done by its sampler; `generate` and the manager would do the model's defaults once more.
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=ends or None, pad_token_id=encoder.pad_id)
    if encoder.image_id is not None:
        # The manager passes tokens alone to the model: neither pixels nor the positions of an image's tokens.
        return OneByOne(model, context_tokens, ends)
    return of_model(model, context_tokens, ends, [encoder.prompt(text)[0].tolist()[:32] for text in _TRIAL_TEXTS])


def of_model(
    model: PreTrainedModel, context_tokens: int | None, ends: list[int], trials: Sequence[list[int]]
) -> Engine:
    """Return the engine for a model of text: see `begin`; `trials` are the tokens of some texts."""
    try:
        return Continuous.checked(model, context_tokens, ends, trials)
    except _NotBatched as error:
        _LOG.warning("Requests are answered one after the other: %s", error)
        return OneByOne(model, context_tokens, ends)


class _NotBatched(Exception):
    """The manager cannot generate with a model."""


_TRIAL_TEXTS = ("The capital of Denmark is Copenhagen, a city by the sea.", "One, two, three, four, five, six, seven.")
_NUM_TRIAL_TOKENS = 3
_TRIAL_S = 120.0
_MAX_DIFFERENCE = 0.1
"""Of the scores, relative to their spread: in bfloat16 and in 4 bits they differ by hundredths in a batch."""


class Continuous:
    """Generation in one batch by transformers' manager, which a thread of its own steps.

    `context_tokens`: prompt and answer together have at most so many.
    """

    def __init__(self, model: PreTrainedModel, context_tokens: int | None, ends: list[int]) -> None:
        """Start the manager. Raises _NotBatched: the manager refuses the model."""
        self._ends = ends or [-1]  # none
        self._each = _EachByItself()
        max_context_tokens = context_tokens or _MAX_CPU_TOKENS
        on_cpu = model.device.type == "cpu"
        tokens = max(max_context_tokens, min(_MAX_CPU_TOKENS, 8 * max_context_tokens))
        config = ContinuousBatchingConfig(
            page_size=_PAGE,
            num_blocks=tokens // _PAGE + 2 if on_cpu else None,
            max_batch_tokens=_MAX_CPU_BATCH if on_cpu else None,
            max_requests_per_batch=_MAX_AT_ONCE,
            # A request chooses its token when the scores are there: no graph can hold that.
            use_cuda_graph=False,
            use_async_batching=False,
            auto_switch_to_flash=False,  # it may download a kernel from the hub
        )
        try:
            self._manager: ContinuousBatchingManager = model.init_continuous_batching(model.generation_config, config)
            processors = ContinuousBatchingLogitsProcessorList(LogitsProcessorList([self._each]))
            processors.tensors_required = 1
            self._manager.logit_processor = processors
            self._manager.warmup()  # allocates the cache
        except Exception as error:  # of whatever architecture it does not know
            raise _NotBatched(str(error).split("\n", 1)[0]) from error
        batch = self._manager.batch_processor
        capacity = (batch.cache.num_blocks - 1) * _PAGE if batch else max_context_tokens
        # A longer one would end the manager: it has no room for a single request.
        self.context_tokens: int | None = min(max_context_tokens, capacity) if context_tokens else capacity
        self._manager.start()

    @classmethod
    def checked(
        cls, model: PreTrainedModel, context_tokens: int | None, ends: list[int], trials: Sequence[list[int]]
    ) -> Continuous:
        """Return the engine, if it gives the model's own scores for some texts that are batched together.

        Raises:
            _NotBatched: it does not: attention that the manager does not know would answer nonsense.
        """
        scores_alone = [_scores(model, ids) for ids in trials]
        engine = cls(model, context_tokens, ends)
        recorders = [_Recorder(ids[-_NUM_TRIAL_TOKENS:]) for ids in trials]
        try:
            for number, (ids, recorder) in enumerate(zip(trials, recorders, strict=True)):
                engine._each.choosers[f"trial-{number}"] = recorder.choose
                engine._manager.add_request(
                    ids[:-_NUM_TRIAL_TOKENS],
                    request_id=f"trial-{number}",
                    max_new_tokens=_NUM_TRIAL_TOKENS,
                    eos_token_id=-1,
                )
            for _ in trials:
                output = engine._manager.get_result(timeout=_TRIAL_S)
                if output is None or output.error:
                    raise _NotBatched(output.error if output else "no answer")
            differences = [
                _difference(torch.stack(recorder.seen), scores_TV)
                for recorder, scores_TV in zip(recorders, scores_alone, strict=True)
            ]
            if not max(differences) <= _MAX_DIFFERENCE:  # NaN too
                raise _NotBatched("in a batch the model gives other scores than alone")
        except _NotBatched:
            engine.close()
            raise
        engine._each.choosers.clear()
        return engine

    async def tokens(self, prompt: Prompt, choose: Choose, limit: int) -> AsyncIterator[int]:
        """Yield the tokens of an answer up to one that ends it; closing the iterator ends the generation.

        Raises:
            GenerationFailed: the library's generation failed.
        """
        number = uuid.uuid4().hex
        outputs: asyncio.Queue[Any] = asyncio.Queue()
        self._each.choosers[number] = choose
        self._manager.register_result_handler(number, outputs.put_nowait)
        try:
            added = self._manager.add_request(
                prompt.ids, request_id=number, max_new_tokens=limit, streaming=True, eos_token_id=self._ends
            )
            if added is None:
                raise GenerationFailed(str(self._manager.background_thread_status.fatal_error or "it is stopping"))
            num_seen = 0
            while True:
                output = await outputs.get()
                if problem := self._each.problems.pop(number, None):
                    raise GenerationFailed(problem)
                for token in output.generated_tokens[num_seen:]:
                    yield token
                num_seen = len(output.generated_tokens)
                if output.error:
                    raise GenerationFailed(output.error)
                if output.is_finished():
                    return
        finally:
            self._manager.cancel_request(number)
            self._manager.output_router.result_handlers.pop(number, None)
            self._each.choosers.pop(number, None)

    @property
    def is_alive(self) -> bool:
        return bool(self._manager.is_running())

    def close(self) -> bool:
        """Stop the manager; return whether its thread has ended. A step of a large model cannot be interrupted."""
        with suppress(AttributeError):  # the thread may still use what `stop` takes away
            self._manager.stop(block=True, timeout=_STOP_S, hard_stop=True)
        return not self._manager.is_running()


class _EachByItself(ContinuousBatchingLogitsProcessor):  # type: ignore[misc]
    """Leaves one token of each row: the one that the row's request chooses, by its name in `choosers`.

    `problems` of requests whose chooser failed: what is wrong with one's scores must not end the manager for all.
    """

    supported_kwargs: dict[str, type] = {}  # noqa: RUF012  as the base class has it
    ignored_kwargs = ()

    def __init__(self) -> None:
        self.choosers: dict[str, Choose] = {}
        self.problems: dict[str, str] = {}
        self._rows: list[tuple[str, list[int]]] = []

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """Write nothing: no value travels in the tensor."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[FutureRequestState]) -> torch.Tensor:
        """Remember which request each row belongs to."""
        states = [request.state for request in requests_with_new_token]
        self._rows = [(state.request_id, state.initial_tokens + state.generated_tokens) for state in states]
        return torch.zeros(len(states), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """Return scores in which the chosen tokens are the highest; shape [rows, vocabulary]."""
        return _only(scores, [self._chosen(*row, row_V) for row, row_V in zip(self._rows, scores, strict=False)])

    def _chosen(self, number: str, ids: list[int], scores_V: torch.Tensor) -> int:
        choose = self.choosers.get(number)  # a request that its client has left has none any more
        try:
            return choose(ids, scores_V) if choose else 0
        except Exception as error:
            _LOG.exception("A request failed")
            self.problems[number] = f"{type(error).__name__}: {error}"
            self.choosers.pop(number, None)
            return 0


def _only(scores: torch.Tensor, chosen: Sequence[int]) -> torch.Tensor:
    chosen_scores = torch.full_like(scores, -torch.inf)
    chosen_scores[torch.arange(len(chosen)), torch.tensor(chosen, dtype=torch.long)] = 0
    return chosen_scores


class _Recorder:
    """Chooses given tokens, and keeps the scores."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        self.seen: list[torch.Tensor] = []

    def choose(self, ids: Sequence[int] | torch.Tensor, scores_V: torch.Tensor) -> int:
        self.seen.append(scores_V.float().cpu())
        return self._tokens[len(self.seen) - 1]


@torch.inference_mode()  # type: ignore[untyped-decorator]
def _scores(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Return what the model gives for each of the last tokens, shape [tokens, vocabulary]."""
    logits_TV = model(torch.tensor([ids], device=model.device), use_cache=False).logits[0]
    return logits_TV[-_NUM_TRIAL_TOKENS - 1 : -1].float().cpu()


def _difference(scores_TV: torch.Tensor, wanted_TV: torch.Tensor) -> float:
    """Return the largest distance of a token's scores, relative to their spread."""
    scores_TV, wanted_TV = (
        uncentred_TV - uncentred_TV.mean(-1, keepdim=True) for uncentred_TV in (scores_TV, wanted_TV)
    )
    return float(((scores_TV - wanted_TV).norm(dim=-1) / wanted_TV.norm(dim=-1)).max())


@dataclass
class _Job:
    prompt: Prompt
    choose: Choose
    limit: int
    loop: asyncio.AbstractEventLoop
    outputs: asyncio.Queue[int | Exception | None]
    is_left: threading.Event

    def put(self, output: int | Exception | None) -> None:
        """Pass on a token, an error, or None at the end; from another thread than the loop's."""
        with suppress(RuntimeError):  # the loop has ended with the server
            self.loop.call_soon_threadsafe(self.outputs.put_nowait, output)


class OneByOne:
    """Generation of one request after the other by transformers' `generate`: for models that the manager cannot batch.

    These read images, or have attention or a state that the manager does not know.
    """

    def __init__(self, model: PreTrainedModel, context_tokens: int | None, ends: list[int]) -> None:
        self._model, self.context_tokens, self._ends = model, context_tokens, ends
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    async def tokens(self, prompt: Prompt, choose: Choose, limit: int) -> AsyncIterator[int]:
        job = _Job(prompt, choose, limit, asyncio.get_running_loop(), asyncio.Queue(), threading.Event())
        self._jobs.put(job)
        try:
            while (output := await job.outputs.get()) is not None:
                if isinstance(output, GenerationFailed):
                    raise output
                if isinstance(output, Exception):
                    raise GenerationFailed(f"{type(output).__name__}: {output}") from output
                yield output
        finally:
            job.is_left.set()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if not (job.is_left.is_set() or self._is_closed.is_set()):
                    self._generate(job)
            except Exception as error:  # of one request; the thread answers the next one
                _LOG.exception("A request failed")
                job.put(error)
            else:
                job.put(GenerationFailed("the server is stopping") if self._is_closed.is_set() else None)

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def _generate(self, job: _Job) -> None:
        model = self._model
        ids = torch.tensor([job.prompt.ids], device=model.device)
        pixels = {name: torch.from_numpy(values) for name, values in job.prompt.pixels.items()}
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=job.limit,
            logits_processor=LogitsProcessorList([lambda ids, scores: _only(scores, [job.choose(ids[0], scores[0])])]),
            stopping_criteria=StoppingCriteriaList([_Passing(job, self._is_closed)]),
            **on_device(model, pixels),
        )

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> bool:
        self._is_closed.set()
        self._jobs.put(None)
        self._thread.join(_STOP_S)
        return not self._thread.is_alive()


class _Passing(StoppingCriteria):  # type: ignore[misc]
    """Passes on each token, and stops where the client has left or the server ends."""

    def __init__(self, job: _Job, is_closed: threading.Event) -> None:
        self._job, self._is_closed = job, is_closed

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        self._job.put(int(input_ids[0, -1]))
        ends = self._job.is_left.is_set() or self._is_closed.is_set()
        return torch.tensor([ends], device=input_ids.device)


Engine = Continuous | OneByOne
