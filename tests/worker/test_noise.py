"""NEFTune's noise has the size of the paper's formula (arXiv 2310.05914) for each sample, wherever it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from tests.data.conftest import make_tokenizer
from tests.refused import refused
from tests.worker.test_evaluation import QWEN, rows
from tuner.data.batches import SampleCollator, side_by_side
from tuner.data.prepared import in_arrays
from tuner.data.text_encoder import TextEncoder
from tuner.errors import RecipeError
from tuner.recipes.loading import load
from tuner.recipes.overrides import Overrides
from tuner.worker.long_rows import RowPart
from tuner.worker.noise import LENGTHS, EmbeddingNoise, lengths_of
from tuner.worker.objectives.sft_training import Sft
from tuner.worker.trainer_setup import evaluator
from tuner.worker.trainers import Collator

ALPHA, WIDTH = 5.0, 512


def row(*lengths: int) -> dict[str, Any]:
    ids = list(range(sum(lengths)))
    return {"input_ids": ids, "labels": ids, "seq_lengths": [*lengths]}


PACKED, APART = [row(3, 12, 48)], [row(3), row(12), row(48)]


def end_to_end(some: list[dict[str, Any]]) -> Any:
    return SampleCollator(DataCollatorForLanguageModeling(0, padding_free=True), needs_mask=False)(some)


def padded(some: list[dict[str, Any]]) -> Any:
    return side_by_side(some, 0)


def noise_of(input_ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return what is added to the embeddings of a batch."""
    embedding = torch.nn.Embedding.from_pretrained(torch.zeros(64, WIDTH))
    with EmbeddingNoise(embedding, ALPHA, seed=1, rank=0).on(lengths, 0):
        added: torch.Tensor = embedding(input_ids)
    assert not embedding(input_ids).any(), "the next batch has none"
    return added


@pytest.mark.parametrize(
    ("collate", "some"), [(end_to_end, PACKED), (end_to_end, APART), (padded, PACKED), (padded, APART)]
)
def test_each_sample_gets_noise_of_its_own_length_packed_or_padded(collate: Any, some: Any) -> None:
    batch = collate(some)
    lengths = lengths_of(some, batch["input_ids"])

    found = noise_of(batch["input_ids"], lengths)

    for length in (3, 12, 48):
        of_sample = found[lengths == length]
        size = ALPHA / (length * WIDTH) ** 0.5
        assert len(of_sample) == length
        assert 0.99 * size < of_sample.abs().max() <= size
        # Of numbers drawn from [-1, 1] the mean square is 1/3.
        assert float((of_sample / size).square().mean()) == pytest.approx(1 / 3, abs=0.03)
        assert abs(float((of_sample / size).mean())) < 0.05
    assert not found[lengths == 0].any(), "padding"


def test_steps_micro_batches_and_ranks_get_other_noise_and_a_resumed_step_the_same() -> None:
    ids, lengths = torch.arange(8)[None], torch.full((1, 8), 8)

    def drawn(*steps: int, rank: int = 0) -> list[torch.Tensor]:
        embedding = torch.nn.Embedding.from_pretrained(torch.zeros(64, WIDTH))
        noise = EmbeddingNoise(embedding, ALPHA, seed=1, rank=rank)
        added = []
        for step in steps:
            with noise.on(lengths, step):
                added.append(embedding(ids))
        return added

    state = torch.get_rng_state()
    whole, resumed, other = drawn(0, 0, 1, 1), drawn(1, 1), drawn(0, rank=1)

    assert torch.equal(torch.get_rng_state(), state), "dropout draws what it would have drawn without noise"
    assert [torch.equal(first, again) for first, again in zip(whole[2:], resumed, strict=True)] == [True, True]
    every = [*whole, *other]
    assert not any(torch.equal(noise, two) for at, noise in enumerate(every) for two in every[:at])


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_that_share_a_row_know_the_lengths_of_its_samples(num_ranks: int) -> None:
    parts = [
        Collator(end_to_end, PACKED[0], RowPart(rank, num_ranks), tells_lengths=True)(PACKED)[LENGTHS]
        for rank in range(num_ranks)
    ]

    assert torch.cat(parts, dim=1)[0, :63].tolist() == [3] * 3 + [12] * 12 + [48] * 48


def test_a_run_with_noise_trains_on_noisy_embeddings_and_validates_on_its_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, tokenizer = AutoModelForCausalLM.from_config(QWEN), make_tokenizer(pads=True)
    recipe = load("tiny_full_sample_e1", Overrides(pairs=[("--set", "neftune_noise_alpha=5")])).config
    trainer = evaluator(recipe, (model, None), TextEncoder(tokenizer), rows(), 1, str(tmp_path))
    every = [*in_arrays(rows())]
    seen: list[torch.Tensor] = []
    model.get_input_embeddings().register_forward_hook(
        lambda module, args, out: seen.append(out.detach() - F.embedding(args[0], module.weight.detach()))
    )
    batch = Collator(trainer.data_collator, every[0], tells_lengths=True)(every[:2])
    batch.pop("counts")
    expected = ALPHA / (batch[LENGTHS] * QWEN.hidden_size).sqrt()
    trainer.rows_of_batch = trainer.trained_of_batch = None

    model.train()
    Sft.loss_of_objective(trainer, trainer.model, dict(batch), num_items_in_batch=torch.tensor(3.0))
    model.eval()
    batch.pop(LENGTHS)
    Sft.loss_of_objective(trainer, trainer.model, dict(batch), num_items_in_batch=torch.tensor(3.0))

    *_, with_noise, without = seen
    assert ((with_noise.abs().amax(-1) / expected) <= 1.0001).all()
    assert float((with_noise.abs().amax(-1) / expected).min()) > 0.5
    assert not without.any()


def test_noise_is_refused_where_the_embedding_is_replaced() -> None:
    pairs = [("--set", "neftune_noise_alpha=5"), ("--set", "train_cfg.torch_compile=true")]
    with refused(RecipeError, "--set neftune_noise_alpha=5", "objective.neftune_noise_alpha"):
        load("tiny_full_sample_e1", Overrides(pairs=pairs))
