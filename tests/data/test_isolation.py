"""Packed samples do not see each other: in the logits, and in the loss of a real training step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, set_seed
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from tests.data.conftest import Prepare, Settings, Write, conversation
from tuner.data.prepare import prepare
from tuner.data.prepared import Prepared
from tuner.data.text_encoder import TextEncoder

SAMPLES = [
    conversation("Why is the sky blue?", "Because the air scatters blue light."),
    conversation("one two?", "three four", "five?", "six seven eight"),
    conversation("ten?", "nine"),
]


def make_model(vocabulary: int, attention: str = "sdpa", **options: Any) -> LlamaForCausalLM:
    set_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        # Large enough that a sample that sees another differs plainly.
        initializer_range=0.2,
        attn_implementation=attention,
        pad_token_id=1,
        **options,
    )
    return LlamaForCausalLM(config)


@pytest.fixture
def packed(jsonl: Write, tokenizer: Any) -> Prepared:
    prepared = prepare(Settings(str(jsonl(SAMPLES)), max_length=256), TextEncoder(tokenizer), objective="sft")
    assert [len(row["seq_lengths"]) for row in prepared.dataset] == [3]
    return prepared


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    batch = DataCollatorForLanguageModeling(pad_token_id=1, padding_free=True)(rows)
    assert "attention_mask" not in batch
    return dict(batch)


def distance_from_alone(model: LlamaForCausalLM, batch: dict[str, Any], lengths: list[int], **options: Any) -> float:
    """Return the largest difference between the logits of packed samples and of each of them alone."""
    with torch.no_grad():
        # Shape [row, token, vocabulary].
        together = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], **options).logits
        pieces = batch["input_ids"].split(lengths, dim=1)
        alone = torch.cat([model(input_ids=piece, use_cache=False).logits for piece in pieces], dim=1)
    return float((together - alone).abs().max())


@pytest.mark.parametrize("mode", ["eval", "train", "train with gradient checkpointing"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_packed_sample_has_the_logits_it_has_alone(
    packed: Prepared, tokenizer: Any, attention: str, mode: str
) -> None:
    row = packed.dataset[0]
    model = make_model(len(tokenizer), attention).train(mode != "eval")
    if "checkpointing" in mode:
        model.activation_checkpointing_enable()

    assert distance_from_alone(model, collate([row]), row["seq_lengths"], use_cache=False) < 1e-5


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_with_a_cache_packed_samples_would_see_each_other(packed: Prepared, tokenizer: Any, training: bool) -> None:
    """The scar: transformers' own default. It is why `use_cache` must be off, which SFTTrainer does on each call."""
    row = packed.dataset[0]
    model = make_model(len(tokenizer)).train(training)
    assert model.config.use_cache

    assert distance_from_alone(model, collate([row]), row["seq_lengths"]) > 1e-2


@pytest.mark.parametrize("packing", [True, False])
def test_samples_of_several_rows_in_a_batch_do_not_see_each_other(
    prepared: Prepare, tokenizer: Any, packing: bool
) -> None:
    rows = prepared(SAMPLES * 2, max_length=128, packing=packing).dataset.to_list()
    assert len(rows) > 1 and (max(len(row["seq_lengths"]) for row in rows) > 1) is packing
    lengths = [length for row in rows for length in row["seq_lengths"]]

    assert distance_from_alone(make_model(len(tokenizer)), collate(rows), lengths, use_cache=False) < 1e-5


@pytest.mark.parametrize("use_cache", [True, False])
def test_the_trainer_s_loss_is_the_token_weighted_mean_of_the_samples_own(
    packed: Prepared, tokenizer: Any, tmp_path: Path, use_cache: bool
) -> None:
    model = make_model(len(tokenizer), use_cache=use_cache)
    losses, weights = zip(*[_own_loss(model, packed.dataset[0], at) for at in range(3)], strict=True)
    expected = sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / sum(weights)
    arguments = SFTConfig(
        output_dir=str(tmp_path / "out"),
        dataset_kwargs={"skip_prepare_dataset": True},
        padding_free=True,
        max_length=None,
        per_device_train_batch_size=1,
        max_steps=1,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        activation_checkpointing=False,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )

    trainer = SFTTrainer(model=model, args=arguments, train_dataset=packed.dataset, processing_class=tokenizer)
    trainer.train()

    assert sum(weights) == packed.counts.trained_tokens
    logged = trainer.state.log_history[0]
    assert logged["loss"] == pytest.approx(expected, rel=1e-4)


def _own_loss(model: LlamaForCausalLM, row: dict[str, Any], at: int) -> tuple[float, int]:
    """Return the mean loss of the row's sample number `at` alone, and over how many tokens."""
    start = sum(row["seq_lengths"][:at])
    span = slice(start, start + row["seq_lengths"][at])
    ids, labels = torch.tensor([row["input_ids"][span]]), torch.tensor([row["labels"][span]])
    with torch.no_grad():
        loss = model.eval()(input_ids=ids, labels=labels, use_cache=False).loss
    return float(loss), int((labels[:, 1:] != -100).sum())
