"""Rows -> samples -> steps of an epoch -> the steps of a run, and how sure each number is before the data is read.

Arithmetic alone: `launch.row_counts` counts rows, `data` reads them and the trainer of transformers counts the
steps; the tests hold all three together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from tuner.data import step_count
from tuner.machine.topology import Batch
from tuner.recipes.schema import RecipeConfig

_BYTES_PER_TOKEN = 4
"""Of English text as JSON, about: for rows that no tokenizer has counted."""
_WHY_PARTS = "rows are left out, or split where the chat template renders an answer otherwise once other turns follow"
_MAX_FITTED = 512
"""Sampled rows that are fitted into packed rows one by one: a few milliseconds."""


class Certainty(Enum):
    """How sure a count is before the data is read."""

    EXACT = "exact"
    UNLESS_DROPPED = "exact unless samples are dropped"
    AT_MOST = "at most"
    ABOUT = "exact once the data is tokenized"
    UNKNOWN = "known once the data is read"


_SURENESS = {
    Certainty.EXACT: ("", ""),
    Certainty.UNLESS_DROPPED: ("", " (fewer if rows are dropped: {})"),
    Certainty.AT_MOST: ("at most ", " ({})"),
    Certainty.ABOUT: ("about ", f" ({{}}; {Certainty.ABOUT.value})"),
}
"""The texts before and after a count of each certainty; `{}` is the reason."""


class Count(NamedTuple):
    """A count (None if it is not known), how sure it is, and why."""

    value: int | None
    certainty: Certainty = Certainty.EXACT
    why: str = ""

    @property
    def most(self) -> int | None:
        """An upper bound of the true number, if one is known."""
        return None if self.certainty is Certainty.ABOUT else self.value

    def __str__(self) -> str:
        if self.certainty is Certainty.ABOUT:
            return f"{self.why}; {self.certainty.value}"
        return f"{self.certainty.value}: {self.why}" if self.why else self.certainty.value


class DatasetSize(NamedTuple):
    """One data set: the rows of one pass over it; None and `why` if they are not counted.

    `num_bytes` is the size of its files; `lengths` are the tokens of samples of some rows, if a tokenizer is available.
    `parts_a_row` is above 1 if the chat template splits conversations by answer, and None if that is not known.
    `samples_a_row` is 2 if each row is two samples, the number of completions if they are generated of a prompt, and
    None if it is not known: one or two.
    """

    rows: int | None
    why: str = ""
    weight: float = 1.0
    samples_a_row: int | None = 1
    num_bytes: int = 0
    lengths: tuple[int, ...] = ()
    parts_a_row: float | None = 1.0

    @property
    def sampled(self) -> tuple[int, ...]:
        """The tokens of typical rows: those of `lengths`, or else one number from the size of the files."""
        return self.lengths or (max(1, round(self.num_bytes / max(1, self.rows or 0) / _BYTES_PER_TOKEN)),)

    @property
    def tokens(self) -> float:
        """About how many tokens the rows of one epoch have."""
        return self.parts * sum(self.sampled) / len(self.sampled)

    @property
    def taken(self) -> int | None:
        """The rows of one epoch: a fraction of the weight takes that share of the rows, rounded up."""
        if self.rows is None:
            return None
        # The decimal that was written: in floats 100 x 0.07 is more than 7.
        from fractions import Fraction  # with decimal 3 ms, of no use where no rows are counted

        whole_passes, rest = divmod(Fraction(str(self.weight)), 1)
        return int(whole_passes) * self.rows + math.ceil(rest * self.rows)

    @property
    def parts(self) -> int:
        """About how many samples the conversations of one epoch are."""
        return round((self.taken or 0) * (1.0 if self.parts_a_row is None else self.parts_a_row))

    @property
    def samples(self) -> int | None:
        """The samples of one epoch."""
        return None if self.taken is None or self.samples_a_row is None else self.taken * self.samples_a_row


class Steps(NamedTuple):
    """The counts of one run: rows, samples and steps of an epoch, and `total`, the step at which it ends.

    `samples` are packed rows where a checkpoint tells them, else what will be packed. `done` is the step to go on from.
    """

    rows: Count
    samples: Count
    per_epoch: Count
    total: Count
    done: int = 0

    @property
    def left(self) -> int | None:
        """The steps that are still to be trained."""
        return None if self.total.value is None else max(self.total.value - self.done, 0)

    def to_json(self) -> dict[str, int | str | None]:
        """Return the counts, and how sure they are, as plain values."""
        return {
            "rows": self.rows.value,
            "rows_are": str(self.rows),
            "samples": self.samples.value,
            "steps_per_epoch": self.per_epoch.value,
            "steps_per_epoch_is": str(self.per_epoch),
            "steps": self.total.value,
            "steps_are": str(self.total),
        }

    def describe(self) -> str:
        """Return one line: how many steps the run has, how sure that is, and the step that it resumes from."""
        total, done = self.total, f"{self.done:,}"
        if total.value is None:
            resumed = f"; resuming from step {done}" if self.done else ""
            return f"{total.certainty.value} ({total.why}){resumed}"
        if not self.left:
            return f"{total.value:,}, all of them done: only the result is saved again"
        resumed = f", resuming from step {done}, {self.left:,} left" if self.done else ""
        before, after = _SURENESS[total.certainty]
        return f"{before}{total.value:,}{resumed}{after.format(total.why)}"


def count_steps(
    config: RecipeConfig, batch: Batch, sizes: Sequence[DatasetSize], done: int = 0, trained_on: int | None = None
) -> Steps:
    """Return the steps of a run, as transformers 5.24 counts them.

    An epoch's last micro-batch may be smaller, ranks without one compute on a stand-in (`worker.trainers`), and the
    last accumulation may be shorter too. `max_steps` wins over epochs and goes through the data as often as it takes.

    Args:
        done: The step of the checkpoint that the run resumes from.
        trained_on: Its samples (or packed rows), which are those of this run: one with other data is refused.
    """
    rows = _rows(sizes, config.train_dataloader.dataset.max_rows)
    samples = _samples(sizes, rows, config)
    if trained_on is not None:
        samples = Count(trained_on)
    per_epoch = samples._replace(
        value=None if samples.value is None else step_count.steps_per_epoch(config, batch, samples.value)
    )
    total = _total(config, per_epoch)
    return Steps(rows, samples, per_epoch, total, done)


def estimate_tokens(config: RecipeConfig, sizes: Sequence[DatasetSize]) -> float | None:
    """Return about how many tokens the rows of an epoch have, or None if the rows are not counted."""
    rows = _rows(sizes, config.train_dataloader.dataset.max_rows)
    if rows.value is None:
        return None
    counted = sum(size.taken or 0 for size in sizes)
    return sum(size.tokens for size in sizes) * rows.value / max(1, counted)


def sample_tokens(config: RecipeConfig, sizes: Sequence[DatasetSize]) -> float | None:
    """Return the length of a token's sample in packed rows, the mean over all tokens; None if rows are not counted."""
    longest, tokens, pairs = config.train_dataloader.dataset.max_length, 0.0, 0.0
    for size in sizes:
        if size.rows is None:
            return None
        of_sampled = size.parts / len(size.sampled)
        for length in size.sampled:
            full_pieces, rest = divmod(length, longest)
            tokens += of_sampled * length
            pairs += of_sampled * (full_pieces * longest**2 + rest**2)
    return pairs / tokens if tokens else None


def count_samples(config: RecipeConfig, sizes: Sequence[DatasetSize]) -> Count:
    """Return the rows that the trainer has in an epoch."""
    return _samples(sizes, _rows(sizes, config.train_dataloader.dataset.max_rows), config)


def packed_rows(num_rows: int, lengths: Sequence[int], pack_length: int, max_length: int) -> int:
    """Return about how many rows packing makes of `num_rows` rows, of which some have these lengths in tokens.

    Fitted longest first into the first row with room, which needs about as many rows as TRL 1.16's best fit. A row
    longer than `pack_length` has a row of its own; a row longer than `max_length` is split.
    """
    sample = list(lengths) * max(1, min(_MAX_FITTED, num_rows) // len(lengths))  # all rows are fitted if they are few
    rows, room, pieces = 0, list[int](), list[int]()
    for length in sample:
        if length > pack_length:
            full_rows, rest = divmod(length, max_length)
            is_packed = pack_length == max_length
            rows += full_rows + (rest > 0 and not is_packed)
            pieces += [rest] if rest and is_packed else []
        else:
            pieces.append(length)
    for piece in sorted(pieces, reverse=True):
        row = next((at for at, free in enumerate(room) if free >= piece), None)
        if row is None:
            room.append(pack_length - piece)
        else:
            room[row] -= piece
    return max(1, round((rows + len(room)) * num_rows / len(sample)))


def warnings(config: RecipeConfig, batch: Batch, steps: Steps) -> tuple[str, ...]:
    """Return warnings about a run of too few steps, unless the recipe sets them, and about a warm-up beyond its end."""
    samples = steps.samples
    described = samples.why if samples.certainty is Certainty.ABOUT else f"{samples.value or 0:,} samples"
    return tuple(filter(None, step_count.warnings(config, batch, samples.value, described)))


def packs(config: RecipeConfig) -> bool:
    """Return whether several samples share a row."""
    return config.train_dataloader.dataset.packing and config.objective.facts.packs


def _total(config: RecipeConfig, per_epoch: Count) -> Count:
    cfg = config.train_cfg
    epochs = per_epoch._replace(value=None if per_epoch.value is None else math.ceil(cfg.max_epochs * per_epoch.value))
    total = Count(cfg.max_steps) if cfg.max_steps else epochs
    if cfg.early_stopping_patience and total.most is not None:
        return total._replace(certainty=Certainty.AT_MOST, why="early stopping may end the run sooner")
    return total


def _rows(sizes: Sequence[DatasetSize], max_rows: int | None) -> Count:
    counted = sum(size.taken or 0 for size in sizes)
    why = "; ".join(size.why for size in sizes if size.rows is None)
    if max_rows is not None and counted >= max_rows:
        return Count(max_rows)
    if max_rows is not None and why:
        return Count(max_rows, Certainty.AT_MOST, f"max_rows is {max_rows:,}; {why}")
    return Count(None, Certainty.UNKNOWN, why) if why else Count(counted)


def _samples(sizes: Sequence[DatasetSize], rows: Count, config: RecipeConfig) -> Count:
    """Return the rows that the trainer has in an epoch: samples, or packed rows."""
    if rows.value is None:
        return rows
    samples = _of_rows(sizes, rows.value)
    dataset = config.train_dataloader.dataset
    if packs(config) and rows.value:
        counted = sum(size.taken or 0 for size in sizes)
        length = dataset.pack_tokens
        packed = sum(packed_rows(size.parts, size.sampled, length, dataset.max_length) for size in sizes if size.parts)
        value = max(1, round(packed * rows.value / max(1, counted)))
        verb = "packs" if rows.value == 1 else "pack"
        parts = _parts(sizes, rows.value)
        of_parts = f", about {parts:,} samples," if parts not in (None, rows.value) else ""
        why = f"{_num_rows(rows.value)}{of_parts} {verb} into about {_num_rows(value)} of {length:,} tokens"
        return Count(value, Certainty.ABOUT, why)
    if Certainty.AT_MOST in (rows.certainty, samples.certainty):
        return (rows if rows.certainty is Certainty.AT_MOST else samples)._replace(value=samples.value)
    parts = _parts(sizes, rows.value)
    if parts is None:
        why = "a row with several answers is several samples if the chat template changes them once other turns follow"
        return Count(samples.value, Certainty.ABOUT, why)
    if parts != rows.value:
        why = f"{_num_rows(rows.value)} become about {parts:,} samples: {_WHY_PARTS}"
        return Count(max(1, parts), Certainty.ABOUT, why)
    num_bad = config.train_dataloader.dataset.bad_rows
    bad = f", and up to {num_bad} bad rows" if num_bad else ""
    return Count(samples.value, Certainty.UNLESS_DROPPED, f"{config.objective.facts.dropped}{bad}")


def _parts(sizes: Sequence[DatasetSize], rows: int) -> int | None:
    """Return about how many samples the conversations of some rows are; None if that is not known."""
    if any(size.parts_a_row is None for size in sizes):
        return None
    counted = sum(size.taken or 0 for size in sizes)
    return round(sum(size.parts for size in sizes) * rows / counted) if counted else rows


def _num_rows(number: int) -> str:
    return f"{number:,} row{'s' * (number != 1)}"


def _of_rows(sizes: Sequence[DatasetSize], rows: int) -> Count:
    samples_a_row, samples = {size.samples_a_row for size in sizes}, [size.samples for size in sizes]
    if len(samples_a_row) == 1 and None not in samples_a_row:
        return Count(rows * max(filter(None, samples_a_row)))
    if None not in samples and rows == sum(size.taken or 0 for size in sizes):
        return Count(sum(filter(None, samples)))
    return Count(2 * rows, Certainty.AT_MOST, "only a row with two answers is two samples")
