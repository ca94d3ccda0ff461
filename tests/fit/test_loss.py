"""The planned peak of a micro-batch against what the real trainer's forward and backward hold, objective by objective.

There is no GPU here: `as_on_a_gpu` stands for the kernels of TRL's loss, which need one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from trl.kernels import chunked_logprob
from trl.trainer import utils

from bench.gpu_loss import as_on_a_gpu
from bench.live import Live
from tests.fit.recipes import lightest
from tuner import assets
from tuner.data.text_encoder import TextEncoder
from tuner.fit import activations
from tuner.fit.activations import Work, of_recipe
from tuner.fit.estimate import peak
from tuner.fit.levels import Costs
from tuner.fit.parameters import count
from tuner.models.load import recompute_first
from tuner.recipes.schema import OBJECTIVES as BLOCKS
from tuner.recipes.schema import RecipeConfig
from tuner.recipes.schema.architecture import Architecture
from tuner.worker.trainer_setup import evaluator, use_whole_logits

TILE = (96, 2048)
"""Tokens and logits; TRL's own tile of 256 MiB would hide everything else of a small model."""
FACTS = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 3000,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
}
LENGTH = {"sft": 256, **{name: 128 for name, block in BLOCKS.items() if block.facts.is_judged}}
OBJECTIVES = [*((objective, "full") for objective in LENGTH), ("sft", "lora"), ("dpo", "lora")]
"""Each objective once, and adapters where they count: on one forward, and in place of a reference model."""


@pytest.fixture
def tile(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, logits = TILE
    monkeypatch.setattr(chunked_logprob, "TOKEN_CHUNK_SIZE", tokens)
    monkeypatch.setattr(utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", logits)
    monkeypatch.setattr(activations, "_TILE_TOKENS", tokens)
    monkeypatch.setattr(activations, "_TILE_LOGITS", logits)


@dataclass(frozen=True)
class Held:
    """Bytes beyond what was there before the micro-batch."""

    kept: int
    peak: int


def recipe_of(objective: str, method: str, folder: Path, *sets: str) -> RecipeConfig:
    (folder / "rows.jsonl").write_text("{}\n", encoding="utf-8")
    name = f"tiny_{method}_custom_e1" if objective == "sft" else f"tiny_{objective}_{method}_custom_e1"
    least = BLOCKS[objective].model_construct().least_batch_size
    mine = [f"max_length={LENGTH[objective]}", f"batch_size={least}", *sets]
    if objective == "sft":
        mine.append("train_dataloader.dataset.packing=False")
    if method == "lora":
        mine += ["adapter.r=4", "lora_dropout=0.0"]
    return lightest(name, *mine, data=folder / "rows.jsonl")


def rows_of(recipe: RecipeConfig) -> list[dict[str, Any]]:
    """Rows of the greatest length; of preferences one side is a token shorter, so that they are padded."""
    loader, facts = recipe.train_dataloader, recipe.objective.facts
    ids = [1 + at % 50 for at in range(loader.dataset.max_length)]
    if not facts.is_judged:
        return [{"input_ids": ids, "labels": ids, "seq_lengths": [len(ids)]}] * loader.batch_size
    sides = [(ids, [-100, *ids[1:]]), (ids[:-1], [-100, *ids[1:-1]])]
    if facts.rows == "judged":
        return [{"answer_ids": side, "answer_labels": labels, "is_good": len(side) % 2 == 0} for side, labels in sides]
    both = zip(("chosen", "rejected"), sides, strict=True)
    pair = {key: value for name, side in both for key, value in ((f"{name}_ids", side[0]), (f"{name}_labels", side[1]))}
    if facts.scores:
        pair = {key: value for key, value in pair.items() if key.endswith("ids")}
    return [pair] * loader.batch_size


def model_of(recipe: RecipeConfig, facts: dict[str, Any]) -> Any:
    config = LlamaConfig(**facts, num_labels=1, use_cache=False, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    made = LlamaForSequenceClassification if recipe.objective.facts.scores else LlamaForCausalLM
    return made._from_config(config, dtype=torch.bfloat16)


def held(recipe: RecipeConfig, folder: Path, facts: dict[str, Any]) -> Held:
    """Take one micro-batch through the recipe's trainer, forward and backward."""
    model, reference, rows = model_of(recipe, facts), None, rows_of(recipe)
    if recipe.adapter:
        kind = "SEQ_CLS" if recipe.objective.facts.scores else "CAUSAL_LM"
        adapter = LoraConfig(task_type=kind, r=recipe.adapter.r, target_modules="all-linear", lora_dropout=0.0)
        model = get_peft_model(model, adapter, autocast_adapter_dtype=False)
    elif recipe.objective.facts.has_reference:
        reference = model_of(recipe, facts).requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(assets.asset("package:tiny"))
    trainer = evaluator(
        recipe, (model, reference), TextEncoder(tokenizer), Dataset.from_list(rows), len(rows), str(folder)
    )
    model.train()
    if recipe.train_cfg.gradient_checkpointing:
        if recipe.split.recomputed_layers is not None:
            trained = model.get_base_model() if recipe.adapter else model
            recompute_first(trained, recipe.split.recomputed_layers)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    if recipe.train_cfg.loss == "whole":
        use_whole_logits(trainer, (model, reference), recipe)
    inputs = trainer.data_collator(rows)
    live = Live()
    with as_on_a_gpu(), live:
        before = live.now
        loss = trainer.compute_loss(model, inputs, num_items_in_batch=torch.tensor(1))
        kept = live.now - before
        if recipe.train_cfg.loss == "whole":
            live.reset()  # the plan counts the backward pass of whole logits
        loss.backward()
    return Held(kept, live.peak - before)


def planned(recipe: RecipeConfig, facts: dict[str, Any]) -> tuple[Work, float]:
    """The work, and the peak on paper: the gradients of the weights grow as the layers' activations go."""
    architecture = Architecture(model_type="llama", head_dim=16, **facts)
    work = of_recipe(recipe, architecture)
    gradients = 2 * count(recipe, architecture).trainable
    at_layer = work.at_layer + max(0.0, gradients - work.kept)
    at_again = work.at_again - work.freed + max(0.0, gradients - (work.kept - work.freed))
    return work, work.kept + max(work.at_loss + work.logits, at_layer, at_again if work.freed else 0.0)


@pytest.mark.parametrize(("objective", "method"), OBJECTIVES)
def test_the_loss_holds_what_is_planned(objective: str, method: str, tmp_path: Path, tile: None) -> None:
    recipe = recipe_of(objective, method, tmp_path, "gradient_checkpointing=False")

    found, (work, peak) = held(recipe, tmp_path, FACTS), planned(recipe, FACTS)

    assert found.peak == pytest.approx(peak, rel=0.05)
    if not recipe.objective.facts.keeps_logits:
        assert found.kept == pytest.approx(work.kept + work.at_loss, rel=0.05)


@pytest.mark.parametrize(("objective", "method"), [("sft", "full"), ("dpo", "lora"), ("kto", "full")])
def test_whole_logits_hold_what_is_planned(objective: str, method: str, tmp_path: Path) -> None:
    recipe = recipe_of(objective, method, tmp_path, "gradient_checkpointing=False", "loss=whole")

    found, (_, peak) = held(recipe, tmp_path, FACTS), planned(recipe, FACTS)

    assert found.peak == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize(("width", "method"), [(192, "full"), (512, "lora")])
def test_with_checkpointing_the_peak_is_one_layer_at_work(width: int, method: str, tmp_path: Path) -> None:
    facts = {**FACTS, "num_hidden_layers": 4, "intermediate_size": width}
    recipe = recipe_of("reward", method, tmp_path, "gradient_checkpointing=True", "batch_size=4")

    found, (work, peak) = held(recipe, tmp_path, facts), planned(recipe, facts)

    assert work.at_layer > work.at_loss + work.logits
    assert found.peak == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_with_checkpointing_a_large_tile_of_logits_is_more_than_a_layer(
    objective: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tile: None
) -> None:
    for module, name in ((utils, "_CHUNKED_LOGPROB_CHUNK_SIZE"), (activations, "_TILE_LOGITS")):
        monkeypatch.setattr(module, name, 8192)
    recipe = recipe_of(objective, "full", tmp_path, "gradient_checkpointing=True")

    found, (work, peak) = held(recipe, tmp_path, FACTS), planned(recipe, FACTS)

    assert work.at_layer < work.at_loss + work.logits
    assert found.peak == pytest.approx(peak, rel=0.05)


def test_the_fused_head_needs_the_same_for_a_vocabulary_twice_as_large(tmp_path: Path, tile: None) -> None:
    recipe = recipe_of("sft", "lora", tmp_path, "gradient_checkpointing=False")

    small, large = (held(recipe, tmp_path, {**FACTS, "vocab_size": size}).peak for size in (3000, 6000))
    on_paper = [planned(recipe, {**FACTS, "vocab_size": size})[1] for size in (3000, 6000)]

    assert small == pytest.approx(large, rel=0.01), "a tile has whole tokens"
    assert on_paper[0] == pytest.approx(on_paper[1], rel=0.01)


def test_the_tile_is_as_large_as_trls() -> None:
    assert activations._TILE_TOKENS == chunked_logprob.TOKEN_CHUNK_SIZE
    assert activations._TILE_LOGITS == utils._CHUNKED_LOGPROB_CHUNK_SIZE


def test_the_stand_in_for_the_kernels_computes_what_they_do() -> None:
    hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    targets = torch.tensor([0, 10, 3, 3, 7])
    expected = torch.log_softmax(hidden @ weight.T, -1).gather(-1, targets[:, None])[:, 0]
    gradients = torch.autograd.grad(expected.sum(), (hidden, weight))

    with as_on_a_gpu(), Live():
        fused = chunked_logprob.ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 4)[0]
        of_logits = utils.selective_log_softmax((hidden @ weight.T)[None], targets[None])[0]
        for found in (fused, of_logits):
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(torch.autograd.grad(found.sum(), (hidden, weight)), gradients)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_with_some_layers_recomputed_the_others_keep_their_activations(number: int, tmp_path: Path) -> None:
    facts = {**FACTS, "num_hidden_layers": 4, "intermediate_size": 512}
    sets = ("gradient_checkpointing=True", f"recomputed_layers={number}", "batch_size=4")
    recipe = recipe_of("reward", "lora", tmp_path, *sets)

    found, (work, peak) = held(recipe, tmp_path, facts), planned(recipe, facts)

    assert found.kept == pytest.approx(work.kept + work.at_loss, rel=0.05)
    assert found.peak == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize("number", [1, 3])
def test_with_some_layers_recomputed_no_gradients_are_there_while_the_others_are_kept(
    number: int, tmp_path: Path
) -> None:
    facts = {**FACTS, "num_hidden_layers": 6, "intermediate_size": 512}
    sets = ("gradient_checkpointing=True", f"recomputed_layers={number}", "batch_size=4", "accumulative_counts=1")
    recipe = recipe_of("reward", "full", tmp_path, *sets)
    architecture = Architecture(model_type="llama", head_dim=16, **facts)

    found, needs = held(recipe, tmp_path, facts), peak(recipe, architecture, Costs.of_preset("none", 64), 1, 1)

    assert needs.gpu["gradients"] + needs.gpu["activations"] == pytest.approx(found.peak, rel=0.03)
