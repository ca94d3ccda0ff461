"""Which rows each rank's micro-batches hold, and what they weigh: every row once an epoch, on any number of ranks.

It computes no loss. `accelerate` repeats rows where ranks do not divide them, and `Trainer` weighs the micro-batches of
an epoch's last step alike whatever they hold: with either, the number of ranks decides what is learned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, Sampler
from transformers.trainer_utils import seed_worker

from tuner.data.stream import Stream
from tuner.worker import compat, sequence_parallel
from tuner.worker.evaluation import num_trained
from tuner.worker.sequence_parallel import WHOLE, Share

_COUNTS = "counts"
"""The key of a batch that holds its `Counts`."""


@dataclass(frozen=True)
class Counts:
    """What a micro-batch holds of the data set, all 0 for a stand-in. `trained`: labels that carry loss."""

    rows: int
    tokens: int
    trained: int


class RoundRobinBatchSampler(BatchSampler):  # type: ignore[misc]
    """The micro-batches of all ranks in turns, as many for each: ranks that get no row in the last round get `[]`.

    `shared_by` ranks one after another get the same one.

    `batch_size` is None, which tells accelerate that batches differ in size and are to be taken as they are.
    """

    batch_size: int | None

    def __init__(self, sampler: Sampler[int], micro_batch: int, num_ranks: int, shared_by: int = 1) -> None:
        super().__init__(sampler, micro_batch, drop_last=False)
        self.micro_batch, self.num_groups, self.shared_by = micro_batch, num_ranks // shared_by, shared_by
        self.batch_size = None

    def __len__(self) -> int:
        return self._num_batches() * self.shared_by

    def _num_batches(self) -> int:
        rounds: int = -(-len(self.sampler) // (self.micro_batch * self.num_groups))
        return rounds * self.num_groups

    def __iter__(self) -> Iterator[list[int]]:
        at, batch = 0, []
        for row in self.sampler:
            batch.append(row)
            if len(batch) == self.micro_batch:
                yield from [batch] * self.shared_by
                at, batch = at + 1, []
        for _ in range(at, self._num_batches()):
            yield from [batch] * self.shared_by
            batch = []


@dataclass(frozen=True)
class Collator:
    """Collate rows, or the stand-in where a rank has none in this round, and count them while they are on the CPU."""

    collate: Callable[[Sequence[Any]], dict[str, Any]]
    stand_in: Any
    share: Share = WHOLE
    """The part of the tokens that this rank gets, and counts."""

    def __call__(self, rows: Sequence[Any]) -> dict[str, Any]:
        if self.share != WHOLE:
            batch, num_tokens, trained = self.share.of(self.collate(rows or [self.stand_in]))
        else:
            batch = self.collate(rows or [self.stand_in])
            num_tokens, trained = _num_tokens(rows, batch), num_trained(batch["labels"]) if "labels" in batch else 0
        return {**batch, _COUNTS: Counts(len(rows), num_tokens, trained) if rows else Counts(0, 0, 0)}


class TrainsOnEachRowOnce:
    """Mixed into a trainer of TRL: an epoch trains on every row once, and a step's rows weigh alike.

    A loss that is normalised by the step's trained tokens (SFT) has that already: a stand-in has none of them. A loss
    that is a mean over a micro-batch's rows is weighed by their number.
    """

    weighs_rows = True
    """Whether `compute_loss` returns a mean over rows."""
    stream: Stream | None = None
    """What the rows come from, where they come while it trains."""

    def get_train_dataloader(self: Any) -> DataLoader[Any]:
        args, rows = self.args, self.train_dataset
        stream, share = self.stream, sequence_parallel.share_of(args)
        sampler = stream.order() if stream else compat.train_sampler(self, rows)
        loader = DataLoader(
            rows,
            batch_sampler=RoundRobinBatchSampler(sampler, args.train_batch_size, args.world_size, share.size),
            collate_fn=Collator(self.data_collator, self.stand_in(rows[stream.start if stream else 0]), share),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            worker_init_fn=partial(seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index),
        )
        return self.accelerator.prepare(loader)

    @staticmethod
    def stand_in(row: dict[str, Any]) -> dict[str, Any]:
        """Return the row that a rank computes on where it has none, so that all ranks do the same."""
        return row

    def get_batch_samples(self: Any, iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """Return a step's micro-batches, and by what all ranks divide their losses: its trained tokens, or None."""
        self.batches_of_step = list(islice(iterator, num_batches))
        counts = [batch[_COUNTS] for batch in self.batches_of_step]
        self.num_tokens = sum(one.tokens for one in counts)
        total = torch.tensor(sum(one.rows if self.weighs_rows else one.trained for one in counts), device=device)
        dist.all_reduce(total)
        self.num_items_of_step = None if self.weighs_rows else total
        if self.weighs_rows:
            self.rows_of_step = int(total)
        return self.batches_of_step, self.num_items_of_step

    def compute_loss(self: Any, model: Any, inputs: dict[str, Any], *args: Any, **options: Any) -> Any:
        """Return TRL's loss; a mean over rows by the share of the step's rows that are in this micro-batch."""
        counts = inputs.pop(_COUNTS, None)
        if counts is None or not self.weighs_rows:
            return super().compute_loss(model, inputs, *args, **options)  # type: ignore[misc]
        num_batches = self.current_gradient_accumulation_steps * self.args.world_size
        is_even = self.rows_of_step == num_batches * self.args.train_batch_size
        with nullcontext() if is_even else _gathers_scalars_alone(self.accelerator):
            loss = super().compute_loss(model, inputs, *args, **options)  # type: ignore[misc]
        # Trainer divides by the step's micro-batches, and the mean of all ranks' gradients is taken.
        return loss * (counts.rows * num_batches / self.rows_of_step)


@contextmanager
def _gathers_scalars_alone(accelerator: Any) -> Iterator[None]:
    """Leave TRL's metrics of single rows to each rank: they cannot be gathered where ranks differ in rows."""
    gather = accelerator.gather
    accelerator.gather = lambda tensor: tensor if tensor.ndim else gather(tensor)
    try:
        yield
    finally:
        accelerator.gather = gather


def _num_tokens(rows: Sequence[Any], batch: dict[str, Any]) -> int:
    """Return the tokens that are not padding."""
    return (
        int(batch["attention_mask"].sum()) if "attention_mask" in batch else sum(len(row["input_ids"]) for row in rows)
    )
