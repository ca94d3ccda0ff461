"""A token's weight counts in the loss of training and of a validation: sum(w x nll) / sum(w), in whatever batches."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, Trainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from tests.data.conftest import make_tokenizer
from tests.results.models import MIXTURE
from tests.worker.test_evaluation import QWEN, rows
from tuner.data.batches import SampleCollator, WeighedCollator
from tuner.data.prepared import in_arrays
from tuner.data.text_encoder import TextEncoder
from tuner.recipes.loading import load
from tuner.results.evaluate import likelihood
from tuner.worker.long_rows import RowPart
from tuner.worker.objectives.sft_training import Sft
from tuner.worker.trainer_setup import evaluator
from tuner.worker.trainers import UNIT, Collator, weight_of


def weighed() -> Any:
    """Return rows of which some weigh a part, as `layouts.write_rows` writes them."""
    generator, made = np.random.default_rng(0), rows().to_list()
    for row in made:
        row["token_weights"] = generator.choice(np.float32([0.1, 0.5, 1]), len(row["input_ids"])).tolist()
    features = datasets.Features(
        {
            **{name: datasets.Sequence(datasets.Value("int32")) for name in ("input_ids", "labels", "seq_lengths")},
            "token_weights": datasets.Sequence(datasets.Value("float32")),
        }
    )
    return datasets.Dataset.from_list(made, features=features)


@torch.no_grad()
def by_hand(model: Any, dataset: Any) -> float:
    """The mean over all trained tokens, each with its weight or 1, one sample after the other."""
    total, weight = 0.0, 0.0
    for row in dataset:
        values = row["input_ids"], row.get("token_weights", [1.0] * len(row["input_ids"]))
        ids, weights = (torch.tensor(of_row).split(row["seq_lengths"]) for of_row in values)
        for part, of_part in zip(ids, weights, strict=True):
            losses = cross_entropy(model(input_ids=part[None]).logits[0, :-1], part[1:], reduction="none")
            total += float(losses @ of_part[1:])
            weight += float(of_part[1:].sum())
    return total / weight


@pytest.mark.parametrize("config", [QWEN, MIXTURE], ids=["qwen2", "mixture"])
@pytest.mark.parametrize("batch_size", [1, 3, 7])
@pytest.mark.parametrize("made", [rows, weighed])
def test_the_validation_loss_is_the_mean_over_trained_tokens_each_with_its_weight(
    made: Any, config: Any, batch_size: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    # Before a trainer switches a mixture's load balancing on.
    expected, recipe = by_hand(model, made()), load("tiny_full_sample_e1").config

    trainer = evaluator(
        recipe, (model, None), TextEncoder(make_tokenizer(pads=True)), made(), batch_size, str(tmp_path)
    )
    found = trainer.evaluate()

    assert found["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert 0 <= found["eval_mean_token_accuracy"] <= 1


@pytest.mark.parametrize("batch_size", [1, 3])
def test_tuner_eval_weighs_tokens_as_a_validation_does(batch_size: int) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(QWEN).eval()
    spec = SimpleNamespace(model=SimpleNamespace(images=None), description="a model")
    loaded: Any = SimpleNamespace(encoder=TextEncoder(make_tokenizer(pads=True)), spec=spec, model=model)
    prepared: Any = SimpleNamespace(dataset=weighed())

    found = likelihood(loaded, prepared, batch_size)

    assert found["loss"] == pytest.approx(by_hand(model, weighed()), rel=1e-5)
    assert found["tokens"] == sum(label != -100 for row in weighed() for label in row["labels"])


def test_a_batch_keeps_the_weights_of_its_tokens_in_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_compute_type(_: object, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}

    model, recipe = AutoModelForCausalLM.from_config(QWEN), load("tiny_full_sample_e1").config
    trainer = evaluator(recipe, (model, None), TextEncoder(make_tokenizer(pads=True)), weighed(), 2, str(tmp_path))
    monkeypatch.setattr(Trainer, "_prepare_inputs", in_compute_type)  # as transformers does with DeepSpeed

    batch = trainer._prepare_inputs({"token_weights": torch.tensor([[0.1]]), "labels": torch.tensor([[1]])})

    assert torch.equal(batch["token_weights"], torch.tensor([[0.1]]))


def collator(*, padding_free: bool, needs_mask: bool = False) -> WeighedCollator:
    plain = DataCollatorForLanguageModeling(0, padding_free=padding_free)
    return WeighedCollator(SampleCollator(plain, needs_mask))


@pytest.mark.parametrize("padding_free", [True, False])
@pytest.mark.parametrize("needs_mask", [True, False])
@pytest.mark.parametrize("numbers", [[0], [1, 4], [2, 3, 5], [5, 5]])
def test_each_token_of_a_batch_has_the_weight_of_its_row(
    padding_free: bool, needs_mask: bool, numbers: list[int]
) -> None:
    some = in_arrays(weighed()).select(numbers)
    every = [{**row} for row in some]
    every[-1].pop("token_weights")  # of a block of a stream in which each token weighs 1

    batch = collator(padding_free=padding_free, needs_mask=needs_mask)(every)
    without = collator(padding_free=padding_free, needs_mask=needs_mask)(
        [{name: value for name, value in row.items() if name != "token_weights"} for row in every]
    )

    assert "token_weights" not in without
    assert {name: value for name, value in batch.items() if name != "token_weights"}.keys() == without.keys()
    if len(numbers) == 1:
        assert "token_weights" not in batch
        return
    found = batch["token_weights"][batch["labels"] != -100].tolist()
    expected = [
        weight
        for row in every
        for weight, label in zip(row.get("token_weights", np.ones(99)), row["labels"], strict=False)
        if label != -100
    ]
    assert found == pytest.approx(expected)
    assert weight_of(batch) == sum(round(float(np.float32(weight)) * UNIT) for weight in expected)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_step_is_divided_by_the_same_weight_in_any_order_and_parts(num_ranks: int) -> None:
    every = [*in_arrays(weighed())]
    collate = Collator(collator(padding_free=True), every[0])
    whole = collate(every)["counts"]

    apart = [collate([row])["counts"].items for row in every[::-1]]
    shared = [
        Collator(collator(padding_free=True), every[0], RowPart(rank, num_ranks))(every)["counts"].items
        for rank in range(num_ranks)
    ]

    assert sum(apart) == sum(shared) == whole.items
    assert whole.items / UNIT == pytest.approx(
        sum(np.float64(row["token_weights"])[row["labels"] != -100].sum() for row in every)
    )
    assert collate([])["counts"].items == 0


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
@pytest.mark.parametrize("micro_batch", [1, 2, 7])
def test_the_gradient_of_a_step_is_that_of_the_weighed_mean(micro_batch: int, loss_type: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, recipe = AutoModelForCausalLM.from_config(QWEN), load("tiny_full_sample_e1").config
    expected = gradient_by_hand(model, by_probability=loss_type == "dft")
    trainer = evaluator(recipe, (model, None), TextEncoder(make_tokenizer(pads=True)), weighed(), 1, str(tmp_path))
    trainer.weighs_by_probability = loss_type == "dft"
    every = [*in_arrays(weighed())]
    batches = [trainer.data_collator(every[at : at + micro_batch]) for at in range(0, len(every), micro_batch)]
    num_items = torch.tensor(sum(weight_of(batch) or 0 for batch in batches)).float() / UNIT
    trainer.rows_of_batch = trainer.trained_of_batch = None

    model.train().zero_grad()
    losses = [Sft.loss_of_objective(trainer, trainer.model, batch, num_items_in_batch=num_items) for batch in batches]
    sum(losses).backward()  # type: ignore[union-attr]

    found = torch.cat([weight.grad.flatten() for weight in model.parameters()])
    assert sum(loss.item() for loss in losses) == pytest.approx(expected[0], rel=1e-5)
    torch.testing.assert_close(found, expected[1], rtol=1e-5, atol=3e-8)


def gradient_by_hand(model: Any, *, by_probability: bool) -> tuple[float, torch.Tensor]:
    total, pulled, weight = torch.zeros(()), torch.zeros(()), 0.0
    for row in weighed():
        ids, weights = (torch.tensor(row[name]).split(row["seq_lengths"]) for name in ("input_ids", "token_weights"))
        for part, of_part in zip(ids, weights, strict=True):
            log_probs = model(input_ids=part[None]).logits[0, :-1].log_softmax(-1).gather(-1, part[1:, None])[:, 0]
            total = total - log_probs @ of_part[1:]
            factors = of_part[1:] * log_probs.detach().exp() if by_probability else of_part[1:]
            pulled = pulled - log_probs @ factors
            weight += float(of_part[1:].sum())
    model.zero_grad()
    (pulled / weight).backward()
    gradient = torch.cat([parameter.grad.flatten().clone() for parameter in model.parameters()])
    return total.item() / weight, gradient
