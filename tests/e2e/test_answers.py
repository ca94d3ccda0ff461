"""Two real ranks answer validation prompts while they train: the answers are the model's, and training is the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.runs import ok, train
from tests.e2e.test_heads import RECIPE, llama
from tuner.data.text_encoder import TextEncoder
from tuner.recipes.loading import load
from tuner.worker.generation import Settings, generate, stop_where_answers_end
from tuner.worker.samples import prompts, same_text, shown

pytestmark = pytest.mark.e2e
GENERATE = ("--set", "log.generate=5", "--set", "log.max_new_tokens=12")


@pytest.mark.long
def test_at_zero3_with_an_untied_head_answers_are_those_of_the_saved_model(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE.format(method="full", path=str(llama(tmp_path / "model", is_tied=False)), val_batch=2))
    more = ("--deepspeed", "zero3", "--set", "train_cfg.loss=chunked")

    run = ok(train(recipe, tmp_path / "answers", *more, *GENERATE))
    without = ok(train(recipe, tmp_path / "without", *more))

    assert run.losses == without.losses
    lines = [json.loads(line) for line in (run.path / "answers.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0] * 5 + [2] * 5 + [4] * 5
    tokenizer = AutoTokenizer.from_pretrained(run.path / "final")
    model = AutoModelForCausalLM.from_pretrained(run.path / "final").eval()
    stop_where_answers_end(model.generation_config, TextEncoder(tokenizer))
    loader = load(str(run.path / "recipe.py")).config.val_dataloader
    assert loader
    for line, chat in zip(lines[-5:], prompts(loader.dataset, 5, "sft"), strict=True):
        *prompt, right = chat.messages
        answer = generate(
            model, TextEncoder(tokenizer), TextEncoder(tokenizer).prompt(prompt), Settings(12, temperature=0)
        ).text.strip()
        assert (line["prompt"], line["right"], line["answer"]) == (shown(prompt), right["content"], answer)
        assert line["is_right"] == same_text(answer, right["content"])
    measured = [line for line in run.metrics if "eval_loss" in line]
    assert all({"eval_exact_match", "eval_rouge_l", "eval_bleu"} <= line.keys() for line in measured)


@pytest.mark.long
def test_a_run_that_goes_on_has_the_answers_of_each_step_once(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE.format(method="lora", path=str(llama(tmp_path / "model", is_tied=True)), val_batch=2))
    ok(train(recipe, tmp_path / "run", *GENERATE, ranks=1))
    for checkpoint in (tmp_path / "run" / "checkpoints").glob("checkpoint-4"):
        (checkpoint / "manifest.json").unlink()

    run = ok(train(recipe, tmp_path / "run", *GENERATE, "--resume", "auto", "--set", "max_steps=6", ranks=1))

    steps = [json.loads(line)["step"] for line in (run.path / "answers.jsonl").read_text().splitlines()]
    assert steps == [0] * 5 + [2] * 5 + [4] * 5 + [6] * 5
