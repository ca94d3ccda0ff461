"""From the rows of opened data sets to samples, and from samples to tokens with labels, counted on the way.

It does not cut, pack or write.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tuner.worker.data import formats, masks
from tuner.worker.data.masks import Tokens
from tuner.worker.data.mixture import Opened
from tuner.worker.data.sample import Chat, Sample, for_objective, teaches

_DETECT_ROWS = 8

Labelled = tuple[Tokens, Tokens]
"""Input ids and labels, int32 of shape [tokens]; a label of -100 carries no loss."""


@dataclass
class Tally:
    """Counts while rows go by: `read` are rows, by data set; `kept`, `dropped` and `truncated` are samples."""

    read: list[int]
    kept: int = 0
    dropped: int = 0
    truncated: int = 0
    truncated_tokens: int = 0
    tokens: int = 0
    trained_tokens: int = 0

    def keep(self, before: Sequence[Labelled], after: Sequence[Labelled]) -> None:
        """Count one sample that is kept: its sequences as they were, and cut."""
        cut = sum(len(ids) for ids, _ in before) - sum(len(ids) for ids, _ in after)
        self.kept += 1
        self.truncated += cut > 0
        self.truncated_tokens += cut
        self.tokens += sum(len(ids) for ids, _ in after)
        self.trained_tokens += sum(int((labels != masks.IGNORED).sum()) for _, labels in after)


def formats_of(opened: Opened, objective: str) -> tuple[str, ...]:
    """Return the row format of each data set: the recipe's, or the one told from its first rows.

    Raises:
        DataError: a format cannot be told from the columns.
    """
    return tuple(
        one.format or formats.detect(one.head(_DETECT_ROWS), one.place, columns=one.columns, objective=objective)
        for one in opened.sets
    )


def samples(opened: Opened, names: Sequence[str], objective: str, tally: Tally) -> Iterator[tuple[str, Sample]]:
    """Yield what the objective learns from, each with its place; `names` are the formats of the data sets.

    Raises:
        DataError: a row does not have its format's shape, or is not what the objective learns from.
    """
    for one, (place, row) in opened.read():
        tally.read[one.number] += 1
        name = names[one.number]
        sample = formats.read(name, row, place, columns=one.columns, system=one.system)
        for part in for_objective(sample, objective, name, place):
            if teaches(part):
                yield place, part
            else:
                tally.dropped += 1


@dataclass
class Encoder:
    """Tokenizes conversations and texts; `train_all` puts loss on every token of a conversation too."""

    tokenizer: Any
    train_all: bool = False

    @cached_property
    def template(self) -> masks.Template:
        """The chat template; texts need none, so a tokenizer without one is no mistake before the first chat."""
        return masks.choose_template(self.tokenizer)

    def encode(self, batch: Sequence[tuple[str, Chat | str]]) -> list[Labelled]:
        """Return ids and labels of each of a batch of places and samples.

        Raises:
            DataError: there is no chat template, or it refuses a conversation.
        """
        encoded: dict[int, Labelled] = {}
        for is_text in (True, False):
            chosen = [at for at, (_, sample) in enumerate(batch) if isinstance(sample, str) is is_text]
            if chosen:
                template = None if is_text else self.template
                some = [batch[at] for at in chosen]
                found = masks.encode(template, self.tokenizer, some, train_all=self.train_all)
                encoded.update(zip(chosen, found, strict=True))
        return [encoded[at] for at in range(len(batch))]
