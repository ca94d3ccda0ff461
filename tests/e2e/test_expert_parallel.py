"""Real ranks that divide the experts of a small model learn what one rank learns, and save and resume them whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.runs import Finished, distance
from tests.e2e.test_four_bit_experts import write_model
from tests.e2e.test_long_context import is_same, recipe, run

pytestmark = [pytest.mark.e2e, pytest.mark.long]

DIVIDED = ("--ds", "autoep_size=2")
ATTENTION = ("--set", "target_modules=['q_proj', 'k_proj', 'v_proj', 'o_proj']")


def norms(of_run: Finished) -> list[float]:
    return [line["grad_norm"] for line in of_run.metrics if "grad_norm" in line]


def test_ranks_that_divide_the_experts_learn_and_save_what_one_rank_does_and_go_on_to_the_bit(tmp_path: Path) -> None:
    path, model = recipe(tmp_path), ("--model", str(write_model(tmp_path / "model")))
    alone = run(path, tmp_path / "alone", "none", *model, ranks=1)

    runs = {
        level: run(path, tmp_path / level, level, *model, *DIVIDED, ranks=ranks)
        for level, ranks in (("none", 2), ("zero1", 2), ("zero2", 4))
    }
    for divided in runs.values():
        is_same(divided, alone)
        assert norms(divided) == pytest.approx(norms(alone), rel=1e-5)
        counts = [each.json("status.json")["num_trained_weights"] for each in (divided, alone)]
        assert counts[0] == counts[1]
    for level in ("none", "zero2"):
        whole, half = runs[level], runs[level].path / "checkpoints/checkpoint-2"
        saved, final = (load_file(folder / "model.safetensors") for folder in (half, whole.path / "final"))
        assert saved.keys() == final.keys(), "a checkpoint is whole too"
        ranks = 2 if level == "none" else 4
        again = run(path, tmp_path / f"{level} again", level, *model, *DIVIDED, "--resume", str(half), ranks=ranks)
        assert again.losses == whole.losses[2:]
        resumed = load_file(again.path / "final/model.safetensors")
        assert all(torch.equal(resumed[name], weight) for name, weight in final.items())


def test_so_they_do_with_lora_on_attention_beside_frozen_experts(tmp_path: Path) -> None:
    path, model = recipe(tmp_path, "lora"), ("--model", str(write_model(tmp_path / "model")), *ATTENTION)
    alone = run(path, tmp_path / "alone", "none", *model, ranks=1)

    divided = run(path, tmp_path / "zero2", "zero2", *model, *DIVIDED)

    is_same(divided, alone, "adapter_model")
    states = divided.path / "checkpoints/checkpoint-4/global_step4"
    assert max(file.stat().st_size for file in states.glob("*model_states.pt")) < 300_000, "the adapter alone is saved"
    adapters = (load_file(each.path / "final/adapter_model.safetensors") for each in (divided, alone))
    assert distance(*adapters) < 1e-5
