"""Batches of judged rows hold what TRL's own collators would have made of the same prompts and answers."""

from __future__ import annotations

from functools import partial
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from trl.experimental.utils import DPODataCollatorWithPadding
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from tuner.data import batches
from tuner.data.prepared import in_arrays
from tuner.data.sample import IGNORED

PAD = 0
PROMPTS = ([5, 6, 7], [8], [9, 10])
CHOSEN = ([11, 12], [13, 14, 15, 16], [17])
REJECTED = ([21], [22, 23], [24, 25, 26])


def side(prompt: list[int], answer: list[int]) -> tuple[list[int], list[int]]:
    return [*prompt, *answer], [IGNORED] * len(prompt) + answer


def pair_rows() -> list[dict[str, Any]]:
    found = []
    for prompt, *answers in zip(PROMPTS, CHOSEN, REJECTED, strict=True):
        row = {}
        for name, answer in zip(("chosen", "rejected"), answers, strict=True):
            row[f"{name}_ids"], row[f"{name}_labels"] = side(prompt, answer)
        found.append(row)
    return found


def feedback_rows() -> list[dict[str, Any]]:
    sides = [side(prompt, answer) for prompt, answer in zip(PROMPTS, CHOSEN, strict=True)]
    return [{"answer_ids": ids, "answer_labels": labels, "is_good": at == 1} for at, (ids, labels) in enumerate(sides)]


def assert_same(made: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert made.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(made[name], tensor), name
        assert made[name].dtype == tensor.dtype, name


def test_a_batch_of_pairs_is_the_one_of_dpo_trainers_collator() -> None:
    theirs = [
        {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}
        for prompt, chosen, rejected in zip(PROMPTS, CHOSEN, REJECTED, strict=True)
    ]
    reference = {"ref_chosen_logps": -1.5, "ref_rejected_logps": -2.5}

    assert_same(batches.pairs(pair_rows(), pad_id=PAD), DataCollatorForPreference(PAD)(theirs))
    assert_same(
        batches.pairs([row | reference for row in pair_rows()], pad_id=PAD),
        DataCollatorForPreference(PAD)([row | reference for row in theirs]),
    )


def test_a_batch_for_orpo_holds_what_its_own_collator_makes() -> None:
    theirs = [
        {
            f"{name}_{what}": value
            for name in ("chosen", "rejected")
            for what, value in (
                ("input_ids", row[f"{name}_ids"]),
                ("attention_mask", [1] * len(row[f"{name}_ids"])),
                ("labels", row[f"{name}_labels"]),
            )
        }
        for row in pair_rows()
    ]
    wanted = DPODataCollatorWithPadding(pad_token_id=PAD)(theirs)

    made = batches.odds(pair_rows(), pad_id=PAD)

    for name, tensor in wanted.items():
        width = tensor.shape[1]
        beyond = made[name][:, width:]
        assert torch.equal(made[name][:, :width], tensor), name
        assert bool((beyond == (IGNORED if name.endswith("labels") else PAD)).all()), name
    assert int(made["attention_mask"].sum()) == sum(len(row[f"{name}_ids"]) for row in pair_rows() for name in SIDES)


SIDES = ("chosen", "rejected")


@pytest.mark.parametrize("max_length", [None, 64, 5])
def test_a_batch_of_feedback_is_the_one_of_kto_trainers_collator(max_length: int | None) -> None:
    theirs: list[dict[str, Any]] = [
        {"prompt_ids": prompt, "completion_ids": answer, "label": at == 1}
        for at, (prompt, answer) in enumerate(zip(PROMPTS, CHOSEN, strict=True))
    ]
    if max_length is not None:
        # KTOTrainer._prepare_dataset: each prompt gets the answer of the row before it in the batch.
        for row, other in zip(theirs, [CHOSEN[-1], *CHOSEN[:-1]], strict=True):
            row["KL_completion_ids"] = other

    made = batches.feedback(feedback_rows(), pad_id=PAD, max_length=max_length)

    assert_same(made, DataCollatorForUnpairedPreference(PAD, max_length=max_length)(theirs))


def test_turns_within_an_answer_that_carry_no_loss_are_no_part_of_the_completion() -> None:
    rows = [{"answer_ids": [5, 11, 30, 12], "answer_labels": [IGNORED, 11, IGNORED, 12], "is_good": True}]

    made = batches.feedback(rows, pad_id=PAD, max_length=64)

    assert made["completion_mask"].tolist() == made["KL_completion_mask"].tolist() == [[0, 1, 0, 1]]


@pytest.mark.parametrize("needs_mask", [True, False])
def test_rows_in_arrays_make_the_batches_that_lists_make(needs_mask: bool) -> None:
    packed = [{"input_ids": [5, 6, 7, 8], "labels": [IGNORED, 6, 7, 8], "seq_lengths": [1, 3]}, {
        "input_ids": [9, 10, 11], "labels": [9, 10, 11], "seq_lengths": [3]}]  # fmt: skip
    trls = DataCollatorForLanguageModeling(PAD, padding_free=True)
    collators: list[tuple[Any, list[dict[str, Any]]]] = [
        (batches.SampleCollator(trls, needs_mask=needs_mask), packed),
        (partial(batches.pairs, pad_id=PAD), pair_rows()),
        (partial(batches.feedback, pad_id=PAD, max_length=5), feedback_rows()),
    ]

    for collate, rows in collators:
        arrays = in_arrays(datasets.Dataset.from_list(rows))
        assert isinstance(next(iter(arrays[0].values())), np.ndarray)
        made, wanted = collate(arrays.__getitems__([0, 1])), collate(rows[:2])
        assert made.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(torch.as_tensor(made[name]), torch.as_tensor(value)), name
            assert torch.as_tensor(made[name]).dtype == torch.as_tensor(value).dtype, name
