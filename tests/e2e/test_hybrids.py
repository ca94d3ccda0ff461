"""Packed models with convolutions, states or masks of their own: two ranks learn what one does, and a run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.runs import ok, train
from tests.e2e.test_long_context import is_same, recipe, run
from tests.worker.families import make_model

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:Initializing zero-element tensors"),
]
WEIGHTS = {"full": "model", "lora": "adapter_model"}
KINDS = {
    **{"granitemoehybrid": ("full", "zero2"), "lfm2_moe": ("full", "zero3"), "nemotron_h": ("full", "zero2")},
    **{"jamba": ("lora", "zero3"), "kimi_linear": ("lora", "zero2"), "qwen3_5_text": ("lora", "zero3")},
    **{"afmoe": ("lora", "zero2"), "gpt_oss": ("lora", "zero3")},
}
"""One kind for each way to mix the tokens of a row, or to make its masks; others share a mixer."""


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_learn_what_one_does_on_packed_rows_and_a_run_goes_on_to_the_bit(kind: str, tmp_path: Path) -> None:
    method, level = KINDS[kind]
    make_model(kind, tmp_path / "model")
    path, model = recipe(tmp_path, method), ("--model", str(tmp_path / "model"))

    on_two_ranks = run(path, tmp_path / "two", level, *model)
    on_one_rank = run(path, tmp_path / "one", level, *model, ranks=1)

    assert on_two_ranks.json("recipe.json")["recipe"]["train_dataloader"]["dataset"]["packing"]
    is_same(on_two_ranks, on_one_rank, WEIGHTS[method])
    half = on_two_ranks.path / "checkpoints/checkpoint-2"
    again = ok(train(path, tmp_path / "again", *model, "--deepspeed", level, "--resume", half))
    assert again.losses == on_two_ranks.losses[2:]
    resumed, whole = (load_file(each.path / f"final/{WEIGHTS[method]}.safetensors") for each in (again, on_two_ranks))
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[name], weight) for name, weight in whole.items())
