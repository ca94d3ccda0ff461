"""A pretrained model answers, learns from real text, and goes through DPO, merge, GGUF, a server and an upload."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.runs import Finished, environment, ok, train
from tests.e2e.warm import warm
from tests.real import files, llama_cpp
from tests.real.model import Unavailable
from tests.results.hub import NAME, Hub, serving
from tests.results.test_serve import client_of, served
from tuner.cli import tuner

pytestmark = [pytest.mark.e2e, pytest.mark.long]
QUESTIONS = ("What is the capital of France?", "Write the numbers from one to five.", "Name two colours of a rainbow.")
BRIEF = ("--set", "train_dataloader.dataset.max_length=128", "--set", "num_samples=0", "--set", "global_batch_size=2")


def command(*words: object, input: str = "", **env: str) -> str:
    done = warm().run(words, env=environment(**env), input=input)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def sft(real: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Train the pretrained model on the documentation of Python."""
    path, (rows, held_out) = tmp_path_factory.mktemp("real") / "sft", files.paths(real, "docs-135")
    data = ("--data", rows, "--val", held_out, *BRIEF, "--set", "val_dataloader.dataset.max_rows=8")
    return ok(train(f"--model={real / 'smollm2'}", path, *data, "--set", "max_steps=10", ranks=1))


def _losses(run: Finished) -> list[float]:
    return [line["eval_loss"] for line in run.metrics if "eval_loss" in line]


def test_a_pretrained_model_answers_a_question(real: Path) -> None:
    asked = ("chat", real / "smollm2", "--temperature", 0, "--max-new-tokens", 20)

    assert "Paris" in command(*asked, input="What is the capital of France?")


def test_it_learns_from_the_documentation_of_python(sft: Finished) -> None:
    losses = _losses(sft)

    assert losses[-1] < losses[0] - 0.3


def test_a_real_model_goes_from_sft_to_llama_cpp_a_server_and_the_hub(
    real: Path, sft: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openai")
    try:
        converter, runtime = llama_cpp.converter(real), llama_cpp.runtime(real)
    except Unavailable as reason:
        pytest.skip(f"skipped: {reason}")
    _, held_out = files.paths(real, "docs-135")
    pairs, _ = files.paths(real, "pairs")
    dpo, merged = tmp_path / "dpo", tmp_path / "merged"

    name, more = "smollm2_135m_instruct_dpo_lora_custom_e1", ("--set", "max_steps=2", "--set", "beta=0.5")
    ok(train(name, dpo, "--model", sft.path, "--data", pairs, *BRIEF, *more, ranks=1))

    command("export", dpo, merged, "--merge")
    judged = json.loads(command("eval", merged, "--data", held_out, "--max-rows", 8, "--json"))
    assert judged["metrics"]["loss"] < _losses(sft)[0] - 0.2, "DPO began with what SFT had learned"

    command("export", merged, tmp_path / "mine", "--as", "gguf", "--dtype", "fp32", PYTHONPATH=str(converter))
    tokenizer = AutoTokenizer.from_pretrained(merged)
    model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval()
    answers = []
    for question in QUESTIONS:
        turns = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        found = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :].tolist()
        expected = found[: found.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in found else found
        assert llama_cpp.greedy(runtime, tmp_path / "mine" / "mine.gguf", ids, 24) == expected
        answers.append(tokenizer.decode(expected))

    (tmp_path / "scratch").mkdir()
    with served(tmp_path / "scratch", merged, "--engine", "transformers") as (_, address):
        asked = [{"role": "user", "content": QUESTIONS[0]}]
        body = {"model": "merged", "messages": asked, "max_tokens": 24, "temperature": 0}
        with client_of(address) as client:
            assert client.chat.completions.create(**body).choices[0].message.content == answers[0]

    with serving(Hub(), monkeypatch) as hub:
        pushed = CliRunner().invoke(tuner, ["export", str(merged), "--push", NAME])
    assert pushed.exit_code == 0, pushed.output
    assert hub.files and {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= hub.files.keys()
