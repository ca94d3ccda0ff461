"""Samples into tokens with labels: the rest of the way of rows, batch by batch.

It does not cut, pack or write.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tuner.data import masks
from tuner.data.fast_tokens import FastTokens
from tuner.data.outcomes import Tally
from tuner.data.pipeline import Pipeline, PlacedSample
from tuner.data.readers.text_files import OnError
from tuner.data.sample import Chat, Pair, Sample
from tuner.data.thinking import Thinking
from tuner.data.tokens import Encoded, Labelled
from tuner.errors import DataError
from tuner.recipes.schema.objectives import facts_of

BATCH_ROWS = 512
"""Samples that are tokenized at once."""


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

    `thinking` is what becomes of that of the answers, as `dataset.thinking` says. `fast` encodes, once there is one.
    """

    tokenizer: Any
    train_all: bool = False
    thinking: Thinking | None = None
    fast: FastTokens | None = field(default=None, init=False)

    @classmethod
    def of(cls, pipeline: Pipeline, tokenizer: Any) -> Encoder:
        """Return what makes tokens of the samples of a pipeline."""
        return cls(tokenizer, facts_of(pipeline.objective).rows == "texts", pipeline.dataset.thinking)

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
            Differs: `fast` gives other tokens than the tokenizer.
        """
        texts = [(place, text) for place, text in placed if isinstance(text, str)]
        chats = [(place, chat) for place, chat in placed if isinstance(chat, Chat)]
        of_texts = iter(masks.encode_texts(self.tokenizer, texts, self.fast) if texts else ())
        how: dict[str, Any] = {"train_all": self.train_all, "thinking": self.thinking, "fast": self.fast}
        of_chats = iter(masks.encode_chats(self.template, chats, **how, on_change=on_change) if chats else ())
        return [next(of_texts if isinstance(one, str) else of_chats) for _, one in placed]
