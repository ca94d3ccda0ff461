"""Experts in 4 bits on real ranks: every ZeRO level learns the same, and a run resumes, answers and merges."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

from tests.e2e.runs import environment, ok, quick, train
from tests.e2e.warm import warm
from tuner.lab import stand_ins
from tuner.recipes.loading import load

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def write_model(folder: Path) -> Path:
    """Write a small random Qwen3-MoE, whose file has a tensor for each expert, with the tiny model's tokenizer."""
    tokenizer, _ = stand_ins.tokenizer_of(load("tiny_full_sample_e1").config.model)
    shape = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 3}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    shape |= {"num_experts": 8, "num_experts_per_tok": 2, "vocab_size": -(-len(tokenizer) // 64) * 64}
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    set_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **shape, **ids)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_ranks_at_every_level_learn_as_one_and_a_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    recipe, model = quick(tmp_path, "qlora"), write_model(tmp_path / "model")
    of_model = ("--model", model)

    alone = ok(train(recipe, tmp_path / "one", *of_model, "--set", "accumulative_counts=4", ranks=1))
    levels = ("zero2", "zero3", "zero3_offload")
    runs = {level: ok(train(recipe, tmp_path / level, *of_model, "--deepspeed", level)) for level in levels}

    assert alone.losses[-1] < alone.losses[0] - 0.2, "it learns"
    for run in runs.values():
        assert run.losses == pytest.approx(alone.losses, abs=2e-5)
    adapter = load_file(runs["zero3"].path / "final/adapter_model.safetensors")
    assert sum("experts" in name for name in adapter) == 3 * 2 * 2
    states = runs["zero3"].path / "checkpoints/checkpoint-4/global_step4"
    assert max(file.stat().st_size for file in states.glob("*model_states.pt")) < 100_000, "adapters alone are saved"

    half = runs["zero3"].path / "checkpoints/checkpoint-2"
    again = ok(train(recipe, tmp_path / "again", *of_model, "--deepspeed", "zero3", "--resume", half))
    assert again.losses == runs["zero3"].losses[2:]
    resumed = load_file(again.path / "final/adapter_model.safetensors")
    assert all(torch.equal(resumed[name], weight) for name, weight in adapter.items())
    on_one = ok(train(recipe, tmp_path / "on one", *of_model, "--deepspeed", "zero3", "--resume", half, ranks=1))
    assert on_one.losses == pytest.approx(again.losses, abs=2e-5)

    _merges_and_is_measured(again.path, model, tmp_path / "merged")


def _merges_and_is_measured(run: Path, model: Path, merged: Path) -> None:
    done = warm(has_bitsandbytes=True).run(["export", run, merged, "--merge"], env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    ids = torch.arange(5, 45)[None]
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), run / "final")
    with torch.no_grad():
        expected = adapted.eval()(ids).logits
        found = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval()(ids).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)

    rows = run.parent / "rows.jsonl"
    row = {"messages": [{"role": "user", "content": "So?"}, {"role": "assistant", "content": "Yes, so it is."}]}
    rows.write_text(json.dumps(row))
    words = ["eval", run, "--data", rows, "--json"]
    measured = [warm(has_bitsandbytes=True).run([*words, *more], env=environment()) for more in ([], ["--bits", "16"])]
    assert all(finished.returncode == 0 for finished in measured), [
        finished.stdout + finished.stderr for finished in measured
    ]
    packed, whole = (json.loads(finished.stdout)["metrics"]["loss"] for finished in measured)
    assert packed == pytest.approx(whole, rel=0.02) and packed != whole
