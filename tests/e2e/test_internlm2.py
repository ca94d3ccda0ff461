"""The mission's recipe, whole but for the download: a small InternLM2 in the published format trains and reloads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoTokenizer

import tuner.models  # noqa: F401  registers internlm2
from tests.e2e.runs import ok, train
from tests.models.published import write_checkpoint

pytestmark = pytest.mark.e2e

RECIPE = "internlm2_chat_7b_qlora_oasst1_e3"
SHORT = ("--set", "max_steps=3", "--set", "log.interval=1", "--set", "max_length=128", "--set", "accumulative_counts=2")


@pytest.fixture
def oasst1(tmp_path: Path) -> Path:
    path = tmp_path / "guanaco.jsonl"
    rows = [f"### Human: What is {n} and {n}?### Assistant: It is {2 * n}.\n### Note: easy." for n in range(60)]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return path


def test_the_missions_recipe_trains_saves_and_reloads(tmp_path: Path, oasst1: Path) -> None:
    base = tmp_path / "internlm2"
    write_checkpoint(base)

    asked = ("--deepspeed", "deepspeed_zero2", "--model", base, "--data", oasst1, *SHORT)
    run = ok(train(RECIPE, tmp_path / "run", *asked, ranks=1))

    assert "'oasst1' (detected)" in run.text
    assert run.json("deepspeed.json")["zero_optimization"]["reduce_bucket_size"] == 64 * 64, "facts of the model given"
    model = AutoPeftModelForCausalLM.from_pretrained(run.path / "final")
    assert model.peft_config["default"].base_model_name_or_path == str(base)
    assert any(bool(weight.any()) for name, weight in model.named_parameters() if "lora_B" in name)
    tokenizer = AutoTokenizer.from_pretrained(run.path / "final")
    assert "<|im_start|>" in tokenizer.chat_template


@pytest.mark.long
def test_full_training_under_zero3_saves_the_published_layout(tmp_path: Path, oasst1: Path) -> None:
    base = tmp_path / "internlm2"
    published = write_checkpoint(base)

    recipe = "internlm2_chat_7b_full_oasst1_e1"
    run = ok(train(recipe, tmp_path / "run", "--deepspeed", "zero3", "--model", base, "--data", oasst1, *SHORT))

    saved = load_file(run.path / "final" / "model.safetensors")
    assert {name: weight.shape for name, weight in saved.items()} == {
        name: weight.shape for name, weight in published.items()
    }
    moved = [name for name in saved if not torch.equal(saved[name].float(), published[name].float())]
    assert any("wqkv" in name for name in moved), "training reached the fused weights"
