"""What training would see of a recipe's data, as plain values: counts, lengths, samples as text, and every bad row.

It prints nothing, and reads rows only through the functions that training uses.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from tuner.data import formats, limits, masks, mixture, packing, preferences, serving, thinking
from tuner.data.prepare import Prepared, prepare
from tuner.data.readers import PlacedRow
from tuner.data.reading import Encoder, Labelled, Tally, formats_of, samples
from tuner.data.sample import Chat, Feedback, Pair, Sample, for_objective
from tuner.data.serving import Difference
from tuner.errors import DataError
from tuner.recipes.schema import Dataset

_BATCH_ROWS = 512
CHECKED_SAMPLES = 100
"""Of the training split, whose training text is set beside the one of serving."""

Piece = tuple[str, bool]
"""Some text, and whether its tokens carry loss."""


@dataclass(frozen=True)
class Shown:
    """One sample as the chat template renders it. `parts` are named: 'text', or 'prompt', 'chosen', 'rejected' ...

    `num_tokens` are those up to `max_length`, `num_cut` those beyond it: with `splits` they are trained in other rows.
    """

    place: str
    num_tokens: int
    num_trained: int
    num_cut: int
    parts: dict[str, list[Piece]]
    splits: bool = False


@dataclass(frozen=True)
class View:
    """The rows of one split as training takes them. `lengths` are tokens of each sample, by side where it has two."""

    prepared: Prepared
    lengths: dict[str, npt.NDArray[np.int64]]
    samples: list[Shown]


def view(dataset: Dataset, tokenizer: Any, objective: str, num_samples: int) -> View:
    """Prepare a data set as training does (its cache included) and show the first `num_samples` samples.

    Raises:
        DataError: the data set, a row, or the chat template is wrong, or no row is left to train on.
        MachineError: the hub cannot be reached.
        DiskError: the cache cannot be written.
    """
    prepared = prepare(dataset, tokenizer, objective=objective)
    opened = mixture.open(dataset)
    placed = samples(opened, formats_of(opened, objective), objective, Tally.of(opened, dataset.bad_rows))
    encoder = Encoder(tokenizer, objective == "pretrain", dataset.thinking)
    shown = [_shown(encoder, *one, dataset) for one in itertools.islice(placed, num_samples)]
    return View(prepared, _lengths(prepared), shown)


def _lengths(prepared: Prepared) -> dict[str, npt.NDArray[np.int64]]:
    layout = preferences.LAYOUTS.get(prepared.objective)
    table = prepared.dataset.data
    if layout is None:
        return {"samples": pc.list_flatten(table.column("seq_lengths")).to_numpy()}
    return {side: pc.list_value_length(table.column(f"{side}_ids")).to_numpy() for side in layout.sides}


def histogram(lengths: npt.NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Return (from, to, how many) of lengths in tokens, both ends included; each bar is twice as wide as the last."""
    bars = np.bincount(np.ceil(np.log2(np.maximum(lengths, 1))).astype(int))
    found = [(2 ** (power - 1) + 1 if power else 0, 2**power, int(count)) for power, count in enumerate(bars)]
    return found[int(np.flatnonzero(bars)[0]) :]


def _shown(encoder: Encoder, place: str, sample: Sample, dataset: Dataset) -> Shown:
    encoded = encoder.encode([(place, chat) for chat in _chats(sample)])
    cut = [
        (ids[: dataset.max_length], packing.ignore_starts(labels[: dataset.max_length], dataset.max_length))
        for ids, labels in encoded
    ]
    num_tokens = sum(len(ids) for ids, _ in cut)
    return Shown(
        place,
        num_tokens,
        num_trained=sum(int((labels != masks.IGNORED).sum()) for _, labels in cut),
        num_cut=sum(len(ids) for ids, _ in encoded) - num_tokens,
        parts=_parts(sample, [_pieces(encoder.tokenizer, one) for one in cut]),
        splits=dataset.packing and not isinstance(sample, Pair | Feedback),
    )


def _chats(sample: Sample) -> Sequence[Chat | str]:
    return preferences.conversations(sample) if isinstance(sample, Pair | Feedback) else [sample]


def _parts(sample: Sample, sides: Sequence[list[Piece]]) -> dict[str, list[Piece]]:
    match sample:
        case Pair():
            same = [
                left for left, right in itertools.takewhile(lambda both: both[0] == both[1], zip(*sides, strict=False))
            ]
            chosen, rejected = (side[len(same) :] for side in sides)
            return {"prompt": same, "chosen": chosen, "rejected": rejected}
        case Feedback():
            return {"good answer" if sample.label else "bad answer": sides[0]}
        case _:
            return {"text": sides[0]}


def _pieces(tokenizer: Any, encoded: Labelled) -> list[Piece]:
    """Return the text of the runs of tokens that carry loss, or do not."""
    ids, labels = encoded
    trained = labels != masks.IGNORED
    ends = [*(np.flatnonzero(trained[1:] != trained[:-1]) + 1), len(ids)]
    # A tokenizer may write the first of some tokens otherwise than in the middle (without its space), so each piece is
    # what the text up to its end is longer than the text before.
    texts = [tokenizer.decode(ids[:end].tolist(), clean_up_tokenization_spaces=False) for end in ends]
    starts = [0, *map(len, texts)]
    return [(text[start:], bool(trained[end - 1])) for text, start, end in zip(texts, starts, ends, strict=False)]


def template_check(dataset: Dataset, tokenizer: Any, objective: str) -> Iterator[Difference]:
    """Yield where training reads the conversations of the first rows otherwise than a server would.

    Raises:
        DataError: the data set, a row, or the chat template is wrong.
        MachineError: the hub cannot be reached.
    """
    opened = mixture.open(dataset)
    placed = samples(opened, formats_of(opened, objective), objective, Tally.of(opened, dataset.bad_rows))
    template = Encoder(tokenizer).template
    for place, sample in itertools.islice(placed, CHECKED_SAMPLES):
        for chat in _chats(sample):
            if isinstance(chat, Chat):
                yield from serving.compare(template, thinking.applied(chat, dataset.thinking), place)


def bad_rows(dataset: Dataset, tokenizer: Any, objective: str) -> Iterator[DataError]:
    """Yield what is wrong with each row that training would refuse, in the order in which it reads them.

    Raises:
        DataError: the data set or the chat template is wrong, whatever the rows.
        MachineError: the hub cannot be reached.
    """
    opened = mixture.open(dataset)
    encoder = Encoder(tokenizer, objective == "pretrain", dataset.thinking)
    stream = _chats_or_errors(opened, formats_of(opened, objective), objective)
    told: set[str] = set()  # a mixture may take a row more than once
    for batch in limits.batches(stream, _BATCH_ROWS):
        good = [(place, chat) for place, chats in batch if not isinstance(chats, DataError) for chat in chats]
        refused = dict(encoder.refused(good))
        for place, chats in batch:
            error = chats if isinstance(chats, DataError) else refused.get(place)
            if error and place not in told:
                told.add(place)
                yield error


def _chats_or_errors(
    opened: mixture.Opened, names: Sequence[str], objective: str
) -> Iterator[tuple[str, Sequence[Chat | str] | DataError]]:
    """Yield each row's place with its conversations, or with why it has none."""
    for found in _readable(opened):
        if isinstance(found, DataError):
            yield str(found.where), found
            continue
        one, (place, row) = found
        name = names[one.number]
        try:
            sample = formats.read(name, row, place, columns=one.columns, system=one.system)
        except DataError as error:
            if not error.of_row:
                raise
            yield place, error
        else:
            yield place, [chat for part in for_objective(sample, objective, name, place) for chat in _chats(part)]


def _readable(opened: mixture.Opened) -> Iterator[tuple[mixture.Set, PlacedRow] | DataError]:
    """Yield the rows that can be read, and between them why others cannot."""
    broken: list[DataError] = []
    rows = opened.read(broken.append)
    following: tuple[mixture.Set, PlacedRow] | None
    while True:
        try:
            following = next(rows, None)
        except DataError as error:  # nothing can be read from here on
            broken.append(error)
            following = None
        yield from broken
        broken.clear()
        if following is None:
            return
        yield following
