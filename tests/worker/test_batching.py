"""Every row once an epoch on any number of ranks, as accelerate deals the batches out; whole runs are in tests/e2e."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import SequentialSampler
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from tuner.worker.batching import Collator, Counts, RoundRobinBatchSampler


def dealt(num_rows: int, micro_batch: int, num_ranks: int, shared_by: int = 1) -> list[list[list[int]]]:
    """Return the batches of each rank."""
    sampler = RoundRobinBatchSampler(SequentialSampler(range(num_rows)), micro_batch, num_ranks, shared_by)
    shards = [BatchSamplerShard(sampler, num_ranks, rank, even_batches=True) for rank in range(num_ranks)]
    found = [list(shard) for shard in shards]
    assert [len(one) for one in shards] == [len(one) for one in found]
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
    def collate(rows: Any) -> dict[str, Any]:
        return {"input_ids": torch.tensor(rows), "labels": torch.tensor(rows).masked_fill(torch.tensor(rows) < 2, -100)}

    collator = Collator(collate, [1, 2, 3])

    assert collator([[0, 1, 2], [5, 6, 7]])["counts"] == Counts(rows=2, tokens=6, trained=3)
    assert collator([])["counts"] == Counts(rows=0, tokens=0, trained=0)
    assert collator([])["input_ids"].tolist() == [[1, 2, 3]]


def test_rows_of_one_sample_and_one_length_are_not_laid_end_to_end() -> None:
    one, same = ({"input_ids": [at, 2], "labels": [-100, 2], "seq_lengths": [2]} for at in (0, 1))
    longer = {"input_ids": [1, 2, 3], "labels": [1, 2, 3], "seq_lengths": [3]}
    packed = {"input_ids": [1, 2], "labels": [1, 2], "seq_lengths": [1, 1]}
    collator = Collator(DataCollatorForLanguageModeling(0, padding_free=True), longer)

    assert collator([one, same])["input_ids"].tolist() == [[0, 2], [1, 2]]
    assert "position_ids" not in collator([one, same])
    assert collator([one, longer])["position_ids"].tolist() == [[0, 1, 0, 1, 2]]
    assert collator([packed])["position_ids"].tolist() == [[0, 0]]
