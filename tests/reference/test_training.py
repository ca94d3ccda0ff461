"""`tuner train` takes the steps of a plain PyTorch loop: losses, gradient norms and final weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.runs import Finished, distance, ok, train
from tests.reference import loop
from tests.tiny_model import tiny
from tuner import assets
from tuner.data.prepare import prepare
from tuner.data.text_encoder import TextEncoder
from tuner.recipes.loading import load

pytestmark = pytest.mark.e2e

# 21 rows: on one rank an epoch is 11 micro-batches, in steps of 4, 4 and 3; on two it is 6 each, in steps of 4 and 2,
# and of the last two batches one has a single row and the other none. 20 packed rows: 4, 4 and 2, or 4 and 1.
RECIPE = """
_base_ = "tiny_{method}_sample_e2"
train_dataloader = dict(
    batch_size=2,
    dataset=dict(max_length=128, max_rows={num_rows}, packing={packing}, pack_length=None),
)
val_dataloader = None
optim_wrapper = dict(
    optimizer=dict(lr=3e-3, betas=(0.9, 0.999), weight_decay=0.1),
    clip_grad=dict(max_norm={max_norm}),
    accumulative_counts=4,
    dtype="fp32",
)
param_scheduler = dict(type="cosine", warmup_ratio=0.3)
checkpoint = dict(interval=20)
log = dict(interval=1, num_samples=0)
{more}
"""
LORA = "adapter = dict(r=8, lora_alpha=16, lora_dropout=0.0)"


def max_norm(method: str, ranks: int, packing: bool) -> float:
    """Return a number between the largest and the smallest of the gradient norms, so that some steps are clipped."""
    if method == "full":
        return 4.0
    return 1.35 if ranks == 1 and not packing else 1.25


QUICK = [("full", "zero2", 2, False)]
LONG = [
    ("full", "none", 1, False),
    ("lora", "none", 2, True),
    ("lora", "zero2", 1, True),
    ("full", "zero3", 2, True),
    ("lora", "zero3", 1, False),
    ("lora", "zero3", 2, False),
]
"""With QUICK every pair of a method, a level, a number of ranks and a packing once, and adapters that are sharded."""


def rows_by_hand(tokenizer: Any, num_rows: int) -> list[loop.Row]:
    """The first rows of the shipped sample, one sample a row."""
    file = Path(assets.asset("package:sample/train.jsonl"))
    lines = file.read_text(encoding="utf-8").splitlines()[:num_rows]
    return [[loop.chatml(tokenizer, json.loads(line)["messages"], 128)] for line in lines]


def packed_rows(recipe: Path, tokenizer: Any) -> list[loop.Row]:
    """The rows that tuner packs, each as the samples in it."""
    made = prepare(load(str(recipe)).config.train_dataloader.dataset, TextEncoder(tokenizer), objective="sft").dataset
    rows: list[loop.Row] = []
    for row in made:
        samples, at = [], 0
        for length in row["seq_lengths"]:
            part = slice(at, at + length)
            samples.append((row["input_ids"][part], [label != -100 for label in row["labels"][part]]))
            at += length
        rows.append(samples)
    return rows


def write_recipe(folder: Path, method: str, ranks: int, packing: bool) -> Path:
    recipe = folder / "recipe.py"
    num_rows = 50 if packing else 21  # 20 rows of 128 tokens, packed
    more, limit = LORA if method == "lora" else "", max_norm(method, ranks, packing)
    recipe.write_text(RECIPE.format(method=method, num_rows=num_rows, packing=packing, max_norm=limit, more=more))
    return recipe


@pytest.fixture(scope="module")
def initial_adapter(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], dict[str, torch.Tensor]]:
    """Return the adapter that training begins with: it depends on the seed, and on how weights are loaded."""

    @cache
    def at(level: str, ranks: int) -> dict[str, torch.Tensor]:
        folder = tmp_path_factory.mktemp("initial")
        nearly_none = ("--set", "lr=1e-12", "--set", "max_steps=1", "--deepspeed", level)
        run = ok(train(write_recipe(folder, "lora", ranks, False), folder / "run", *nearly_none, ranks=ranks))
        adapter = load_file(run.path / "final/adapter_model.safetensors")
        return {name: torch.zeros_like(weight) if "lora_B" in name else weight for name, weight in adapter.items()}

    # Copies: the plain loop trains them in place.
    return lambda level, ranks: {name: weight.clone() for name, weight in at(level, ranks).items()}


def compared(
    run: Finished, rows: list[loop.Row], method: str, ranks: int, adapter: dict[str, torch.Tensor], limit: float
) -> tuple[list[loop.Step], float]:
    """Return the steps of the plain loop on a run's rows, and how far the run's final weights are from its own."""
    model = AutoModelForCausalLM.from_pretrained(tiny(), dtype=torch.float32)
    name = "model" if method == "full" else "adapter_model"
    final = load_file(run.path / "final" / f"{name}.safetensors")
    trained: dict[str, Any] = dict(model.named_parameters())
    if method == "lora":
        trained = dict(loop.with_lora(model, adapter, 2.0))
    settings = loop.Settings(
        lr=3e-3,
        weight_decay=0.1,
        warmup_ratio=0.3,
        max_norm=limit,
        global_batch=2 * 4 * ranks,
        num_epochs=2,
        seed=42,
    )
    steps = loop.train(model, rows, settings)
    common = trained.keys() & final.keys()
    assert len(common) >= len(final) - 1, "a tied weight has one name or the other"
    return steps, distance(*({key: weights[key].detach() for key in common} for weights in (final, trained)))


@pytest.mark.parametrize(
    ("method", "level", "ranks", "packing"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)],
)
def test_training_takes_the_steps_of_a_plain_loop(
    method: str,
    level: str,
    ranks: int,
    packing: bool,
    initial_adapter: Callable[[str, int], dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    recipe, limit = write_recipe(tmp_path, method, ranks, packing), max_norm(method, ranks, packing)
    tokenizer = AutoTokenizer.from_pretrained(tiny())
    rows = packed_rows(recipe, tokenizer) if packing else rows_by_hand(tokenizer, 21)
    assert len(rows) == (20 if packing else 21)
    adapter = initial_adapter(level, ranks) if method == "lora" else {}

    run = ok(train(recipe, tmp_path / "run", "--deepspeed", level, ranks=ranks))
    steps, weights_apart = compared(run, rows, method, ranks, adapter, limit)

    assert run.losses == pytest.approx([step.loss for step in steps], rel=1e-5)
    norms = [line["grad_norm"] for line in run.metrics if "loss" in line]
    assert norms == pytest.approx([step.grad_norm for step in steps], rel=1e-5)
    assert min(norms) < limit < max(norms), "some steps are clipped"
    assert weights_apart < 1e-5
