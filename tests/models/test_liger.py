"""Liger's kernels are asked of their package; a stand-in takes its place, for Triton needs a GPU."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.integrations import liger

from tuner.models.load import load_model, pretrained_path
from tuner.recipes.loading import load
from tuner.recipes.recipe import Overrides


@pytest.mark.parametrize("use", [True, False])
def test_a_model_gets_ligers_kernels_where_the_recipe_has_them_but_not_its_loss(
    monkeypatch: pytest.MonkeyPatch, use: bool
) -> None:
    """Also under 'auto', which a recipe that no machine has resolved still holds."""
    given: list[tuple[type[Any], dict[str, bool]]] = []
    package = ModuleType("liger_kernel.transformers")
    package._apply_liger_kernel_to_instance = lambda model, **kernels: given.append((model, kernels))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", package)
    monkeypatch.setattr(liger, "is_liger_kernel_available", lambda: True)
    config = load("tiny_lora_sample_e1", Overrides(pairs=(("--set", f"use_liger_kernel={use}"),))).config

    load_model(config, pretrained_path(config.model), torch.float32, "cpu", shards=False)

    assert [isinstance(model, PreTrainedModel) for model, _ in given] == [True] * use
    assert [kernels for _, kernels in given] == [{"cross_entropy": False, "fused_linear_cross_entropy": False}] * use
