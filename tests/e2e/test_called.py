"""GRPO with tools from the command line: ranks that take different numbers of turns learn what one rank learns."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import trl
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.e2e.runs import environment
from tests.e2e.test_generated import RANKS, lines, resumed, train
from tests.e2e.warm import warm
from tuner.models.load import pretrained_path
from tuner.recipes.loading import load

pytestmark = [pytest.mark.e2e, pytest.mark.long]
QWEN3 = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
CODE = '''
import os

def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    if a > 1:
        os._exit(3)
    return a + b

class Game:
    def reset(self, answer):
        self.calls = 0
        return " now"

    def show(self) -> str:
        """Shows the number."""
        self.calls += 1
        return str(self.calls)

    def get_reward(self):
        return self.calls / 4
'''
# A random model calls nothing: each turn of a completion is one of three texts, by its seed.
FORCED = """
import torch
from transformers import AutoTokenizer, TrainerCallback

from tuner.worker.objectives import completions

CALL = '<tool_call>\\n{"name": "NAME", "arguments": ARGUMENTS}\\n</tool_call><|im_end|>'
TEXTS = ["3<|im_end|>", "4<|im_end|>"]
TEXTS += [CALL.replace("NAME", "add").replace("ARGUMENTS", '{"a": %d, "b": 2}' % first) for first in (1, 2)]
TEXTS += [CALL.replace("NAME", "show").replace("ARGUMENTS", "{}")]


class Forced(completions.Sampled):
    def __init__(self, seeds, device):
        super().__init__(seeds, device)
        tokenizer = AutoTokenizer.from_pretrained("model")
        texts = [TEXTS[seed % len(TEXTS)] for seed in seeds]
        self.scripts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        self.at = 0

    def __call__(self, input_ids, scores):
        forced = torch.full_like(scores, -1e9)
        for row, script in zip(forced, self.scripts, strict=True):
            row[script[min(self.at, len(script) - 1)]] = 0.0
        self.at += 1
        return forced


completions.Sampled = Forced


class Nothing(TrainerCallback):
    pass
"""
RUN = (
    *("--model", "model", "--method", "grpo_full", "--data", "rows.jsonl", "--set", f"model.chat_template={QWEN3}"),
    *("--set", "objective.tools=['my_tools.py:add']", "--set", "objective.environment=my_tools.py:Game"),
    *("--set", "objective.rewards=['exact','environment']", "--set", "max_calls=3", "--set", "num_generations=4"),
    *("--set", "max_completion_length=400", "--max-length", "1024", "--batch-size", "8", "--lr", "1e-3"),
    *("--max-steps", "4", "--save-every", "2", "--val-split", "0", "--set", "callbacks=['forced:Nothing']"),
    *("--set", "num_samples=0", "--set", "log.interval=1"),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the runs `one`, of one rank; `zero2` and `zero3`, of two; and `again`: `zero3` resumed at step 2."""
    folder = tmp_path_factory.mktemp("called")
    (folder / "my_tools.py").write_text(CODE)
    (folder / "forced.py").write_text(FORCED)
    rows = [{"prompt": [{"role": "user", "content": f"1+{number}"}], "answer": "3"} for number in range(8)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    tokenizer = AutoTokenizer.from_pretrained(pretrained_path(load("tiny_full_sample_e1").config.model, weights=False))
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=2048, **shape, **tokens)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    train(folder, *RUN, "--work-dir", "one")
    train(folder, *RUN, "--work-dir", "zero2", "--nproc-per-node", "2", "--deepspeed", "zero2")
    train(folder, *RUN, "--work-dir", "zero3", *RANKS)
    resumed(folder, "zero3", last_step=4)
    return folder


@pytest.mark.parametrize("other", ["zero2", "zero3"])
def test_ranks_that_take_different_numbers_of_turns_learn_what_one_rank_learns(runs: Path, other: str) -> None:
    assert (runs / "one/completions.jsonl").read_bytes() == (runs / other / "completions.jsonl").read_bytes()
    first, second = ([line for line in lines(runs / name) if "loss" in line] for name in ("one", other))
    assert len(first) == 4 and any(line["grad_norm"] for line in first)
    for line, same in zip(first, second, strict=True):
        for key in ("loss", "grad_norm", "reward", "tools/call_frequency", "tools/failure_frequency"):
            assert line[key] == pytest.approx(same[key], abs=1e-5), key


def test_completions_are_listed_with_what_tools_and_environments_answered(runs: Path) -> None:
    listed = lines(runs / "zero3", "completions.jsonl")
    calls = [call for line in listed for call in line["calls"]]

    assert {call["tool"] for call in calls} == {"add", "show"} and len({len(line["calls"]) for line in listed}) > 2
    for call in calls:
        right = {1: "3", 2: "{'error': 'its process ended with exit code 3'}"}
        assert call["result"] in (
            ("1", "2", "3", None) if call["tool"] == "show" else (right[call["arguments"]["a"]], None)
        )
    shown = [sum(call["tool"] == "show" and call["result"] is not None for call in line["calls"]) for line in listed]
    assert [line["rewards"]["environment"] for line in listed] == [num / 4 for num in shown]
    failures = lines(runs / "zero3", "tool_failures.jsonl")
    assert {line["tool"] for line in failures} >= {"add"} and "exit code 3" in failures[0]["problem"]


def test_a_resumed_run_ends_with_the_same_bytes(runs: Path) -> None:
    for name in ("final/model.safetensors", "completions.jsonl"):
        assert (runs / "again" / name).read_bytes() == (runs / "zero3" / name).read_bytes()


def test_a_validation_calls_tools_and_an_evaluation_does_with_the_users_word(runs: Path) -> None:
    asked = ("eval", "zero2", "--data", "rows.jsonl", "--max-rows", "2", "--json")
    env = environment(PYTHONPATH=f"{runs}{os.pathsep}")

    refused = warm().run(asked, cwd=runs, env=env)
    assert refused.returncode == 2 and "my_tools.py:add" in refused.stderr
    ended = warm().run((*asked, "--allow-code"), cwd=runs, env=env)
    assert ended.returncode == 0, ended.stderr
    assert {"rewards/exact", "rewards/environment"} <= json.loads(ended.stdout)["metrics"].keys()
