"""Weights that no gradient reaches: LoRA on them is told once, of any model, and what chooses tokens does not decay."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, TrainerControl, TrainerState, TrainingArguments

from tests.configs.test_packing import small_config
from tuner.runs.directory import RunDirectory
from tuner.worker.callbacks import CheckLoraLearns
from tuner.worker.objectives.sft_training import Sft


class Adapted(nn.Module):
    """Three weights of an adapter: one is used, one from a later step on, and one never."""

    def __init__(self) -> None:
        super().__init__()
        self.lora_used, self.lora_late, self.lora_unused = (nn.Parameter(torch.ones(2)) for _ in range(3))
        self.head = nn.Parameter(torch.ones(2))

    def forward(self, is_late: bool) -> torch.Tensor:
        return (self.lora_used + (self.lora_late if is_late else 0)).sum()


@pytest.mark.parametrize(("num_steps", "number"), [(1, 2), (7, 1), (25, 1)])
def test_lora_without_a_gradient_in_the_first_steps_is_told_once(num_steps: int, number: int, tmp_path: Path) -> None:
    run, state, control = RunDirectory(tmp_path), TrainerState(), TrainerControl()
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    model = Adapted()
    check = CheckLoraLearns(cast(Any, SimpleNamespace(model=model)), run)

    check.on_train_begin(arguments, state, control)
    for step in range(num_steps):
        model(step > 3).backward()
        check.on_step_end(arguments, state, control)
    check.on_train_end(arguments, state, control)

    (line,) = run.warnings.read_text().splitlines()
    assert re.findall(r"\b\d+\b", json.loads(line)["warning"])[:2] == [str(number), "3"]
    assert ("lora_late" if number == 2 else "lora_unused") in line
    assert all(not weight._backward_hooks for weight in model.parameters())


def test_what_chooses_tokens_does_not_decay_when_the_model_is_trained_whole() -> None:
    model = AutoModelForCausalLM.from_config(small_config("deepseek_v32"))

    decayed = Sft.get_decay_parameter_names(Sft.__new__(Sft), model)

    assert any("q_a_proj" in name for name in decayed)
    assert not [name for name in decayed if ".indexer." in name]
