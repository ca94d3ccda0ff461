"""Real ranks that divide the experts of a small model learn what one rank learns, and save and resume them whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.runs import Finished, distance
from tests.e2e.test_four_bit_experts import write_model
from tests.e2e.test_long_context import SHARED, is_same, recipe, run

pytestmark = [pytest.mark.e2e, pytest.mark.long]

DIVIDED = ("--ds", "autoep_size=2")
ATTENTION = ("--set", "target_modules=['q_proj', 'k_proj', 'v_proj', 'o_proj']")


def learns_the_same(run: Finished, other: Finished) -> None:
    is_same(run, other)
    for key in ("grad_norm", "aux_loss"):
        logged = [[line[key] for line in each.metrics if key in line] for each in (run, other)]
        assert len(logged[0]) == 4 and logged[0] == pytest.approx(logged[1], rel=1e-5), key
    assert len({each.json("status.json")["num_trained_weights"] for each in (run, other)}) == 1


def test_ranks_that_divide_the_experts_or_share_samples_learn_what_one_rank_does_and_go_on_to_the_bit(
    tmp_path: Path,
) -> None:
    path, model = recipe(tmp_path), ("--model", str(write_model(tmp_path / "model")))
    alone = run(path, tmp_path / "alone", "none", *model, ranks=1)

    learns_the_same(run(path, tmp_path / "shared", "zero1", *model, *SHARED), alone)
    for level in ("none", "zero1"):
        learns_the_same(run(path, tmp_path / level, level, *model, *DIVIDED), alone)
    four = run(path, tmp_path / "four", "zero2", *model, *DIVIDED, ranks=4)
    learns_the_same(four, alone)
    half = four.path / "checkpoints/checkpoint-2"
    saved, final = (load_file(folder / "model.safetensors") for folder in (half, four.path / "final"))
    assert saved.keys() == final.keys(), "a checkpoint is whole too"
    again = run(path, tmp_path / "again", "zero2", *model, *DIVIDED, "--resume", str(half), ranks=4)
    assert again.losses == four.losses[2:]
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
