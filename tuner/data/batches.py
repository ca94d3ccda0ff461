"""The rows of `prepare` as batches for TRL's trainers: end to end in one row, or side by side with padding.

It prepares no rows. Shapes: S sequences, T tokens of the longest of them; all padded at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from tuner.data.encoder import Row
from tuner.data.layouts import WEIGHTS
from tuner.data.sample import IGNORED
from tuner.recipes.schema.architecture import may_share_row

Batch = dict[str, torch.Tensor]
_Side = tuple[Any, Any]
"""Ids and labels of one sequence: lists or arrays."""
_OWN_CODE = "transformers_modules."
"""Where transformers puts the code that comes with a model."""
_MOST_PADDING = 0.1
"""The part of the tokens that may be padding side by side: all layers but attention compute it for nothing."""


def lays_end_to_end(model: Any, *, reads_images: bool = False, varlen: bool = False, is_tried: bool = False) -> bool:
    """Return whether the rows of a batch may lie end to end: the model keeps them apart, by position_ids or `varlen`.

    Otherwise they are padded at their ends, which is right for every causal model: no token sees what comes later.

    Args:
        varlen: Whether its attention is `VARLEN`.
        is_tried: Whether a trial with this attention has shown it, for a model that no test knows.
    """
    if is_tried:
        return not reads_images
    if has_own_code(model):
        return False  # whatever type its config names
    image_type = model.config.model_type if reads_images else None
    return may_share_row(model.config.get_text_config().model_type, image_type, varlen=varlen)


def has_own_code(model: Any) -> bool:
    """Return whether code that came with a loaded model computes it, or a part of it."""
    return any(type(module).__module__.startswith(_OWN_CODE) for module in model.modules())


@dataclass(frozen=True)
class SampleCollator:
    """Rows as SFTTrainer's batch: in one row of shape [1, T] where they may lie end to end, or side by side.

    Attention that takes a mask computes all pairs of a row's tokens, (S * T)^2 of them end to end and S * T^2 side by
    side: on a CPU, a step of a small model with eight rows of 512 tokens takes twice as long end to end.

    Args:
        collator: TRL's, which lays them end to end with `padding_free`, and pads them without.
        needs_mask: Whether the attention needs a mask if samples share a row.
    """

    collator: DataCollatorForLanguageModeling
    needs_mask: bool

    def __call__(self, rows: Sequence[Row]) -> Batch:
        """Return `input_ids` and `labels`, and `position_ids` that begin anew with each sample of a row."""
        lengths = [len(row["input_ids"]) for row in rows]
        are_alike = len({*lengths}) == 1 and all(len(row["seq_lengths"]) == 1 for row in rows)  # no padding, no mask
        has_little_padding = sum(lengths) >= (1 - _MOST_PADDING) * len(rows) * max(lengths)
        is_faster = are_alike or (self.needs_mask and self.collator.padding_free and has_little_padding)
        # Attention without a mask takes the length of the longest sample as a number on the host. For one row TRL's
        # collator tells it; after `side_by_side` each layer would read it from the GPU.
        needs_longest = len(rows) == 1 and self.collator.padding_free and not self.needs_mask
        if is_faster and not needs_longest:
            return side_by_side(rows, self.collator.pad_token_id)
        batch: Batch = self.collator(rows)
        return batch


@dataclass(frozen=True)
class WeighedCollator:
    """Another collator's batch, with how much the loss of each token weighs where one of the rows says so."""

    collator: Callable[[Sequence[Row]], Batch]

    def __call__(self, rows: Sequence[Row]) -> Batch:
        """Return the batch, perhaps with `token_weights` in fp32 of the shape of its labels."""
        batch = self.collator([{name: value for name, value in row.items() if name != WEIGHTS} for row in rows])
        if not any(WEIGHTS in row for row in rows):
            return batch
        weights = [torch.tensor(row[WEIGHTS]) if WEIGHTS in row else torch.ones(len(row["input_ids"])) for row in rows]
        is_one_row = len(batch["labels"]) == 1
        weights_BT = torch.cat(weights)[None] if is_one_row else _stacked(weights, 0)
        assert weights_BT.shape == batch["labels"].shape, "rows are padded at their ends"
        return {**batch, WEIGHTS: weights_BT.float()}


def side_by_side(rows: Sequence[Row], pad_id: int) -> Batch:
    """Return rows as tensors of shape [S, T], with padding at their ends; each padding token is a sample of its own.

    Rows of one sample need no `position_ids`, and no mask: in a causal model no token sees what comes after it.
    """
    batch = {
        "input_ids": _stacked([torch.tensor(row["input_ids"]) for row in rows], pad_id),
        "labels": _stacked([torch.tensor(row["labels"]) for row in rows], IGNORED),
    }
    if any(len(row["seq_lengths"]) > 1 for row in rows):
        positions = [torch.cat([torch.arange(length) for length in row["seq_lengths"]]) for row in rows]
        batch["position_ids"] = _stacked(positions, 0)
        batch["labels"][batch["position_ids"] == 0] = IGNORED  # no token of the same sample predicts it
    return batch


def _stacked(values: list[torch.Tensor], padding: int) -> torch.Tensor:
    return pad_sequence(values, batch_first=True, padding_value=padding)


def pairs(rows: Sequence[Row], *, pad_id: int) -> Batch:
    """Return DPOTrainer's batch: the chosen sides, then the rejected ones. S is twice the rows."""
    sides = [(row[f"{side}_ids"], row[f"{side}_labels"]) for side in ("chosen", "rejected") for row in rows]
    return _padded(sides, pad_id) | _reference(rows, ("ref_chosen_logps", "ref_rejected_logps"))


LIKELIHOOD = "likelihood_labels"
"""The key of a batch of pairs that holds the labels of the chosen tokens; the loss adds their likelihood."""


def odds(rows: Sequence[Row], *, pad_id: int, counts_prompt: bool = False) -> Batch:
    """Return ORPOTrainer's and CPOTrainer's batch: the two halves of `pairs` apart, and the whole to count its tokens.

    With `counts_prompt` the likelihood that is added to the loss is that of the prompts too.
    """
    both = pairs(rows, pad_id=pad_id)
    labels_ST = both["input_ids"].masked_fill(both["completion_mask"] == 0, IGNORED)
    parts = {"input_ids": both["input_ids"], "attention_mask": both["attention_mask"], "labels": labels_ST}
    halves = {"chosen": slice(None, len(rows)), "rejected": slice(len(rows), None)}
    apart = {f"{side}_{name}": part[half] for side, half in halves.items() for name, part in parts.items()}
    whole_ST = both["input_ids"].masked_fill(both["attention_mask"] == 0, IGNORED)
    likely = {LIKELIHOOD: (whole_ST if counts_prompt else labels_ST)[: len(rows)]}
    return apart | likely | {"input_ids": both["input_ids"], "attention_mask": both["attention_mask"]}


def feedback(rows: Sequence[Row], *, pad_id: int, max_length: int | None) -> Batch:
    """Return KTOTrainer's batch: S is the rows.

    Args:
        max_length: Answers are also taken to the prompt of the row before, to estimate the KL divergence (KTO paper,
            section 4.1), cut to this number of tokens; None for a loss that does not estimate it.
    """
    sides = [(row["answer_ids"], row["answer_labels"]) for row in rows]
    others = [sides[-1], *sides[:-1]]
    if "other_ids" in rows[0]:
        others = [(row["other_ids"], row["other_labels"]) for row in rows]
    batch = _padded(sides, pad_id) | {"label": torch.tensor([row["is_good"] for row in rows])}
    if max_length is not None:
        mixed = [_swapped(*both, max_length) for both in zip(sides, others, strict=True)]
        batch |= {f"KL_{name}": tensor for name, tensor in _padded(mixed, pad_id).items()}
    return batch | _reference(rows, ("ref_logps", "ref_KL_logps"))


def with_others(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return the columns of a micro-batch with the answer that `feedback` takes to each prompt, as columns of its own.

    Rows that are judged in batches of one size and trained or validated in batches of another keep the same pairs.
    """
    ids, labels = columns["answer_ids"], columns["answer_labels"]
    return {**columns, "other_ids": [ids[-1], *ids[:-1]], "other_labels": [labels[-1], *labels[:-1]]}


def _swapped(question: _Side, answer: _Side, max_length: int) -> _Side:
    """Return one sequence's prompt with another's answer."""
    start, begin = _start(question), _start(answer)
    ids = np.concatenate([question[0][:start], answer[0][begin:]])
    labels = np.concatenate([np.full(start, IGNORED), answer[1][begin:]])
    return ids[:max_length], labels[:max_length]


def _start(side: _Side) -> int:
    return int((np.asarray(side[1]) != IGNORED).argmax())


def _padded(sides: Sequence[_Side], pad_id: int) -> Batch:
    ids = [torch.tensor(ids) for ids, _ in sides]
    masks = [(torch.tensor(labels) != IGNORED).long() for _, labels in sides]
    return {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=pad_id),
        "attention_mask": pad_sequence([torch.ones_like(tokens) for tokens in ids], batch_first=True),
        "completion_mask": pad_sequence(masks, batch_first=True),
    }


def _reference(rows: Sequence[Row], names: Iterable[str]) -> dict[str, Any]:
    """Return the reference model's log-probabilities where they were computed beforehand."""
    return {name: torch.tensor([row[name] for row in rows]) for name in names if name in rows[0]}
