"""Somebody's own model and rows go from a folder to SFT, a chat, DPO on its result, and a merged model."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.runs import environment, ok, train
from tests.e2e.warm import warm
from tests.tiny_model import tiny
from tuner import assets

pytestmark = pytest.mark.e2e

QUICK = {
    "train_dataloader.dataset.max_length": 128,
    "accumulative_counts": 1,
    "train_dataloader.batch_size": 4,
    "log.interval": 1,
    "warmup_ratio": 0.0,
    "lr": 3e-3,
    "dtype": "fp32",
}


def sets(**more: object) -> list[str]:
    return [word for key, value in {**QUICK, **more}.items() for word in ("--set", f"{key}={value}")]


def rows(folder: Path, asset: str, count: int) -> Path:
    lines = Path(assets.asset(f"package:{asset}/train.jsonl")).read_text(encoding="utf-8").splitlines()[:count]
    file = folder / f"{asset}.jsonl"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


@pytest.mark.long
def test_ones_own_model_and_data_go_from_a_folder_to_a_merged_model(tmp_path: Path) -> None:
    model, sft, dpo, out = (tmp_path / name for name in ("my-qwen", "sft", "dpo", "out"))
    shutil.copytree(tiny(), model)

    first = ok(
        train(
            model, sft, "--data", rows(tmp_path, "sample", 60), "--val-split", "0.1", "--epochs", "1", *sets(), ranks=1
        )
    )
    assert "(LoRA, SFT; --method chooses another)" in first.text
    assert "validation: 10 % of the training rows are held out, by seed 42" in first.text
    assert first.json("run.json")["name"] == "my-qwen_lora"
    assert [line for line in first.metrics if "eval_loss" in line]

    chat = warm().run(["chat", sft, "--max-new-tokens", "4"], env=environment(), input="Why?\n")
    assert chat.returncode == 0, chat.stderr

    # At once a run's result as a model, and the reference of DPO: the first step's loss is that of two equal models.
    prefs = rows(tmp_path, "sample_preferences", 12)
    preferred = ["--model", sft, "--data", prefs, "--deepspeed", "zero3"]
    second = ok(train("tiny_dpo_lora_custom_e1", dpo, *preferred, *sets(max_steps=2), ranks=1))
    assert second.losses[0] == pytest.approx(math.log(2), abs=1e-5)
    assert second.losses[1] != pytest.approx(math.log(2), abs=1e-4)
    assert {file.name for file in (dpo / "final").iterdir()} >= {"adapter_model.safetensors", "tokenizer.json"}
    assert not (dpo / "final" / "ref").exists()
    told = json.loads((dpo / "final" / "adapter_config.json").read_text())
    assert told["base_model_name_or_path"] == str(model)

    exported = warm().run(["export", dpo, out, "--merge"], env=environment())
    assert exported.returncode == 0, exported.stdout + exported.stderr
    merged, base = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (out, model))
    assert any(not torch.equal(merged[name], base[name]) for name in base)
