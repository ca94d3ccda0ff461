"""Samples into tokens with labels: the rest of the way of rows, batch by batch.

It does not cut, pack or write.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tuner.data.encoder import Encoded, Part, Tokens, Unrendered
from tuner.data.fast_tokens import FastTokens
from tuner.data.outcomes import Tally
from tuner.data.pipeline import Pipeline, PlacedSample
from tuner.data.readers.text_files import OnError
from tuner.data.rendering import refuse_losses
from tuner.data.sample import Chat, Pair, Prompt, Sample, Thinking, unmarked
from tuner.data.text_encoder import TextEncoder
from tuner.errors import DataError
from tuner.recipes.schema.objectives import facts_of

SPLIT = "the chat template renders an answer otherwise once other turns follow, so each is trained in its own sample"
LAST_ALONE = (
    "the chat template renders a turn of an answer otherwise once other turns follow, so the last turn alone is judged"
)
BATCH_ROWS = 512
"""Samples that are tokenized at once."""


def chats_of(sample: Sample) -> Sequence[Chat | str]:
    """Return a sample as one text to tokenize, or the conversation of each answer; its prompt carries no loss."""
    if isinstance(sample, str | Chat):
        return [sample]
    assert not isinstance(sample, Prompt), "it has no answer"
    prompt = [{**unmarked(turn), "weight": 0} if turn["role"] == "assistant" else turn for turn in sample.prompt]
    answers = (sample.chosen, sample.rejected) if isinstance(sample, Pair) else (sample.completion,)
    return [Chat([*prompt, *answer], sample.tools, sample.chat_template_kwargs) for answer in answers]


def prompt_ids(
    encoder: TextEncoder, prompt: Prompt, on_change: Callable[[str], object] = lambda reason: None
) -> Tokens:
    """Return the tokens of a prompt, up to where the answer begins; `on_change` as for `TextEncoder.prompt_ids`.

    Raises:
        DataError: the chat template refuses it, or it cannot be rendered with the tools of the objective.
    """
    if encoder.tools and prompt.text is not None:
        problem = "the prompt is a text, which no chat template renders with the objective's tools"
        raise DataError(problem, fix="Write it as messages: [{'role': 'user', 'content': ...}].")
    if encoder.tools and prompt.tools:
        problem = "the row describes tools of its own, and the model can call those of objective.tools alone"
        raise DataError(problem, fix="Remove the column 'tools'.")
    if encoder.tools and prompt.chat_template_kwargs:
        problem = "the row has chat_template_kwargs of its own, with which no result of a tool is rendered"
        raise DataError(problem, fix="Remove the column, or give all rows the same: model.chat_template_kwargs.")
    chat = Chat(prompt.prompt, prompt.tools, prompt.chat_template_kwargs)
    if prompt.text is None:
        _refuse_losses(encoder, chat)
    return np.asarray(encoder.prompt_ids(prompt.text or chat, on_change), dtype=np.int32)


def _encoded(place: str, sample: Sample, sides: Sequence[list[Part]]) -> list[Encoded]:
    """Return what is trained of a sample: each part of a conversation; the end of an answer that is judged."""
    if isinstance(sample, Chat):
        [parts] = sides
        return [
            Encoded(place, replace(sample, messages=sample.messages[: part.num_turns]), [part.labelled], part.weights)
            for part in parts
        ]
    return [Encoded(place, sample, [parts[-1].labelled for parts in sides])]


def _refuse_losses(encoder: TextEncoder, chat: Chat) -> None:
    try:
        template = encoder.template.of(chat)
    except DataError:  # it does not show which turns are the assistant's, and a prompt needs none
        return
    try:
        refuse_losses(template, chat)
    except Unrendered as error:
        fix = "Correct the row, or choose another model.chat_template."
        raise DataError(f"the chat template cannot render the prompt: {error}", fix=fix) from error


@dataclass
class SampleEncoder:
    """Encodes the samples of a pipeline, without the rows that the chat template refuses.

    `train_all` puts loss on every token of a conversation too. `fast` encodes instead of the encoder once it is set.
    """

    encoder: TextEncoder
    train_all: bool = False
    thinking: Thinking | None = None
    special_tokens: bool = False
    fast: FastTokens | None = field(default=None, init=False)

    @classmethod
    def of(cls, pipeline: Pipeline, encoder: TextEncoder) -> SampleEncoder:
        dataset, rows = pipeline.dataset, facts_of(pipeline.objective).rows
        train_all = rows == "texts" or dataset.trained_turns == "everything"
        return cls(encoder, train_all, dataset.thinking, dataset.special_tokens)

    def encode(self, batch: Sequence[PlacedSample], tally: Tally, on_error: OnError) -> list[Encoded]:
        """Return samples with their tokens, without the rows that the chat template refuses.

        A conversation becomes several samples if its chat template renders an answer otherwise once other turns follow.

        Raises:
            DataError: there is no chat template, or `on_error` raises the error of a row.
            Differs: `fast` gives other tokens than the encoder.
        """
        changes = dict.fromkeys(self._unused(batch))  # once: the two sides of a pair have the same prompt
        if any(isinstance(sample, Prompt) for _, sample in batch):
            prompts = [encoded for placed in batch for encoded in self._prompt(*placed, on_error, changes)]
            for place, reason in changes:
                tally.change(place, reason)
            return prompts
        placed = [(place, chat) for place, sample in batch for chat in chats_of(sample)]
        try:
            encoded = self.encoder.encode(
                placed,
                train_all=self.train_all,
                thinking=self.thinking,
                special_tokens=self.special_tokens,
                fast=self.fast,
                on_change=lambda place, reason: changes.setdefault((place, reason)),
            )
        except DataError as error:
            if not error.of_row:
                raise
            rows = [list(samples) for _, samples in itertools.groupby(batch, lambda placed: placed[0])]
            if len(rows) > 1:
                return [encoded for row in rows for encoded in self.encode(row, tally, on_error)]
            on_error(error)
            return []
        sides, samples = iter(encoded), []
        for place, sample in batch:
            parts = list(itertools.islice(sides, len(chats_of(sample))))
            if any(len(side) > 1 for side in parts):
                changes.setdefault((place, SPLIT if isinstance(sample, Chat) else LAST_ALONE))
            samples += _encoded(place, sample, parts)
        for place, reason in changes:
            tally.change(place, reason)
        return samples

    def _unused(self, batch: Sequence[PlacedSample]) -> Iterator[tuple[str, str]]:
        """Yield the place of each sample with a value for a name that the chat template does not use, and which."""
        for place, sample in batch:
            for name in () if isinstance(sample, str) else sample.chat_template_kwargs or ():
                if not self.encoder.uses(name):
                    yield place, f"the chat template does not use {name!r} of the row's chat_template_kwargs"

    def _prompt(
        self, place: str, sample: Sample, on_error: OnError, changes: dict[tuple[str, str], None]
    ) -> list[Encoded]:
        """Return a prompt with its tokens; empty if the chat template refuses it. `changes` gets what it leaves out."""
        assert isinstance(sample, Prompt), "an objective has rows of one kind"
        try:
            ids = prompt_ids(self.encoder, sample, lambda reason: changes.setdefault((place, reason)))
        except DataError as error:
            on_error(DataError(error.what, where=place, of_row=True, fix=error.fix))
            return []
        return [Encoded(place, sample, [(ids, ids.copy())])]
