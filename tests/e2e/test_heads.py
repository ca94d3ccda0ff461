"""Two real ranks: a model trains and validates to the same losses at every ZeRO stage, whatever its head is tied to."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.e2e.runs import ok, train
from tests.tiny_model import tiny

pytestmark = pytest.mark.e2e

RECIPE = """
_base_ = "tiny_{method}_sample_e1"
model = dict(path={path!r})
train_dataloader = dict(batch_size=2, dataset=dict(max_length=128, pack_length=None))
val_dataloader = dict(batch_size={val_batch}, dataset=dict(max_rows=7))
optim_wrapper = dict(optimizer=dict(lr=3e-3), accumulative_counts=2, dtype="fp32")
param_scheduler = dict(type="constant", warmup_ratio=0.0)
train_cfg = dict(max_steps=4, val_interval=2)
checkpoint = dict(interval=2)
log = dict(interval=1, num_samples=0)
"""


def llama(folder: Path, *, is_tied: bool) -> Path:
    """Write a small Llama with the tokenizer of the package's tiny model."""
    shipped = tiny()
    vocab_size = AutoModelForCausalLM.from_pretrained(shipped).config.vocab_size
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, tie_word_embeddings=is_tied, **shape))
    model.save_pretrained(folder)
    for file in shipped.glob("*token*"):
        shutil.copy(file, folder)
    shutil.copy(shipped / "chat_template.jinja", folder)
    return folder


def check(folder: Path, method: str, *, is_tied: bool, levels: tuple[str, ...], val_batch: int = 2) -> None:
    path, recipe = llama(folder / "model", is_tied=is_tied), folder / "recipe.py"
    recipe.write_text(RECIPE.format(method=method, path=str(path), val_batch=val_batch))
    measured = {}
    for level in levels:
        ok(train(recipe, folder / level, "--deepspeed", level))
        # A run that goes on validates for the first time when DeepSpeed knows the order of the weights, and prefetches.
        run = ok(train(recipe, folder / level, "--deepspeed", level, "--resume", "auto", "--set", "max_steps=6"))
        measured[level] = [line[key] for line in run.metrics for key in ("loss", "eval_loss") if key in line]

    first, *others = measured.values()
    assert len(first) == 10, "six steps, and validations before them and after each two"
    for losses in others:
        assert losses == pytest.approx(first, rel=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(("method", "is_tied"), [("full", False), ("lora", True)], ids=["full-untied", "lora-tied"])
def test_losses_are_the_same_at_every_stage(tmp_path: Path, method: str, is_tied: bool) -> None:
    check(tmp_path, method, is_tied=is_tied, levels=("none", "zero2", "zero3"))


@pytest.mark.long
def test_larger_batches_of_the_validation_take_the_chunked_head_in_training_too(tmp_path: Path) -> None:
    check(tmp_path, "full", is_tied=False, levels=("none", "zero3"), val_batch=8)


@pytest.mark.long
def test_a_head_with_a_cap_that_tiles_leave_out_is_computed_whole_and_announced(tmp_path: Path) -> None:
    path, recipe = llama(tmp_path / "model", is_tied=False), tmp_path / "recipe.py"
    shape = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 16,
    }
    shape |= {"lru_width": 64, "attention_window_size": 128, "block_types": ("recurrent", "attention")}
    vocab_size = AutoModelForCausalLM.from_pretrained(path).config.vocab_size
    config = AutoConfig.for_model(
        "recurrent_gemma", vocab_size=vocab_size, logits_soft_cap=2.0, pad_token_id=0, **shape
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    recipe.write_text(RECIPE.format(method="full", path=str(path), val_batch=2))

    whole, chunked = (
        ok(train(recipe, tmp_path / loss, "--deepspeed", "zero3", "--set", f"train_cfg.loss={loss}"))
        for loss in ("whole", "chunked")
    )

    assert chunked.losses == pytest.approx(whole.losses, rel=1e-6)
    assert "RecurrentGemmaForCausalLM changes its logits" in chunked.text and "changes its logits" not in whole.text
