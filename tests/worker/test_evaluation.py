"""Which rows a validation takes; its loss is in test_weighed_tokens, and tests/e2e/test_results.py has two ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Qwen2Config
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from tests.data.conftest import make_tokenizer
from tuner.data.text_encoder import TextEncoder
from tuner.recipes.loading import load
from tuner.worker.trainer_setup import evaluator
from tuner.worker.trainers import TunerTrainer, validation_rounds

LENGTHS = ((3,), (9, 4), (17,), (2, 2), (30,), (5,), (11, 3))
"""Of the samples of each row."""
QWEN = Qwen2Config(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=96,
)


def rows() -> Any:
    generator = torch.Generator().manual_seed(0)
    made = []
    for lengths in LENGTHS:
        ids = torch.randint(3, 96, (sum(lengths),), generator=generator).tolist()
        labels = [*ids]
        for start in [sum(lengths[:at]) for at in range(len(lengths))]:
            labels[start] = -100  # nothing predicts the first token of a sample
        made.append({"input_ids": ids, "labels": labels, "seq_lengths": list(lengths)})
    return datasets.Dataset.from_list(made)


def test_an_evaluation_leaves_the_random_numbers_of_training_as_they_were_and_names_the_rows_of_a_part(
    tmp_path: Path,
) -> None:
    tokenizer = make_tokenizer(pads=True)
    model = AutoModelForCausalLM.from_config(QWEN)
    trainer = evaluator(
        load("tiny_full_sample_e1").config, (model, None), TextEncoder(tokenizer), rows(), 2, str(tmp_path)
    )
    before = torch.get_rng_state()

    whole, part = trainer.evaluate(), trainer.evaluate(rows().select([0, 2, 4]))

    assert torch.equal(torch.get_rng_state(), before)
    assert "eval_rows" not in whole and part["eval_rows"] == 3


@given(st.integers(1, 70), st.integers(1, 9), st.integers(1, 8))
def test_every_rank_takes_as_many_rows_and_each_row_counts_once(rows: int, batch_size: int, ranks: int) -> None:
    rounds = list(validation_rounds(rows, batch_size, ranks))

    weights = [0.0] * rows
    for of_ranks in rounds:
        assert len(of_ranks) == ranks
        assert {len(rows_of_rank) for rows_of_rank in of_ranks} == {len(of_ranks[0])} <= set(range(1, batch_size + 1))
        for rows_of_rank in of_ranks:
            for row in rows_of_rank:
                weights[row] += 1 / of_ranks.count(of_ranks[0])
    assert weights == pytest.approx([1.0] * rows)


def loaded(rank: int, size: int) -> list[dict[str, torch.Tensor]]:
    """Return the batches of one of four ranks, of which `size` share each row."""
    args = SimpleNamespace(
        world_size=4,
        process_index=rank,
        eval_batch_size=2,
        parallelism_config=SimpleNamespace(sp_size=size),
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        accelerator_config=SimpleNamespace(non_blocking=True),
        device=torch.device("cpu"),
    )
    collator = DataCollatorForLanguageModeling(0, padding_free=True)
    trainer: Any = SimpleNamespace(args=args, eval_dataset=rows(), data_collator=collator, generates=False)
    trainer.get_tp_size = lambda: 1
    return list(TunerTrainer.get_eval_dataloader(trainer))


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_share_rows_validate_on_a_part_of_them_each(size: int) -> None:
    ranks, made = [loaded(rank, size) for rank in range(4)], rows()

    rounds = list(validation_rounds(len(LENGTHS), 2, 4 // size))
    assert {len(batches) for batches in ranks} == {len(rounds)}
    for at, of_groups in enumerate(rounds):
        for group, taken in enumerate(of_groups):
            parts = [batches[at]["input_ids"] for batches in ranks[group * size : (group + 1) * size]]
            whole = [token for row in taken for token in made[row]["input_ids"]]
            assert {part.shape[1] for part in parts} == {-(-len(whole) // size)}
            assert torch.cat(parts, dim=1)[0, : len(whole)].tolist() == whole
