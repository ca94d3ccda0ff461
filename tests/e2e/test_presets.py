"""Two real ranks: every preset trains the same model to the same loss, and its result loads without tuner."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.runs import Finished, Once, distance, ok, quick, train
from tuner.zero import presets

pytestmark = [pytest.mark.e2e, pytest.mark.long]

PRESETS = [rung.name for rung in presets.rungs() if rung.stage]
LEVELS = ("zero2", "zero3_offload")
"""Adapters whole and in shards; all presets are compared in fp32."""


def losses_of(recipe: Path, folder: Path, preset: str, *more: str) -> Finished:
    return ok(train(recipe, folder / preset, "--deepspeed", preset, *more))


def test_all_presets_give_the_same_loss_and_weights_in_fp32_and_a_result_for_plain_transformers(once: Once) -> None:
    reference = once(quick, "full", "--deepspeed", "none")
    weights = load_file(reference.path / "final/model.safetensors")
    runs = {preset: once(quick, "full", "--deepspeed", preset) for preset in PRESETS}

    assert reference.losses[-1] < reference.losses[0] - 0.5, "it learns"
    for preset, run in runs.items():
        assert run.losses == pytest.approx(reference.losses, abs=2e-5), preset
        assert distance(load_file(run.path / "final/model.safetensors"), weights) < 1e-5, preset
    _answers_with_plain_transformers(runs["deepspeed_zero3"].path / "final")


def test_an_accelerate_config_trains_to_the_loss_of_the_preset_on_the_ranks_that_it_names(
    tmp_path: Path, once: Once
) -> None:
    recipe = quick(tmp_path, "full")
    config = tmp_path / "accelerate.yaml"
    config.write_text(
        "distributed_type: DEEPSPEED\nmixed_precision: 'no'\nnum_machines: 1\nnum_processes: 2\n"
        "deepspeed_config: {zero_stage: 2, gradient_accumulation_steps: 2, zero3_init_flag: false}\n"
    )

    reference = once(quick, "full", "--deepspeed", "deepspeed_zero2")
    theirs = ok(train(recipe, tmp_path / "theirs", "--deepspeed", config, "--ds", "overlap_comm=false", ranks=0))

    assert theirs.losses == reference.losses
    assert theirs.json("run.json")["world_size"] == 2


def _answers_with_plain_transformers(final: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(final)
    model = AutoModelForCausalLM.from_pretrained(final)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )

    assert model.generate(**prompt, max_new_tokens=3).shape[1] > prompt["input_ids"].shape[1]
    assert model.generation_config.eos_token_id is not None
    assert not list(final.glob("*.bin")), "no pickle in what is published"
    assert next(model.parameters()).dtype == torch.float32


def test_every_kind_of_level_gives_the_same_loss_with_lora_within_bf16_noise(tmp_path: Path) -> None:
    recipe = quick(tmp_path, "lora")

    reference = losses_of(recipe, tmp_path, "none")
    bf16 = ("--set", "dtype=bf16")
    runs = {preset: losses_of(recipe, tmp_path / "bf16", preset, *bf16) for preset in LEVELS}

    assert reference.losses[-1] < reference.losses[0] - 0.2, "it learns"
    for preset, run in runs.items():
        assert run.losses == pytest.approx(reference.losses, abs=5e-3), preset
        assert run.json("deepspeed.json")["bf16"] == {"enabled": True}
        assert len(load_file(run.path / "final/adapter_model.safetensors")) == 2 * 7 * 3
    adapted = AutoPeftModelForCausalLM.from_pretrained(runs["zero3_offload"].path / "final")
    assert sum(bool(weight.any()) for name, weight in adapted.named_parameters() if "lora_B" in name) == 7 * 3


def test_qlora_learns_the_same_under_zero3_and_survives_an_evaluation(tmp_path: Path) -> None:
    recipe = quick(tmp_path, "qlora")
    recipe.write_text(
        recipe.read_text().replace("val_dataloader = None", "").replace("max_steps=4", "max_epochs=1, max_steps=3")
    )

    runs = [losses_of(recipe, tmp_path, preset, "--set", "dtype=bf16") for preset in ("none", "zero3")]

    before, evaluated = ([run.metrics[place]["eval_loss"] for run in runs] for place in (0, -1))
    assert before == pytest.approx([before[0]] * 2, abs=5e-3)
    assert evaluated == pytest.approx([evaluated[0]] * 2, abs=5e-3)
    assert evaluated[0] < runs[0].losses[0] - 0.2, "the evaluated model is the trained one"
