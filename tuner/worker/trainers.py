"""What tuner changes in TRL's trainers, for every objective. Read it from top to bottom.

`worker.objectives` has one module for each objective, which says what that objective adds to TRL's class. The fields
that others set (`consensus`, `pace`, `write_checkpoint` ...) are declared with their defaults in `trainer_types`.
`trainer_setup` makes a trainer from a recipe; this module reads no recipe. Seen with transformers 5.24, TRL 1.16 and
accelerate 1.15. `compat.check_names` refuses a release that lacks one of the names replaced here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from datasets import Dataset
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import BatchSampler, DataLoader, Sampler
from transformers import PreTrainedModel
from transformers.trainer_utils import seed_worker

from tuner.data.batches import LIKELIHOOD
from tuner.data.encoder import Row
from tuner.data.layouts import WEIGHTS
from tuner.data.prepared import in_arrays
from tuner.data.sample import IGNORED
from tuner.errors import DataError, Option
from tuner.machine.libraries import replaced
from tuner.recipes.schema.unlearned_layers import CHOOSERS
from tuner.worker import compat
from tuner.worker.consensus import random_states, sent, set_random_states
from tuner.worker.long_rows import WHOLE, RowPart, part_of
from tuner.worker.noise import LENGTHS, lengths_of
from tuner.worker.trainer_types import Batch, MixedIn

_COUNTS = "counts"
"""The key of a batch that holds its `Counts`."""


# The rows of a step


@dataclass(frozen=True)
class Counts:
    """What a micro-batch holds of the data set, all 0 for a stand-in. `trained`: labels that carry loss.

    `weight`: the sum of their weights in parts of `UNIT`, which is the same in any order; None: each weighs 1.
    """

    rows: int
    tokens: int
    trained: int
    weight: int | None = None

    @property
    def items(self) -> int:
        """What the loss of the micro-batch is divided by, in parts of `UNIT`."""
        return self.trained * UNIT if self.weight is None else self.weight


UNIT = 2**36
"""A weight of 1 as an integer, for sums that are the same in any order; 100 million tokens fit into 63 bits."""


class RoundRobinBatchSampler(BatchSampler):  # type: ignore[misc]
    """The micro-batches of all ranks in turns, the same number for each: a rank without rows in the last round gets [].

    `accelerate` would repeat rows if the ranks do not divide them: what is learned would depend on the number of ranks.
    `shared_by` neighbouring ranks get the same micro-batch. `batch_size` is None, so that accelerate takes batches of
    different sizes as they are.
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

    collate: Callable[[Sequence[Row]], Batch]
    stand_in: Row
    part: RowPart = WHOLE
    """The part of the tokens that this rank gets, and counts."""
    tells_lengths: bool = False
    """Add the length of each token's sample to the batch."""

    def __call__(self, rows: Sequence[Row]) -> Batch:
        batch = self.collate(rows or [self.stand_in])
        if self.tells_lengths:
            batch[LENGTHS] = lengths_of(rows or [self.stand_in], batch["input_ids"])
        if self.part != WHOLE:
            batch, num_tokens, trained = self.part.of(batch)
        else:
            labels_BT = batch.get("labels", batch.get(LIKELIHOOD))
            mask_BT = batch.get("attention_mask")
            num_tokens = sum(len(row["input_ids"]) for row in rows) if mask_BT is None else int(mask_BT.sum())
            trained = 0 if labels_BT is None else num_trained(labels_BT)
        weight = weight_of(batch)
        return {**batch, _COUNTS: Counts(len(rows), num_tokens, trained, weight) if rows else Counts(0, 0, 0)}


def weight_of(batch: Batch) -> int | None:
    """Return the sum of the weights of a batch's labels in parts of `UNIT`; None if each weighs 1."""
    if WEIGHTS not in batch:
        return None
    is_shifted = "shift_labels" in batch
    labels_BT, weights_BT = batch["shift_labels" if is_shifted else "labels"], batch[WEIGHTS]
    if not is_shifted:
        labels_BT, weights_BT = labels_BT[:, 1:], weights_BT[:, 1:]
    return int((weights_BT[labels_BT != IGNORED].double().cpu() * UNIT).round().long().sum())


def num_trained(labels_BT: Tensor) -> int:
    """Return how many tokens carry loss; nothing predicts the first of a row."""
    return int((labels_BT[:, 1:] != IGNORED).sum())


def validation_rounds(num_rows: int, batch_size: int, num_ranks: int) -> Iterator[tuple[range, ...]]:
    """Yield the rows that each rank takes in each round of a validation: the same number on every rank.

    If fewer rows than ranks are left, all ranks take the same ones. Ranks that share rows count as one here.
    """
    start = 0
    while num_rows - start >= num_ranks:
        size = min(batch_size, (num_rows - start) // num_ranks)
        yield tuple(range(start + rank * size, start + (rank + 1) * size) for rank in range(num_ranks))
        start += size * num_ranks
    for first in range(start, num_rows, batch_size):
        yield (range(first, min(first + batch_size, num_rows)),) * num_ranks


# What all trainers do


class CheckpointHooks(MixedIn):
    """Mixed into a Trainer: hooks write its checkpoints and read them, where transformers has no public method."""

    def save_last_step(self) -> None:
        """Write a checkpoint outside of training, which was left in the middle of a step or of a validation."""
        self._save_checkpoint(self.model, None)

    def set_random_states_of(self, checkpoint: str) -> None:
        self._load_rng_state(checkpoint)

    def _save_checkpoint(self, model: PreTrainedModel, trial: object) -> None:
        write = partial(super()._save_checkpoint, model, trial)
        if self.write_checkpoint:
            self.write_checkpoint(write)
        else:
            write()

    def save_model(self, *args: Any, **options: Any) -> None:
        """Write the weights of a checkpoint for `from_pretrained`, if they are wanted."""
        if self.saves_model:
            super().save_model(*args, **options)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        load = partial(super()._load_optimizer_and_scheduler, checkpoint)
        if self.load_states:
            self.load_states(load)
        else:
            load()

    def _load_rng_state(self, checkpoint: str | None) -> None:
        load: Callable[[str | None], None] = super()._load_rng_state
        if self.load_random_states:
            self.load_random_states(load)
        else:
            load(checkpoint)


class TunerTrainer(CheckpointHooks):
    """Mixed into a trainer of TRL. It changes five things:

    - decay: weights that no gradient reaches stay as they are
    - schedule: the first update of the warm-up already learns
    - rows: an epoch trains on every row once, and the rows of a step weigh alike
    - loss: the consensus of the ranks hears each training loss before the backward pass
    - validation: the loss is the mean over all trained tokens, on any number of ranks
    """

    _num_counted: int | None = None

    # -- decay

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names of the weights that decay: of those of transformers, all but what chooses tokens."""
        return [name for name in super().get_decay_parameter_names(model) if not re.fullmatch(CHOOSERS, name)]

    # -- schedule

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LambdaLR:
        """Return a schedule in which update u of w in the warm-up, counted from 1, has u / w of the rate.

        transformers gives it (u - 1) / w, so that the first update of every run changes nothing, and a run of one
        update learns nothing at all. Later updates are as in transformers. A share of the steps in `num_decay_steps`, a
        float, becomes their number.
        """
        if self.lr_scheduler is None:
            compat.give_defaults(optimizer or self.optimizer)
            num_warmup, options = self.args.get_warmup_steps(num_training_steps), self.args.lr_scheduler_kwargs or {}
            share = options.get("num_decay_steps")
            if isinstance(share, float):  # of all steps; the warm-up comes first
                num_decay = min(math.ceil(share * num_training_steps), max(num_training_steps - num_warmup, 0))
                self.args.lr_scheduler_kwargs = {**options, "num_decay_steps": num_decay}
            schedule = super().create_scheduler(num_training_steps, optimizer)
            # After a warm-up that lasts to the end no update follows, and transformers divides by their number.
            is_all = num_warmup >= num_training_steps
            factors = [partial(_factor, None if is_all else course, num_warmup) for course in schedule.lr_lambdas]
            self.lr_scheduler = LambdaLR(schedule.optimizer, factors)
        if self.on_schedule_made:
            self.on_schedule_made(self.lr_scheduler, optimizer or self.optimizer)
        return self.lr_scheduler

    # -- rows

    def get_train_dataloader(self) -> DataLoader[Any]:
        args, stream, part = self.args, self.stream, part_of(self.args)
        rows = self.train_dataset if stream else in_arrays(self.train_dataset)
        sampler = compat.train_sampler(self, rows) if stream is None else stream
        loader = DataLoader(
            rows,
            # accelerate gives a micro-batch to all ranks that split the layers.
            batch_sampler=RoundRobinBatchSampler(
                sampler, args.train_batch_size, args.world_size // self.get_tp_size(), part.size
            ),
            collate_fn=Collator(
                self.data_collator,
                self.stand_in(rows[stream.start if stream else 0]),
                part,
                tells_lengths=self.noise is not None,
            ),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            worker_init_fn=partial(seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index),
        )
        return self.accelerator.prepare(loader)

    @staticmethod
    def stand_in(row: Row) -> Row:
        """Return the row that a rank computes on where it has none, so that all ranks do the same."""
        return row

    def get_batch_samples(
        self, iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], Tensor | None]:
        """Return a step's micro-batches, and what all ranks divide their losses by: its tokens' weight, or None."""
        batches = self.images.ahead(iterator) if self.images else iterator
        with self._timed("data"):
            self.batches_of_step = list(islice(batches, num_batches))
        counts = [batch[_COUNTS] for batch in self.batches_of_step]
        # Ranks that split the layers see the same tokens: one of them counts.
        self.num_tokens = 0 if self.args.process_index % self.get_tp_size() else sum(count.tokens for count in counts)
        totals_2 = sent([sum(count.rows for count in counts), sum(count.items for count in counts)], device)
        with self._timed("waiting"):
            dist.all_reduce(totals_2)
        # At least a unit: a step may have no trained token.
        self.items_of_step = totals_2[1].clamp(min=1).float() / UNIT
        self.num_items_of_step = None if self.weighs_rows else self.items_of_step
        # The host waits for this number only where it weighs a loss by rows.
        self.rows_of_step = int(totals_2[0]) if self.weighs_rows else totals_2[0]
        return self.batches_of_step, self.num_items_of_step

    def floating_point_ops(self, inputs: Batch) -> int:
        """Return the FLOPs of a micro-batch as the Trainer counts them; it would look at all weights each time."""
        name = getattr(self.model, "main_input_name", "input_ids")
        if self._num_counted is None:
            self._num_counted = self.model.num_parameters(exclude_embeddings=True)
        return 6 * inputs[name].numel() * self._num_counted if name in inputs else 0

    # -- loss

    def _prepare_inputs(self, inputs: Batch) -> Batch:
        """Return a batch on the device; transformers would give the weights of tokens the compute type, too."""
        prepared: Batch = super()._prepare_inputs(inputs)
        return prepared | {WEIGHTS: inputs[WEIGHTS].to(self.args.device)} if WEIGHTS in inputs else prepared

    def compute_loss(self, model: PreTrainedModel, inputs: Batch, *args: Any, **options: Any) -> Any:
        """Return the loss of a micro-batch; in training the consensus of the ranks hears it."""
        has_mask = "attention_mask" in inputs
        with (
            nullcontext() if has_mask else compat.knowing(are_packed="position_ids" in inputs),
            self._timed("forward") if self.model.training else nullcontext(),
        ):
            loss = self.weighed_loss(model, inputs, *args, **options)
        if self.consensus is not None and self.model.training:
            with self._timed("waiting"):
                self.consensus.hear(loss)
        return loss

    def _timed(self, part: Literal["data", "forward", "waiting"]) -> AbstractContextManager[None]:
        return self.pace.measured(part) if self.pace else nullcontext()

    def weighed_loss(self, model: PreTrainedModel, inputs: Batch, *args: Any, **options: Any) -> Any:
        """Return TRL's loss; if it is a mean over rows, weighed by this micro-batch's part of the step's rows.

        `Trainer` weighs the micro-batches of an epoch's last step alike, whatever they hold. A loss that is normalised
        by the step's trained tokens (SFT) is right already: a stand-in has no such token.
        """
        counts = inputs.pop(_COUNTS, None)
        if self.images:
            inputs = self.images.add_pixels(inputs)
        self.rows_of_batch, self.trained_of_batch = (counts.rows, counts.trained) if counts else (None, None)
        if counts is None or not self.weighs_rows:
            return self.loss_of_objective(model, inputs, *args, **options)
        num_batches, num_rows = self.current_gradient_accumulation_steps * self.args.world_size, self.rows_of_step
        if num_rows == num_batches * self.args.train_batch_size:
            return self.loss_of_objective(model, inputs, *args, **options)
        self.rows_of_ranks = self.accelerator.gather(sent([counts.rows], self.args.device))
        with _gathers_of_rows(self.accelerator, self.rows_of_ranks):
            loss = self.loss_of_objective(model, inputs, *args, **options)
        self.rows_of_ranks = None
        # Trainer divides by the step's micro-batches, and the mean of all ranks' gradients is taken.
        return loss * (counts.rows * num_batches / num_rows)

    def loss_of_objective(self, *args: Any, **options: Any) -> Any:
        return super().compute_loss(*args, **options)

    # -- validation

    def get_eval_dataloader(self, eval_dataset: Dataset | None = None) -> DataLoaderShard:
        """Return the loader of this rank's validation rows. Ranks that share rows in training share them here."""
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        assert rows is not None, "transformers asks for it"
        args, part = self.args, part_of(self.args)
        shared_by = part.size * self.get_tp_size()
        rows = rows if self.generates else in_arrays(rows)
        self._num_rows = len(rows)
        self._rounds = list(validation_rounds(len(rows), args.eval_batch_size, args.world_size // shared_by))
        return DataLoaderShard(
            rows,
            batch_sampler=[list(of_groups[args.process_index // shared_by]) for of_groups in self._rounds],
            collate_fn=self.data_collator if part == WHOLE else partial(_collate_part, part, self.data_collator),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            device=args.device,
            _non_blocking=args.accelerator_config.non_blocking,
            _drop_last=True,  # else accelerate cuts what ranks gather in the last round, as if rows were repeated there
        )

    def prediction_step(self, model: PreTrainedModel, inputs: Batch, *args: Any, **options: Any) -> Any:
        """Measure a batch. The loss that balances a mixture of experts is left out: it is no loss of the tokens."""
        with replaced(self, aux_loss_enabled=False):
            prediction = super().prediction_step(model, inputs, *args, **options)
        count = self.num_items(inputs, len(self._rounds[len(self._measured)][0]))
        metrics = compat.metrics_of(self, "eval")
        self._measured.append((float(prediction[0]), count, {name: values[-1] for name, values in metrics.items()}))
        metrics.clear()
        return prediction

    def num_items(self, inputs: Batch, num_rows: int) -> float:
        """Return what a batch's loss is a mean over: the weight of the trained tokens of this rank's part, or rows."""
        if (weight := weight_of(inputs)) is not None:
            return weight / UNIT
        if "shift_labels" in inputs:
            return int((inputs["shift_labels"] != IGNORED).sum())
        return num_trained(inputs["labels"]) if "labels" in inputs else num_rows

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """Return the validation with the weighed mean over trained tokens, pairs or judged answers as its loss.

        transformers gives the mean of the batches' means, and counts rows twice where the ranks do not divide them
        (6.8927 instead of 6.8863 on a random Qwen2 of two layers, 41 rows in batches of 3). Training goes on with the
        random numbers that it would have drawn without the validation.
        """
        self._measured: list[tuple[float, float, Mapping[str, float]]] = []
        random = random_states()  # a loader of rows draws a seed for its workers, also where it has none
        try:
            with replaced(self, is_evaluating=True):
                output = super().evaluation_loop(*args, **options)
                answered = self.measure_answers(self.model, self.state.global_step) if self.measure_answers else {}
        finally:
            set_random_states(random)
        sums_R2 = torch.tensor([(loss * count, count) for loss, count, _ in self._measured], dtype=torch.float64)
        sums_R2 = self.accelerator.reduce(sums_R2.to(self.args.device))
        for total, of_groups in zip(sums_R2, self._rounds, strict=True):
            total /= of_groups.count(of_groups[0])
        weights = sums_R2[:, 1].tolist()
        if not sum(weights):  # on all ranks alike: completions of which nothing can be compared with a teacher's tokens
            fix = f"Validate on more rows, or on none: {Option('val_split', 0)}."
            raise DataError("the validation has no token with a loss", where="val_dataloader", fix=fix)
        output.metrics["eval_loss"] = float(sums_R2[:, 0].sum()) / sum(weights)
        output.metrics.update(answered)
        if self.eval_dataset is not None and self._num_rows < len(self.eval_dataset):
            output.metrics["eval_rows"] = self._num_rows
        compat.metrics_of(self, "eval").update(_means([metrics for *_, metrics in self._measured], weights))
        return output


def _factor(course: Callable[[int], float] | None, num_warmup: int, num_updates: int) -> float:
    """Return the part of the rate that the update after `num_updates` has."""
    if num_updates < num_warmup:
        return (num_updates + 1) / num_warmup
    return course(num_updates) if course else 1.0


@contextmanager
def _gathers_of_rows(accelerator: Accelerator, rows_R: Tensor) -> Iterator[None]:
    """Let TRL's metrics be those of rows where ranks differ in them: a stand-in counts in none.

    Metrics of single rows cannot be gathered then; they are left to each rank.

    Args:
        rows_R: The rows of this micro-batch on each rank, 0 for a stand-in.
    """
    gather, gather_for_metrics = accelerator.gather, accelerator.gather_for_metrics

    def of_rows(tensor: Tensor) -> Tensor:
        gathered = gather_for_metrics(tensor)
        return gathered if tensor.ndim or not gathered.ndim or not rows_R.any() else gathered[rows_R > 0]

    replacements = {"gather": lambda tensor: tensor if tensor.ndim else gather(tensor), "gather_for_metrics": of_rows}
    with replaced(accelerator, **replacements):
        yield


def _collate_part(part: RowPart, collate: Callable[..., Batch], rows: Sequence[Row]) -> Batch:
    return part.of(collate(rows))[0]


def _means(measured: Sequence[Mapping[str, float]], weights: Sequence[float]) -> dict[str, list[float]]:
    """Return the mean of each number over the rounds that have it, as TRL's `log` takes it."""
    means: dict[str, list[float]] = {}
    for name in {name: None for metrics in measured for name in metrics}:
        weighted_values = [
            (metrics[name], weight) for metrics, weight in zip(measured, weights, strict=True) if name in metrics
        ]
        if total := sum(weight for _, weight in weighted_values):
            means[name] = [sum(value * weight for value, weight in weighted_values) / total]
    return means
