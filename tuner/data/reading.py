"""From the rows of opened data sets to samples, and from samples to tokens with labels, counted on the way.

It does not cut, pack or write.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TextIO

from tuner.data import formats, masks
from tuner.data.changes import Change, Changes, What
from tuner.data.masks import Tokens
from tuner.data.mixture import Opened, Set
from tuner.data.sample import Chat, Sample, for_objective, lacks
from tuner.data.thinking import Thinking
from tuner.errors import DataError

_DETECT_ROWS = 8
_SHAPE_ROWS = 1_000

Labelled = tuple[Tokens, Tokens]
"""Input ids and labels, int32 of shape [tokens]; a label of -100 carries no loss."""


@dataclass
class Tally:
    """Counts while rows go by: `read` are rows, by data set; `kept`, `dropped` and `truncated` are samples.

    `bad` are the rows that are left out, each by its place with what is wrong with it; `max_bad` how many may be.
    """

    read: list[int]
    max_bad: int = 0
    bad: dict[str, DataError] = field(default_factory=dict)
    kept: int = 0
    dropped: int = 0
    truncated: int = 0
    split: int = 0
    truncated_tokens: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    changes: Changes = field(default_factory=Changes)

    @classmethod
    def of(cls, opened: Opened, max_bad: int, stream: TextIO | None = None) -> Tally:
        """Return a tally for these data sets that leaves out at most `max_bad` bad rows, and lists them in `stream`."""
        return cls([0] * len(opened.sets), max_bad, changes=Changes(stream))

    def refuse(self, error: DataError) -> None:
        """Leave a row out; a mixture may meet it more than once.

        Raises:
            DataError: it is one more than may be left out.
        """
        place = str(error.where)
        if place not in self.bad and len(self.bad) == self.max_bad:
            if not self.max_bad:
                raise error
            what = f"more than dataset.bad_rows = {self.max_bad} rows are bad; the next one: {error.what}"
            raise DataError(what, where=place, fix="Correct them (`tuner data NAME --all` lists them), or allow more.")
        if place not in self.bad:
            self.bad[place] = error
            self.changes.add(Change(place, "bad", error.what))

    def drop(self, place: str, reason: str, sides: Sequence[Labelled] | None = None) -> None:
        """Count one sample that is dropped, of these sequences where it has come so far."""
        self.dropped += 1
        before, after = (None, None) if sides is None else (_num_tokens(sides), 0)
        self.changes.add(Change(place, "dropped", reason, before, after))

    def keep(self, place: str, before: Sequence[Labelled], after: Sequence[Labelled], max_length: int) -> None:
        """Count one sample that is kept: its sequences as they were, and cut; what is longer yet will be split."""
        num_before, num_after = _num_tokens(before), _num_tokens(after)
        cut, split = num_before > num_after, any(len(ids) > max_length for ids, _ in after)
        self.kept += 1
        self.truncated += cut
        self.split += split
        self.truncated_tokens += num_before - num_after
        self.tokens += num_after
        self.trained_tokens += sum(int((labels != masks.IGNORED).sum()) for _, labels in after)
        what: What = "truncated" if cut else "split"
        if cut or split:
            self.changes.add(Change(place, what, f"longer than max_length = {max_length}", num_before, num_after))


def _num_tokens(sides: Sequence[Labelled]) -> int:
    return sum(len(ids) for ids, _ in sides)


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
        DataError: more rows than `tally` leaves out cannot be read, do not have their format's shape, or are not
            what the objective learns from.
    """
    for one, (place, row) in opened.read(tally.refuse if tally.max_bad else None):
        tally.read[one.number] += 1
        name = names[one.number]
        try:
            sample = formats.read(name, row, place, columns=one.columns, system=one.system)
            parts = for_objective(sample, objective, name, place)
        except DataError as error:
            if not error.of_row:
                raise
            with _shapes_told(one, name, objective):
                tally.refuse(error)
            continue
        for part in parts:
            if reason := lacks(part):
                tally.drop(place, reason)
            else:
                yield place, part


@contextmanager
def _shapes_told(one: Set, name: str, objective: str) -> Iterator[None]:
    """Turn the error of a row into that of all rows, where they have several shapes; each row's own advice misleads."""
    try:
        yield
    except DataError as error:
        rows = itertools.islice(one.source.read(lambda _: None), _SHAPE_ROWS)
        is_ours = ":" not in name  # what a function of the user's takes, nobody knows
        shapes = formats.mixed(rows, one.place, columns=one.columns, objective=objective) if is_ours else None
        raise (shapes or error) from error


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

    def encode(
        self, batch: Sequence[tuple[str, Chat | str]], tell: Callable[[str, str], object] = lambda place, reason: None
    ) -> list[Labelled]:
        """Return ids and labels of each of a batch of places and samples; `tell` as in `masks.encode`.

        Raises:
            DataError: there is no chat template, or it refuses a conversation.
        """
        encoded: dict[int, Labelled] = {}
        for is_text in (True, False):
            chosen = [at for at, (_, sample) in enumerate(batch) if isinstance(sample, str) is is_text]
            if chosen:
                template = None if is_text else self.template
                some = [batch[at] for at in chosen]
                how: dict[str, Any] = {"train_all": self.train_all, "thoughts": self.thinking, "tell": tell}
                found = masks.encode(template, self.tokenizer, some, **how)
                encoded.update(zip(chosen, found, strict=True))
        return [encoded[at] for at in range(len(batch))]

    def encode_good(
        self, batch: Sequence[tuple[str, Any]], chats_of: Callable[[Any], Sequence[Chat | str]], tally: Tally
    ) -> tuple[Sequence[tuple[str, Any]], list[Labelled]]:
        """Return a batch without the samples that the chat template refuses, and ids and labels of its conversations.

        Raises:
            DataError: there is no chat template, or it refuses more of them than `tally` leaves out.
        """
        placed = [(place, chat) for place, sample in batch for chat in chats_of(sample)]
        told: dict[tuple[str, str], None] = {}  # the two sides of a pair have the same prompt
        try:
            encoded = self.encode(placed, lambda place, reason: told.setdefault((place, reason)))
        except DataError as error:
            if not tally.max_bad or not error.of_row:
                raise
        else:
            for place, change in told:
                tally.changes.add(Change(place, "changed", change))
            return batch, encoded
        bad = dict(self.refused(placed))
        for reason in bad.values():
            tally.refuse(reason)
        return self.encode_good([one for one in batch if one[0] not in bad], chats_of, tally)

    def refused(self, placed: Sequence[tuple[str, Chat | str]]) -> Iterator[tuple[str, DataError]]:
        """Yield the place of each conversation that the chat template refuses, and why."""
        try:
            self.encode(placed)
            return
        except DataError as error:
            if not error.of_row:
                raise
        for one in placed:
            try:
                self.encode([one])
            except DataError as error:
                yield one[0], error
