"""What training would see of a recipe's data, as plain values: counts, lengths, samples as text, and every bad row.

It prints nothing, and rows come to it by the way that training takes them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import starmap
from os.path import commonprefix
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from tuner.data import layouts, thinking
from tuner.data.encoder import Labelled, Part, Unrendered, Weights
from tuner.data.encoding import SampleEncoder, chats_of, prompt_ids
from tuner.data.outcomes import Tally, num_trained
from tuner.data.pipeline import Pipeline, PlacedSample
from tuner.data.prepare import prepare
from tuner.data.prepared import Prepared
from tuner.data.readers import Unreadable
from tuner.data.readers.text_files import OnError, fail
from tuner.data.sample import IGNORED, Chat, Feedback, Pair, Prompt, Sample, has_loss
from tuner.data.text_encoder import TextEncoder
from tuner.errors import DataError
from tuner.recipes.schema import Dataset
from tuner.runs.records import DataCounts

CHECKED_SAMPLES = 100
"""Samples of the training split that are compared with the text of serving."""

_DIGITS = 6
"""Of a weight that is shown; it is kept in fp32."""
_AROUND = 8
"""Tokens that are shown before and after the first that differs."""

Piece = tuple[str, float]
"""Some text, and how much the loss of its tokens weighs: 0 to 1."""


@dataclass(frozen=True)
class ShownImage:
    """An image of a sample: its pixels as the model sees it, and the tokens that it becomes."""

    width: int
    height: int
    num_tokens: int


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
    images: tuple[ShownImage, ...] = ()

    def to_json(self) -> dict[str, Any]:
        parts = {
            name: [{"text": text, "trained": weight > 0, "weight": round(weight, _DIGITS)} for text, weight in part]
            for name, part in self.parts.items()
        }
        return asdict(self) | {"parts": parts}


@dataclass(frozen=True)
class TemplateDifference:
    """The first token that differs up to the end of one assistant turn: `turn` counts from 1, `token` from 0.

    `part` is 'prompt' where it lies before the answer. The texts are the tokens around it, on both sides.
    """

    place: str
    turn: int
    part: str
    token: int
    serving: str
    training: str


@dataclass(frozen=True)
class View:
    """The rows of one split as training takes them. `lengths` are tokens of each sample, by side where it has two."""

    prepared: Prepared
    lengths: dict[str, npt.NDArray[np.int64]]
    samples: list[Shown]

    def to_json(self) -> dict[str, Any]:
        """Return all of it as plain values, the lengths as histograms."""
        counts = self.prepared.counts
        bars = {
            side: [{"from": low, "to": high, "samples": count} for low, high, count in histogram(lengths)]
            for side, lengths in self.lengths.items()
        }
        return {
            **self.prepared.data.to_json(),
            "efficiency": self.prepared.efficiency() if counts.packing else None,
            "sets": [asdict(counts) for counts in self.prepared.sets],
            "lengths": bars,
            "samples": [sample.to_json() for sample in self.samples],
        }


def view(dataset: Dataset, encoder: TextEncoder, objective: str, num_samples: int) -> View:
    """Prepare a data set as training does (its cache included) and show the first samples. Errors as for `prepare`."""
    prepared = prepare(dataset, encoder, objective=objective)
    pipeline = Pipeline(dataset, objective)
    samples = SampleEncoder.of(pipeline, encoder)
    shown = itertools.chain.from_iterable(
        _shown(samples, placed, dataset) for placed in _first_samples(pipeline, num_samples)
    )
    return View(prepared, _lengths(prepared), list(itertools.islice(shown, num_samples)))


def _first_samples(pipeline: Pipeline, count: int) -> Iterator[PlacedSample]:
    tally = pipeline.tally()
    return itertools.islice(pipeline.samples(tally, tally.refuse), count)


def _lengths(prepared: Prepared) -> dict[str, npt.NDArray[np.int64]]:
    table = prepared.dataset.data
    if "seq_lengths" in table.column_names:
        return {"samples": pc.list_flatten(table.column("seq_lengths")).to_numpy()}
    sides = layouts.of(prepared.objective).sides
    return {side: pc.list_value_length(table.column(ids)).to_numpy() for side, (ids, _) in sides.items()}


def histogram(lengths: npt.NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Return (from, to, how many) of lengths in tokens, both ends included; each bar is twice as wide as the last."""
    bars = np.bincount(np.ceil(np.log2(np.maximum(lengths, 1))).astype(int))
    ranges = [(2 ** (power - 1) + 1 if power else 0, 2**power, int(count)) for power, count in enumerate(bars)]
    return ranges[int(np.flatnonzero(bars)[0]) :]


def _shown(samples: SampleEncoder, placed: PlacedSample, dataset: Dataset) -> Iterator[Shown]:
    """Yield what a sample is trained as: several samples if the chat template renders its history otherwise."""
    for place, sample, uncut_sides, weights in _encoded(samples, placed):
        cut = layouts.cut(uncut_sides, dataset.max_length)
        num_tokens = sum(len(ids) for ids, _ in cut)
        yield Shown(
            place,
            num_tokens,
            num_trained=num_trained(cut),
            num_cut=sum(len(ids) for ids, _ in uncut_sides) - num_tokens,
            parts=_parts(sample, [_pieces(samples.encoder, side, weights) for side in cut]),
            splits=dataset.packing and not isinstance(sample, Pair | Feedback | Prompt),
            images=tuple(starmap(ShownImage, samples.encoder.images_in(sample) if isinstance(sample, Chat) else ())),
        )


def _encoded(
    samples: SampleEncoder, placed: PlacedSample
) -> Iterator[tuple[str, Sample, list[Labelled], Weights | None]]:
    place, sample = placed
    if isinstance(sample, Prompt):  # its completions carry the loss
        ids = prompt_ids(samples.encoder, sample)
        yield place, sample, [(ids, np.full_like(ids, IGNORED))], None
        return
    for encoded in samples.encode([placed], Tally(DataCounts(0, packing=False)), fail):
        yield encoded.place, encoded.sample, encoded.sides, encoded.weights


def _parts(sample: Sample, sides: Sequence[list[Piece]]) -> dict[str, list[Piece]]:
    match sample:
        case Pair():
            same = list(commonprefix(sides))  # noqa: RUF071  # of pieces, not of paths
            chosen, rejected = (side[len(same) :] for side in sides)
            return {"prompt": same, "chosen": chosen, "rejected": rejected}
        case Feedback():
            return {"good answer" if sample.label else "bad answer": sides[0]}
        case _:
            return {"text": sides[0]}


def _pieces(encoder: TextEncoder, encoded: Labelled, of_tokens: Weights | None) -> list[Piece]:
    """Return the text in pieces; the tokens of a piece have the same weight in the loss."""
    ids, labels = encoded
    weights = np.where(labels == IGNORED, 0, 1 if of_tokens is None else of_tokens[: len(ids)])
    ends = [*(np.flatnonzero(weights[1:] != weights[:-1]) + 1), len(ids)]
    # An encoder may write the first of some tokens otherwise than in the middle (without its space), so each piece is
    # what the text up to its end is longer than the text before.
    texts = [encoder.decode(ids[:end].tolist(), exact=True) for end in ends]
    starts = [0, *map(len, texts)]
    pieces = [(text[start:], float(weights[end - 1])) for text, start, end in zip(texts, starts, ends, strict=False)]
    if encoder.image_id is None:
        return pieces
    token = encoder.decode([encoder.image_id], exact=True)
    runs = re.compile(f"(?:{re.escape(token)})+")
    return [(runs.sub(lambda run: f"({token} x {len(run[0]) // len(token)})", text), weight) for text, weight in pieces]


def template_check(dataset: Dataset, encoder: TextEncoder, objective: str) -> Iterator[TemplateDifference]:
    """Yield where training reads the conversations of the first rows otherwise than a server would.

    Errors as for `prepare`, apart from those of the cache.
    """
    pipeline = Pipeline(dataset, objective)
    samples = SampleEncoder.of(pipeline, encoder)
    for place, sample in _first_samples(pipeline, CHECKED_SAMPLES):
        chats = () if isinstance(sample, Prompt) else [chat for chat in chats_of(sample) if isinstance(chat, Chat)]
        for chat in chats:
            parts = samples.encoder.encode([(place, chat)], train_all=samples.train_all, thinking=samples.thinking)[0]
            yield from _compare(encoder, thinking.applied(chat, dataset.thinking), parts, place)


def _compare(encoder: TextEncoder, chat: Chat, parts: Sequence[Part], place: str) -> Iterator[TemplateDifference]:
    """Yield for each assistant turn with loss where training reads otherwise than serving.

    A server renders the turns before an answer with the start of one, and then the conversation up to the answer. The
    tokens of the part with the answer must begin with each of the server's.
    """
    for number, turn in enumerate(chat.messages):
        if not has_loss(turn):
            continue
        trained = next(part.labelled[0].tolist() for part in parts if part.num_turns > number)
        for name, end, prompt in (("prompt", number, True), ("answer", number + 1, False)):
            try:
                served = encoder.serving_ids(replace(chat, messages=chat.messages[:end]), prompt=prompt)
            except Unrendered as error:
                yield TemplateDifference(place, number + 1, name, 0, f"(not rendered: {error})", "")
                break
            at = len(commonprefix([served, trained]))  # noqa: RUF071  # as above
            if at < len(served):
                around = (encoder.decode(ids[max(at - _AROUND, 0) : at + _AROUND]) for ids in (served, trained))
                yield TemplateDifference(place, number + 1, name, at, *around)
                break


def bad_rows(dataset: Dataset, encoder: TextEncoder, objective: str) -> Iterator[DataError]:
    """Yield what is wrong with each row that training would refuse, in the order in which it reads them.

    Raises:
        DataError: the data set or the chat template is wrong, whatever the rows.
        MachineError: the hub cannot be reached.
    """
    pipeline = Pipeline(dataset, objective)
    errors: list[DataError] = []
    places: set[str | None] = set()  # a mixture may take a row more than once
    for _ in _one_by_one(pipeline, encoder, errors.append):
        for error in errors:
            if error.where not in places:
                places.add(error.where)
                yield error
        errors.clear()


def _one_by_one(pipeline: Pipeline, encoder: TextEncoder, on_error: OnError) -> Iterator[None]:
    """Take all rows through the pipeline; the last time, as far as they can be read."""
    try:
        tally, samples = pipeline.tally(), SampleEncoder.of(pipeline, encoder)
        for placed in pipeline.samples(tally, on_error):
            samples.encode([placed], tally, on_error)
            yield
    except Unreadable as error:
        on_error(error)
    yield
