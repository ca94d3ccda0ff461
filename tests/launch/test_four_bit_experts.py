"""Experts in 4 bits: what a run decides for them, what it refuses with them, and what its plan counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launch.plans import made
from tests.machine.gpus import GIB, H100, machine
from tests.refused import refused
from tuner.errors import RecipeError
from tuner.launch.resolved_run import ResolvedRun

QWEN = "qwen3_30b_a3b_qlora_alpaca_e3"
NUM_EXPERTS = 48 * 128 * 3 * 2048 * 768
ATTENTION = 48 * (2 * 2048 * 32 * 128 + 2 * 2048 * 4 * 128)
OTHERS = 2 * 151936 * 2048 + 48 * (2 * 2048 + 2 * 128 + 128 * 2048) + 2048
"""Embeddings and head, norms and routers: they keep 16 bits."""


def run(*sets: str, recipe: str = QWEN, level: str | None = None) -> ResolvedRun:
    return made(*sets, recipe=recipe, hardware=machine(*[H100] * 8), deepspeed=level, ignore_fit=True)


def weights_of(found: ResolvedRun) -> float:
    assert found.fit is not None
    return found.fit.peak.gpu["weights"]


def test_the_weights_of_30b_take_a_quarter_of_their_16_bits() -> None:
    lora = 2 * 997e6  # what is trained, in 16 bits

    packed = weights_of(run(level="zero1")) - lora
    in_16_bits = weights_of(run("quantization.experts=False", level="zero1")) - lora

    four_bits = 0.5 + 1 / 64 + 1 / 4096
    assert packed == pytest.approx(four_bits * (NUM_EXPERTS + ATTENTION) + 2 * OTHERS, rel=1e-3)
    assert packed == pytest.approx(16.7e9, rel=0.01)
    assert in_16_bits == pytest.approx(2 * NUM_EXPERTS + four_bits * ATTENTION + 2 * OTHERS, rel=1e-3)


def test_each_rank_of_zero_3_holds_all_packed_weights_and_three_copies_of_a_tensor_while_it_loads() -> None:
    found = run(level="zero3")

    assert found.fit is not None
    assert found.fit.peak.gpu["loading"] == 3 * 2 * (128 * 2 * 768 * 2048)
    assert weights_of(found) == pytest.approx(16.7e9, rel=0.01)


@pytest.mark.parametrize("recipe", [QWEN, "mixtral_8x7b_qlora_alpaca_e3"])
def test_layers_are_recomputed_however_much_memory_is_left(recipe: str) -> None:
    found = run(recipe=recipe)

    cfg, origins = found.recipe.config.train_cfg, found.recipe.origins
    assert (cfg.gradient_checkpointing, cfg.recomputed_layers) == (True, None)
    assert "experts" in str(origins["train_cfg.gradient_checkpointing"].text)
    assert found.fit is not None and found.fit.spare_gpu_bytes > 20 * GIB
    assert run("quantization.experts=False", recipe=QWEN).recipe.config.packs_experts is False


@pytest.mark.parametrize(
    ("setting", "where"),
    [
        ("gradient_checkpointing=False", "train_cfg.gradient_checkpointing"),
        ("recomputed_layers=8", "train_cfg.recomputed_layers"),
        ("torch_compile=True", "train_cfg.torch_compile"),
        ("activation_offloading=True", "train_cfg.activation_offloading"),
    ],
)
def test_what_keeps_unpacked_experts_or_was_not_tried_is_refused(setting: str, where: str) -> None:
    with refused(RecipeError, where, "quantization.experts=False"):
        run(setting)

    run(setting, "quantization.experts=False")


def test_disks_are_refused_and_the_memory_of_the_host_is_not(tmp_path: Path) -> None:
    disks = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    (tmp_path / "disks.json").write_text(json.dumps({"zero_optimization": disks}))

    with refused(RecipeError, "zero_optimization.offload_optimizer.device", "quantization.experts=False"):
        run(level=str(tmp_path / "disks.json"))
    assert run(level="zero3_offload").recipe.config.packs_experts


def test_generation_by_vllm_is_refused() -> None:
    grpo = "qwen3_30b_a3b_grpo_qlora_gsm8k_e1"

    with refused(RecipeError, "objective.generation.engine", "quantization.experts=False"):
        run("objective.generation.engine=vllm", recipe=grpo)
    assert run(recipe=grpo).recipe.config.packs_experts
