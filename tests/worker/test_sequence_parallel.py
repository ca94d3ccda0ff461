"""Ranks that share samples: which part each has, and that together they compute what one computes alone."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch

from tests.e2e.runs import environment
from tests.e2e.warm import of_module, warm
from tests.worker.sharing import IGNORED, SAMPLES, batch, config_of
from tests.worker.test_batching import dealt
from tuner.recipes.schema.long_context import SHARED_TYPES
from tuner.worker.long_rows import RowPart

TOLERANCE = 1e-5
"""Sums of fp32 in another order; what sees a token too many or too few is off by a tenth and more."""


def distances(*kinds: str) -> Iterator[tuple[str, list[float]]]:
    done = warm().run(kinds, code=of_module("tests.worker.sharing"), env=environment())
    assert not done.returncode, done.stderr[-4000:]
    yield from (json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))


@pytest.mark.long
def test_every_kind_that_is_said_to_be_shared_computes_the_same_with_a_window_too() -> None:
    windowed = {f"{kind}/4" for kind in SHARED_TYPES if hasattr(config_of(kind), "sliding_window")}

    found = dict(distances(*sorted(SHARED_TYPES | windowed)))

    assert len(windowed) > 5 and found.keys() == SHARED_TYPES | windowed
    assert {kind: far for kind, far in found.items() if isinstance(far, str) or max(far) > TOLERANCE} == {}


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_parts_of_a_row_are_the_row_and_its_padding_is_a_sample_without_loss(size: int) -> None:
    whole, length = batch(50), sum(SAMPLES)
    parts = [RowPart(index, size).of(whole) for index in range(size)]

    joined = {name: torch.cat([part[name] for part, *_ in parts], dim=1) for name in ("input_ids", "position_ids")}
    assert {part["input_ids"].shape[1] for part, *_ in parts} == {-(-length // size)}
    assert all(torch.equal(joined[name][:, :length], whole[name]) for name in joined)
    assert joined["position_ids"][0, length:].tolist() == list(range(-length % size))
    targets = torch.cat([part["shift_labels"] for part, *_ in parts], dim=1)[0].tolist()
    assert targets == [*whole["labels"][0, 1:].tolist(), *[IGNORED] * (1 + -length % size)]
    assert sum(num_tokens for _, num_tokens, _ in parts) == length
    assert [trained for *_, trained in parts] == [int((part["shift_labels"] != IGNORED).sum()) for part, *_ in parts]


def test_ranks_that_share_samples_are_dealt_the_same_rows_and_groups_each_row_once() -> None:
    ranks = dealt(31, 2, 4, shared_by=2)

    assert ranks[0] == ranks[1] and ranks[2] == ranks[3]
    assert [ranks[0], ranks[2]] == dealt(31, 2, 2)
