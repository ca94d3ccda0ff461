"""The pipeline of ROLL's guide trains after `tuner train that.yaml --model ... --data ...`, on two ranks at ZeRO-3."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.test_generated import lines, train
from tests.importers.test_roll_pipeline import PIPELINE

LORA = {"lora_rank": 32, "lora_alpha": 32, "lora_target": "o_proj,q_proj,k_proj,v_proj"}
REWARDS = "objective.rewards=[dict(type='math', column='ground_truth'), dict(type='length', target=20)]"
"""The pipeline's reward, and one that a model with random weights gets more or less of: else nothing is learned."""
SHRUNK = (
    *("--set", REWARDS, "--set", "mask_truncated_completions=False"),  # all 8 tokens long
    *("--set", "max_steps=2", "--set", "max_completion_length=8", "--set", "accumulative_counts=4"),
    *("--set", "max_length=32", "--set", "attn_implementation=sdpa", "--nproc-per-node", "2"),
)


@pytest.mark.long
def test_the_guides_pipeline_trains(tmp_path: Path) -> None:
    pipeline: dict[str, Any] = json.loads(json.dumps(PIPELINE))
    del pipeline["actor_train"]["model_args"]["ulysses_size"], pipeline["rewards"]["llm_judge"]
    pipeline["actor_train"]["model_args"] |= LORA
    preset = {"deepspeed_zero3": {"zero_optimization": {"stage": 3, "overlap_comm": True}}}
    rows = [{"prompt": f"{number} + 1 =", "ground_truth": str(number + 1)} for number in range(8)]
    for name, text in (
        ("config/deepspeed_zero3.yaml", yaml.safe_dump(preset)),
        ("qwen/rlvl_lora_zero3.yaml", yaml.safe_dump(pipeline)),
        ("sums.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows)),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    model_and_data = ("--model", "package:tiny", "--data", "sums.jsonl")
    train(tmp_path, "qwen/rlvl_lora_zero3.yaml", *model_and_data, *SHRUNK, "--work-dir", "run")

    objective = json.loads((tmp_path / "run" / "recipe.json").read_text())["recipe"]["objective"]
    assert (objective["type"], objective["num_generations"]) == ("grpo", 8)
    assert json.loads((tmp_path / "run" / "deepspeed.json").read_text())["zero_optimization"]["stage"] == 3
    steps = [line for line in lines(tmp_path / "run") if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2] and all("reward" in line for line in steps)
    assert (tmp_path / "run" / "final" / "adapter_model.safetensors").is_file()
