"""LoRA that no gradient reaches is told once, of any model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import TrainerControl, TrainerState, TrainingArguments

from tuner.runs.directory import RunDirectory
from tuner.worker.callbacks import CheckLoraLearns


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
