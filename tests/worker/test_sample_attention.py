"""Attention by sample: the outputs of SDPA with a mask, where no window or cache is involved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tuner.recipes.loading import load
from tuner.recipes.recipe import Overrides
from tuner.recipes.schema import LOADERS, RecipeConfig
from tuner.worker import compat, long_rows

LENGTHS = (5, 3, 9)


def model(kind: str = "llama", **more: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **heads, **more)).eval()


def recipe(max_length: int = 2048) -> RecipeConfig:
    pairs = [("--set", f"{loader}.dataset.max_length={max_length}") for loader in LOADERS]
    return load("tiny_full_sample_e3", Overrides(pairs=pairs)).config


def packed() -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.arange(1, sum(LENGTHS) + 1)[None],
        "position_ids": torch.cat([torch.arange(length) for length in LENGTHS])[None],
    }


def test_packed_samples_get_the_logits_of_sdpa_with_a_mask_and_of_each_sample_alone() -> None:
    ours, row = model(), packed()
    with torch.no_grad():
        of_mask = ours(**row, use_cache=False).logits
        assert long_rows.attend_by_sample(ours, recipe())
        by_sample = ours(**row, use_cache=False).logits
        alone = [model()(input_ids=part[None], use_cache=False).logits for part in row["input_ids"][0].split(LENGTHS)]

    assert torch.allclose(by_sample, of_mask, atol=1e-5)
    assert torch.allclose(by_sample, torch.cat(alone, dim=1), atol=1e-5)


def test_no_mask_is_made_for_a_packed_row(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = model()
    long_rows.attend_by_sample(ours, recipe())
    made: list[int] = []
    monkeypatch.setattr(long_rows, "sdpa_mask", lambda *given, **_: made.append(given[1]))

    ours(**packed())
    assert not made

    ours(input_ids=torch.ones(2, 4, dtype=torch.long))
    assert made == [4]


def test_gradients_are_those_of_sdpa_with_a_mask() -> None:
    gradients = []
    for by_sample in (False, True):
        ours = model().train()
        if by_sample:
            long_rows.attend_by_sample(ours, recipe())
        row = packed()
        ours(**row, labels=row["input_ids"], use_cache=False).loss.backward()
        gradients.append(torch.cat([one.grad.flatten() for one in ours.parameters()]))

    assert torch.allclose(*gradients, atol=1e-6)


def test_answers_of_padded_prompts_and_with_a_cache_are_those_of_sdpa() -> None:
    prompts = {
        "input_ids": torch.tensor([[0, 0, 7, 8], [4, 5, 6, 7]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]),
    }
    plain, ours = model(), model()
    long_rows.attend_by_sample(ours, recipe())

    for batch in (prompts, {name: rows[:1] for name, rows in prompts.items()}):
        answers = [one.generate(**batch, max_new_tokens=8, do_sample=False).tolist() for one in (plain, ours)]
        assert answers[0] == answers[1]


def test_models_with_a_shorter_window_and_of_unmeasured_types_keep_their_mask() -> None:
    windowed = model("mistral", sliding_window=8)

    assert not long_rows.attend_by_sample(windowed, recipe(max_length=16))
    assert compat.attention_of(windowed) == "sdpa"
    assert long_rows.attend_by_sample(windowed, recipe(max_length=8))
    assert not long_rows.attend_by_sample(model("gemma2"), recipe())


def test_the_name_of_this_attention_is_not_saved_with_the_model(tmp_path: Path) -> None:
    ours = model()
    long_rows.attend_by_sample(ours, recipe())

    ours.save_pretrained(tmp_path)

    assert compat.BY_SAMPLE not in (tmp_path / "config.json").read_text()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"
