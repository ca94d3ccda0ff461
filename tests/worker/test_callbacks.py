"""The gradient norm at stage 0 in fp32; tests/reference/test_training.py has it in a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tuner.worker.callbacks import KeptNorm


def engine(max_norm: float) -> Any:
    """What the callback takes of DeepSpeed's engine: a model with gradients, one of them large, and a limit."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(128, 1664), torch.nn.Linear(1664, 2))
    for weight in model.parameters():
        weight.grad = torch.randn_like(weight) * torch.rand(len(weight), *[1] * (weight.ndim - 1)) ** 6
    return SimpleNamespace(module=model, gradient_clipping=lambda: max_norm)


@pytest.mark.parametrize("max_norm", [1.0, 1e4])
def test_the_norm_at_stage_0_is_exact_and_clips_what_is_above_the_limit(max_norm: float) -> None:
    made = engine(max_norm)
    whole = torch.cat([weight.grad.double().flatten() for weight in made.module.parameters()])
    KeptNorm(SimpleNamespace(deepspeed=made)).on_train_begin(None, None, None)

    made.clip_fp32_gradients()

    assert made._global_grad_norm == pytest.approx(float(whole.norm()), rel=1e-9)
    clipped = torch.cat([weight.grad.double().flatten() for weight in made.module.parameters()])
    assert float(clipped.norm()) == pytest.approx(min(max_norm, float(whole.norm())), rel=1e-6)
