"""The first hour with one's own model and data: train without a recipe, go on with preferences, ask, and publish."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.runs import COMMAND, environment, ok, train
from tuner.models.load import CACHE
from tuner.models.tiny import materialize
from tuner.recipes import catalog

pytestmark = [pytest.mark.e2e, pytest.mark.long]

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
    lines = Path(catalog.asset(f"package:{asset}/train.jsonl")).read_text(encoding="utf-8").splitlines()[:count]
    file = folder / f"{asset}.jsonl"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def tuner(*arguments: object) -> str:
    """Run a command to its end and return what it printed."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)], env=environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_ones_own_model_and_data_go_from_a_folder_to_a_merged_model(tmp_path: Path) -> None:
    model, sft, dpo, out = (tmp_path / name for name in ("my-qwen", "sft", "dpo", "out"))
    shutil.copytree(materialize(Path(catalog.asset("package:tiny")), CACHE), model)

    first = ok(
        train(
            model, sft, "--data", rows(tmp_path, "sample", 60), "--val-split", "0.1", "--epochs", "1", *sets(), ranks=1
        )
    )
    assert "method lora; --method takes another" in first.text
    assert "validation: 0.1 of the training rows are held out, by seed 42" in first.text
    assert first.json("run.json")["name"] == "my-qwen_lora"
    assert [line for line in first.metrics if "eval_loss" in line]

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

    tuner("export", dpo, out, "--merge")
    merged, base = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (out, model))
    assert any(not torch.equal(merged[name], base[name]) for name in base)
