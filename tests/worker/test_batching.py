"""Every row once an epoch on any number of ranks, as accelerate deals the batches out; whole runs are in tests/e2e."""

from __future__ import annotations

from typing import Any

import pytest
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import SequentialSampler
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from tuner.data.batches import SampleCollator
from tuner.worker.trainers import Collator, Counts, RoundRobinBatchSampler


def dealt(num_rows: int, micro_batch: int, num_ranks: int, shared_by: int = 1) -> list[list[list[int]]]:
    """Return the batches of each rank."""
    sampler = RoundRobinBatchSampler(SequentialSampler(range(num_rows)), micro_batch, num_ranks, shared_by)
    shards = [BatchSamplerShard(sampler, num_ranks, rank, even_batches=True) for rank in range(num_ranks)]
    found = [list(shard) for shard in shards]
    assert [len(rows) for rows in shards] == [len(rows) for rows in found]
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("micro_batch", [1, 2, 4])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 8, 16, 131])
def test_each_row_is_dealt_out_once_and_ranks_have_equally_many_batches(
    num_rows: int, micro_batch: int, num_ranks: int
) -> None:
    ranks = dealt(num_rows, micro_batch, num_ranks)

    assert sorted(row for batches in ranks for batch in batches for row in batch) == list(range(num_rows))
    assert len({len(batches) for batches in ranks}) == 1
    assert all(len(batch) <= micro_batch for batches in ranks for batch in batches)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 6])
def test_a_step_of_the_same_global_batch_has_the_same_rows_on_any_number_of_ranks(num_ranks: int) -> None:
    per_step = 12 // 2 // num_ranks  # micro-batches of two rows
    ranks = dealt(31, 2, num_ranks)

    steps = [
        sorted(row for batches in ranks for batch in batches[at : at + per_step] for row in batch)
        for at in range(0, len(ranks[0]), per_step)
    ]
    assert steps == [list(range(12)), list(range(12, 24)), list(range(24, 31))]


def test_a_batch_is_counted_and_the_stand_in_of_a_rank_without_rows_counts_for_nothing() -> None:
    def row(*ids: int) -> dict[str, Any]:
        return {"input_ids": list(ids), "labels": [-100, *ids[1:]], "seq_lengths": [len(ids)]}

    collator = Collator(samples(needs_mask=True), row(1, 2, 3))

    padded = collator([row(0, 1, 2, 3, 4, 5, 6, 7, 8, 9), row(*range(9))])
    assert padded["input_ids"].shape == (2, 10)
    assert padded["counts"] == Counts(rows=2, tokens=19, trained=17)
    assert collator([])["counts"] == Counts(rows=0, tokens=0, trained=0)
    assert collator([])["input_ids"].tolist() == [[1, 2, 3]]


def samples(*, needs_mask: bool) -> SampleCollator:
    return SampleCollator(DataCollatorForLanguageModeling(0, padding_free=True), needs_mask)


@pytest.mark.parametrize("needs_mask", [True, False])
def test_rows_of_one_sample_and_one_length_need_no_mask(needs_mask: bool) -> None:
    row, same = ({"input_ids": [at, 2], "labels": [-100, 2], "seq_lengths": [2]} for at in (0, 1))
    longer = {"input_ids": [1, 2, 3], "labels": [1, 2, 3], "seq_lengths": [3]}
    collate = samples(needs_mask=needs_mask)

    assert collate([row, same])["input_ids"].tolist() == [[0, 2], [1, 2]]
    assert "position_ids" not in collate([row, same])
    assert collate([row, longer])["position_ids"].tolist() == [[0, 1, 0, 1, 2]]


def test_full_rows_stand_side_by_side_where_attention_takes_a_mask() -> None:
    packed = {"input_ids": list(range(20)), "labels": list(range(20)), "seq_lengths": [15, 5]}
    shorter = {"input_ids": list(range(18)), "labels": list(range(18)), "seq_lengths": [8, 10]}

    apart, flat = (samples(needs_mask=needs_mask)([packed, shorter]) for needs_mask in (True, False))

    assert apart["position_ids"].tolist() == [[*range(15), *range(5)], [*range(8), *range(10), 0, 0]]
    # The first token of a sample is predicted by none, as where rows lie end to end.
    assert apart["labels"][1].tolist() == [-100, *range(1, 8), -100, *range(9, 18), -100, -100]
    assert flat["labels"][0, 20:].tolist() == apart["labels"][1, :18].tolist()
    assert apart.keys() == {"input_ids", "labels", "position_ids"}
    assert flat["input_ids"].shape == (1, 38)


def test_rows_that_would_be_padded_much_lie_end_to_end() -> None:
    short = {"input_ids": [1] * 10, "labels": [1] * 10, "seq_lengths": [5, 5]}
    full = {"input_ids": [1] * 30, "labels": [1] * 30, "seq_lengths": [20, 10]}

    assert samples(needs_mask=True)([short, full])["input_ids"].shape == (1, 40)
