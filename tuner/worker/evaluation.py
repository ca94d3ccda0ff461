"""A validation loss that depends on the rows alone: each counts once, whatever the ranks and the size of a batch.

It computes no loss of a batch; TRL's trainers do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard

from tuner.data.sample import IGNORED
from tuner.worker import compat, sequence_parallel
from tuner.worker.random_state import random_states, set_random_states
from tuner.worker.sequence_parallel import WHOLE, Share


def num_trained(labels_BT: torch.Tensor) -> int:
    """Return how many tokens carry loss; nothing predicts the first of a row."""
    return int((labels_BT[:, 1:] != IGNORED).sum())


def shares(num_rows: int, batch_size: int, num_ranks: int) -> Iterator[tuple[range, ...]]:
    """Yield the rows that each rank takes in each round: as many on every rank, which all compute together.

    Of the last rows, fewer than ranks, all take the same. Ranks that share rows are one here.
    """
    start = 0
    while num_rows - start >= num_ranks:
        size = min(batch_size, (num_rows - start) // num_ranks)
        yield tuple(range(start + rank * size, start + (rank + 1) * size) for rank in range(num_ranks))
        start += size * num_ranks
    for first in range(start, num_rows, batch_size):
        yield (range(first, min(first + batch_size, num_rows)),) * num_ranks


class EvaluatesEachRowOnce:
    """A trainer of TRL whose evaluation gives the mean over trained tokens, or over pairs and judged answers.

    transformers gives the mean of the batches' means, and counts rows twice where the ranks do not divide them (6.8927
    instead of 6.8863 on a random Qwen2 of two layers, 41 rows in batches of 3). Ranks that share rows in training share
    them here. Training goes on with the random numbers that it would have drawn without the evaluation.
    """

    is_evaluating = False
    measure_answers: Callable[[Any, int], dict[str, float]] | None = None
    """With `log.generate`: takes the model and its step, returns metrics of its answers (worker.answer_metrics)."""

    def get_eval_dataloader(self: Any, eval_dataset: Any = None) -> DataLoaderShard:
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        args, share = self.args, sequence_parallel.share_of(self.args)
        self._num_rows = len(rows)
        self._shares = list(shares(len(rows), args.eval_batch_size, args.world_size // share.size))
        return DataLoaderShard(
            rows,
            batch_sampler=[list(of_groups[args.process_index // share.size]) for of_groups in self._shares],
            collate_fn=self.data_collator if share == WHOLE else partial(_part, share, self.data_collator),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            device=args.device,
            _drop_last=True,  # else accelerate cuts what ranks gather in the last round, as if rows were repeated there
        )

    def prediction_step(self: Any, model: Any, inputs: dict[str, Any], *given: Any, **named: Any) -> Any:
        count = _weight(inputs, num_rows=len(self._shares[len(self._rounds)][0]))
        found = super().prediction_step(model, inputs, *given, **named)  # type: ignore[misc]
        measured = compat.eval_metrics(self)
        self._rounds.append((float(found[0]), count, {name: values[-1] for name, values in measured.items()}))
        measured.clear()
        return found

    def evaluation_loop(self: Any, *given: Any, **named: Any) -> Any:
        self._rounds: list[tuple[float, int, Mapping[str, float]]] = []
        self.is_evaluating = True
        random = random_states()  # a loader of rows draws a seed for its workers, also where it has none
        try:
            output = super().evaluation_loop(*given, **named)  # type: ignore[misc]
            answered = self.measure_answers(self.model, self.state.global_step) if self.measure_answers else {}
        finally:
            self.is_evaluating = False
        set_random_states(random)
        sums_R2 = torch.tensor([(loss * count, count) for loss, count, _ in self._rounds], dtype=torch.float64)
        sums_R2 = self.accelerator.reduce(sums_R2.to(self.args.device))
        for total, of_groups in zip(sums_R2, self._shares, strict=True):
            total /= of_groups.count(of_groups[0])
        weights = sums_R2[:, 1].tolist()
        output.metrics["eval_loss"] = float(sums_R2[:, 0].sum()) / sum(weights)
        output.metrics.update(answered)
        if self.eval_dataset is not None and self._num_rows < len(self.eval_dataset):
            output.metrics["eval_rows"] = self._num_rows
        compat.eval_metrics(self).update(_means([measured for *_, measured in self._rounds], weights))
        return output


def _part(share: Share, collate: Callable[..., dict[str, Any]], rows: Sequence[Any]) -> dict[str, Any]:
    return share.of(collate(rows))[0]


def _weight(inputs: Mapping[str, Any], num_rows: int) -> int:
    """Return what a batch's loss is a mean over: trained tokens, those of this rank's part, or rows."""
    if "shift_labels" in inputs:
        return int((inputs["shift_labels"] != IGNORED).sum())
    return num_trained(inputs["labels"]) if "labels" in inputs else num_rows


def _means(measured: Sequence[Mapping[str, float]], weights: Sequence[float]) -> dict[str, list[float]]:
    """Return the mean of each number over the rounds that have it, as TRL's `log` takes it."""
    means = {}
    for name in {name: None for one in measured for name in one}:
        known = [(one[name], weight) for one, weight in zip(measured, weights, strict=True) if name in one]
        means[name] = [sum(value * weight for value, weight in known) / sum(weight for _, weight in known)]
    return means
