"""Two real ranks on every objective and method: held-out pairs are told apart, and the result loads without tuner."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.runs import Finished, ok, train
from tests.tiny_model import tiny
from tuner import assets

pytestmark = pytest.mark.e2e

# From noise: many times the learning rate that a trained model bears.
RECIPE = """
_base_ = "tiny_{name}_sample_preferences_e1"
train_dataloader = dict(batch_size=4, dataset=dict(max_length=128))
val_dataloader = dict(batch_size=10, dataset=dict(max_length=128))
optim_wrapper = dict(optimizer=dict(lr={lr}), accumulative_counts=1, dtype="fp32")
param_scheduler = dict(type="constant", warmup_ratio=0.0)
train_cfg = dict(max_steps=10)
checkpoint = dict(interval=5)
log = dict(interval=1, num_samples=0)
"""
SIDES = ("chosen", "rejected")
RUNS = ["dpo_full", "kto_freeze", "dpo_lora", "cpo_rslora"]
STAGES = {"dpo_full": "zero3", "reward_lora": "zero3"}
ONE_RANK = ("reward_lora",)


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the run of an objective and method, trained once for all tests."""

    @cache
    def trained(name: str) -> Finished:
        folder = tmp_path_factory.mktemp(name)
        recipe = folder / "recipe.py"
        recipe.write_text(RECIPE.format(name=name, lr=3e-3 if name.endswith("_lora") else 1e-3))
        ranks = 1 if name in ONE_RANK else 2
        return ok(train(recipe, folder / "run", "--deepspeed", STAGES.get(name, "zero2"), ranks=ranks))

    return trained


def held_out() -> list[dict[str, str]]:
    file = Path(assets.asset("package:sample_preferences/validation.jsonl"))
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()][:40]


def turns(pair: dict[str, str], side: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": pair["prompt"]}, {"role": "assistant", "content": pair[side]}]


@torch.no_grad()
def log_likelihood(model: Any, tokenizer: Any, pair: dict[str, str], side: str) -> float:
    """Return the log-probability of an answer's text after its prompt."""
    whole = tokenizer.apply_chat_template(turns(pair, side), return_dict=True, return_tensors="pt")["input_ids"]
    asked = tokenizer.apply_chat_template(turns(pair, side)[:1], add_generation_prompt=True)["input_ids"]
    told = model(input_ids=whole).logits[0, :-1].log_softmax(-1).gather(1, whole[0, 1:, None])
    return float(told[len(asked) - 1 :].sum())


def told_apart(model: Any, base: Any, tokenizer: Any) -> float:
    """Return the share of held-out pairs whose chosen answer gained more likelihood than the rejected one."""
    gains = [
        [log_likelihood(model, tokenizer, pair, side) - log_likelihood(base, tokenizer, pair, side) for side in SIDES]
        for pair in held_out()[:20]
    ]
    return sum(chosen > rejected for chosen, rejected in gains) / len(gains)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.long  # tests/reference/test_objectives.py
def test_the_margin_between_held_out_answers_grows(run_of: Any, name: str) -> None:
    run = run_of(name)

    before, first, *_, last, held = run.metrics
    assert last["loss"] < first["loss"]
    assert held["eval_rewards/margins"] > first["rewards/margins"] + 0.03
    assert held["eval_loss"] < first["loss"] * 0.95
    assert held.get("eval_rewards/accuracies", 1.0) > 0.75
    assert all(line["tokens_per_second"] > 0 for line in run.metrics if "loss" in line)
    verdict = run.json("status.json")["verdict"]
    assert (verdict["before"], verdict["after"]) == (before["eval_loss"], held["eval_loss"])
    assert verdict["outcome"] in ("learned", "still falling") and verdict["line"] in run.text


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.long  # tests/worker/test_every_objective.py
def test_the_result_prefers_what_held_out_judges_chose_in_plain_transformers(run_of: Any, name: str) -> None:
    final = run_of(name).path / "final"

    tokenizer = AutoTokenizer.from_pretrained(final)
    if name.endswith("lora"):  # rslora too
        model = AutoPeftModelForCausalLM.from_pretrained(final)
        base = AutoModelForCausalLM.from_pretrained(model.peft_config["default"].base_model_name_or_path)
        assert not list(final.rglob("ref")), "TRL's copy of the adapter is not part of the result"
    else:
        model = AutoModelForCausalLM.from_pretrained(final)
        base = AutoModelForCausalLM.from_pretrained(tiny())

    assert told_apart(model.eval(), base.eval(), tokenizer) > 0.75


@pytest.mark.long  # tests/results/test_evaluate.py
def test_a_reward_model_scores_held_out_answers_rightly_in_plain_transformers(run_of: Any) -> None:
    run = run_of("reward_lora")

    before, held = run.metrics[0], run.metrics[-1]  # both are validations, the first of them before the first step
    assert held["eval_accuracy"] > 0.75
    assert held["eval_margin"] > before["eval_margin"] + 0.2
    final = run.path / "final"
    model = AutoPeftModelForSequenceClassification.from_pretrained(final, num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(final)
    right = [score(model, tokenizer, pair, "chosen") > score(model, tokenizer, pair, "rejected") for pair in held_out()]
    assert sum(right) / len(right) == pytest.approx(held["eval_accuracy"], abs=0.1)


@torch.no_grad()
def score(model: Any, tokenizer: Any, pair: dict[str, str], side: str) -> float:
    text = tokenizer.apply_chat_template(turns(pair, side), return_dict=True, return_tensors="pt")
    return float(model.eval()(**text).logits)


@pytest.mark.long
def test_freezing_trains_the_last_layers_alone_and_saves_a_whole_model(run_of: Any) -> None:
    run = run_of("kto_freeze")

    before, after = load_file(tiny() / "model.safetensors"), load_file(run.path / "final" / "model.safetensors")
    assert before.keys() == after.keys()
    moved = {name.split(".")[2] for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"1", "2"}, "of three layers, with no embedding and no norm among what moved"
    AutoModelForCausalLM.from_pretrained(run.path / "final")


@pytest.mark.long
def test_rank_stabilized_lora_says_how_it_is_scaled(run_of: Any) -> None:
    run = run_of("cpo_rslora")

    adapter = AutoPeftModelForCausalLM.from_pretrained(run.path / "final")
    assert adapter.peft_config["default"].use_rslora
    scales = [module.scaling["default"] for module in adapter.modules() if isinstance(module, LoraLayer)]
    assert set(scales) == {32 / 16**0.5}


@pytest.mark.long  # as tests/faults/test_resume.py holds it of other objectives
def test_a_preference_run_resumes_with_the_losses_of_one_that_never_stopped(run_of: Any, tmp_path: Path) -> None:
    whole = run_of("kto_freeze")
    halves = tmp_path / "halves"
    shutil.copytree(whole.path, halves)
    shutil.rmtree(halves / "checkpoints" / "checkpoint-10")
    (halves / "metrics.jsonl").unlink()

    resumed = ok(train(halves / "recipe.py", halves, "--deepspeed", "zero2", "--resume", "auto"))

    assert [loss.hex() for loss in resumed.losses] == [loss.hex() for loss in whole.losses[5:]]
    assert resumed.metrics[-1]["eval_rewards/margins"] == whole.metrics[-1]["eval_rewards/margins"]
