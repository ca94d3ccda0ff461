"""The one way of rows: from a recipe's `dataset` block to samples, and from samples to tokens with labels.

Training, `tuner data` and the sample answers walk it alike; they differ in what they do about a row that is wrong. It
does not cut, pack or write.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

from tuner.data import formats, limits, masks, mixing
from tuner.data.masks import Labelled
from tuner.data.mixing import WeightedSource
from tuner.data.outcomes import Counts, Tally
from tuner.data.readers.text import OnError, fail
from tuner.data.sample import JUDGED, Chat, Pair, Sample, WrongKind, for_objective, lacks
from tuner.data.thinking import Thinking
from tuner.errors import DataError
from tuner.recipes.schema import Dataset

_BATCH_ROWS = 512
_DETECT_ROWS = 8
_SHAPE_ROWS = 1_000

PlacedSample = tuple[str, Sample]
"""`file:line` and what the row there became."""


@dataclass(frozen=True)
class Encoded:
    """A sample and its tokens: one sequence, or the two sides of a pair."""

    place: str
    sample: Sample
    sides: list[Labelled]


@dataclass(frozen=True)
class Pipeline:
    """The way of the rows of `dataset` to an objective; `base` is the folder that relative paths start from.

    Each step raises DataError where the data set, or more rows of it than `on_error` bears, are wrong, and
    MachineError where the hub cannot be reached.
    """

    dataset: Dataset
    objective: str
    base: Path | None = None

    @cached_property
    def mixture(self) -> mixing.Mixture:
        """The data sets of the block."""
        return mixing.open(self.dataset, self.base)

    @cached_property
    def formats(self) -> tuple[str, ...]:
        """The row format of each data set: the recipe's, or the one told from its first rows."""
        return tuple(
            one.format
            or formats.detect(one.head(_DETECT_ROWS), one.place, columns=one.columns, objective=self.objective)
            for one in self.mixture.sets
        )

    def tally(self, stream: TextIO | None = None) -> Tally:
        """Return a tally that leaves out as many bad rows as the block allows, and lists samples in `stream`."""
        packing = self.dataset.packing and self.objective not in JUDGED
        return Tally(Counts(self.dataset.max_length, packing), self.dataset.bad_rows, stream)

    def samples(self, tally: Tally, on_error: OnError) -> Iterator[PlacedSample]:
        """Yield what the objective learns from; `on_error` is called for each row that it cannot learn from."""
        for one, (place, row) in self.mixture.read(on_error):
            tally.read(one.number)
            name = self.formats[one.number]
            try:
                sample = formats.read(name, row, place, columns=one.columns, system=one.system)
                parts = for_objective(sample, self.objective, name, place)
            except DataError as error:
                if not (error.of_row or isinstance(error, WrongKind)):
                    raise
                self._refuse(error, one, on_error if error.of_row else fail)
                continue
            for part in parts:
                if reason := lacks(part):
                    tally.drop(place, reason)
                else:
                    yield place, part

    def _refuse(self, error: DataError, one: WeightedSource, on_error: OnError) -> None:
        """Call `on_error`; where it raises, and the rows have several shapes, raise that: one row's advice misleads."""
        try:
            on_error(error)
        except DataError as refused:
            if ":" in self.formats[one.number]:  # what a function of the user's takes, nobody knows
                raise
            rows = itertools.islice(one.source.read(lambda _: None), _SHAPE_ROWS)
            shapes = formats.mixed(rows, one.place, columns=one.columns, objective=self.objective)
            raise (shapes or refused) from error

    def encoder(self, tokenizer: Any) -> Encoder:
        """Return what makes tokens of this objective's samples."""
        return Encoder(tokenizer, self.objective == "pretrain", self.dataset.thinking)

    def encoded(
        self, tokenizer: Any, tally: Tally, on_error: OnError, *, batch_rows: int = _BATCH_ROWS
    ) -> Iterator[list[Encoded]]:
        """Yield the samples with their tokens, batch by batch; in a batch, what cannot be read is told first."""
        encoder = self.encoder(tokenizer)
        for batch in limits.batches(self.samples(tally, on_error), batch_rows):
            yield encoder.encode(batch, tally, on_error)


def chats_of(sample: Sample) -> Sequence[Chat | str]:
    """Return a sample as one text to tokenize, or the conversation of each answer; its prompt carries no loss."""
    if isinstance(sample, str | Chat):
        return [sample]
    prompt = [{**turn, "weight": 0} if turn["role"] == "assistant" else turn for turn in sample.prompt]
    answers = (sample.chosen, sample.rejected) if isinstance(sample, Pair) else (sample.completion,)
    return [Chat([*prompt, *answer], sample.tools) for answer in answers]


@dataclass
class Encoder:
    """Tokenizes conversations and texts; `train_all` puts loss on every token of a conversation too.

    `thinking` is what becomes of that of the answers, as `dataset.thinking` says.
    """

    tokenizer: Any
    train_all: bool = False
    thinking: Thinking | None = None

    @cached_property
    def template(self) -> masks.Template:
        """The chat template; texts need none, so a tokenizer without one is no mistake before the first chat."""
        return masks.choose_template(self.tokenizer)

    def encode(self, batch: Sequence[PlacedSample], tally: Tally, on_error: OnError) -> list[Encoded]:
        """Return samples with their tokens, without the rows that the chat template refuses.

        Raises:
            DataError: there is no chat template, or `on_error` raises what is wrong with a row.
        """
        changes: dict[tuple[str, str], None] = {}  # once: the two sides of a pair have the same prompt
        placed = [(place, chat) for place, sample in batch for chat in chats_of(sample)]
        try:
            sides = iter(self.tokens(placed, lambda place, reason: changes.setdefault((place, reason))))
        except DataError as error:
            if not error.of_row:
                raise
            rows = [list(samples) for _, samples in itertools.groupby(batch, lambda one: one[0])]
            if len(rows) > 1:
                return [one for row in rows for one in self.encode(row, tally, on_error)]
            on_error(error)
            return []
        for place, reason in changes:
            tally.change(place, reason)
        return [Encoded(place, sample, list(itertools.islice(sides, len(chats_of(sample))))) for place, sample in batch]

    def tokens(
        self,
        placed: Sequence[tuple[str, Chat | str]],
        on_change: Callable[[str, str], object] = lambda place, reason: None,
    ) -> list[Labelled]:
        """Return ids and labels of conversations and texts; `on_change` as in `masks.encode_chats`.

        Raises:
            DataError: there is no chat template, or it refuses a conversation.
        """
        texts = [(place, text) for place, text in placed if isinstance(text, str)]
        chats = [(place, chat) for place, chat in placed if isinstance(chat, Chat)]
        of_texts = iter(masks.encode_texts(self.tokenizer, texts) if texts else ())
        how: dict[str, Any] = {"train_all": self.train_all, "thinking": self.thinking, "on_change": on_change}
        of_chats = iter(masks.encode_chats(self.template, chats, **how) if chats else ())
        return [next(of_texts if isinstance(one, str) else of_chats) for _, one in placed]
