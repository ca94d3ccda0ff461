"""Optimizers and beginnings of adapters by name: equal losses at each stage, a resume, a result for the old base."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.e2e.runs import Finished, ok, quick, train
from tests.models.test_adapters import TOKENS
from tests.tiny_model import tiny

pytestmark = [pytest.mark.e2e, pytest.mark.long]

MUON = ("--set", "optimizer.type=Muon", "--set", "muon_lr=0.02", "--set", "clip_grad=None")
OF_LORA = {
    "LoRA+": ("--set", "loraplus_lr_ratio=16"),
    "PiSSA": ("--set", "init_lora_weights=pissa"),
    "OLoRA": ("--set", "init_lora_weights=olora"),
    "8 bits": ("--set", "optimizer.type=AdamW8bit"),
    "AdEMAMix": ("--set", "optimizer.type=AdEMAMix"),
    "Adadelta": ("--set", "optimizer.type=Adadelta", "--set", "lr=1.0"),
}


def resumed(run: Finished, folder: Path, *given: str) -> Finished:
    checkpoint = run.path / "checkpoints" / "checkpoint-2"
    return ok(train(run.path / "recipe.py", folder, *given, "--resume", checkpoint))


def test_muon_has_the_same_losses_at_every_stage_and_after_a_resume(tmp_path: Path) -> None:
    recipe = quick(tmp_path, "full")
    runs = {
        level: ok(train(recipe, tmp_path / level, "--deepspeed", level, *MUON))
        for level in ("none", "zero1", "zero2", "zero3")
    }

    for level, run in runs.items():
        assert run.losses == pytest.approx(runs["none"].losses, rel=1e-4), level
    again = resumed(runs["zero3"], tmp_path / "again", "--deepspeed", "zero3")
    assert again.losses == pytest.approx(runs["zero3"].losses[2:], rel=1e-5)


@pytest.mark.parametrize("kind", OF_LORA)
def test_an_adapter_trains_alike_at_stages_2_and_3_resumes_and_applies_to_its_base(kind: str, tmp_path: Path) -> None:
    recipe, more = quick(tmp_path, "lora"), ("--set", "lora_dropout=0.0", *OF_LORA[kind])
    two, three = (ok(train(recipe, tmp_path / level, "--deepspeed", level, *more)) for level in ("zero2", "zero3"))

    assert three.losses == pytest.approx(two.losses, rel=1e-3)
    again = resumed(three, tmp_path / "again", "--deepspeed", "zero3")
    assert again.losses == pytest.approx(three.losses[2:], rel=1e-5)
    outputs = [_outputs(run.path / "final") for run in (two, three, again)]
    assert outputs[1] == pytest.approx(outputs[0], abs=2e-2)
    assert outputs[2] == pytest.approx(outputs[1], abs=1e-3)
    assert json.loads((two.path / "final" / "adapter_config.json").read_text())["init_lora_weights"] is True
    assert load_file(two.path / "final" / "adapter_model.safetensors")


def _outputs(adapter: Path) -> list[float]:
    base = AutoModelForCausalLM.from_pretrained(tiny())
    found: list[float] = PeftModel.from_pretrained(base, adapter)(TOKENS).logits[0, -1].tolist()
    return found
