"""Tools that cannot be called with this model or by these ranks are refused before the start."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import trl

from tests.launch.plans import made
from tests.machine.gpus import A100, CPU, machine
from tests.rewards.conftest import forked as forked
from tuner.errors import ModelError, RecipeError, ToolError
from tuner.launch.checks import inputs
from tuner.launch.resolved_run import ResolvedRun
from tuner.machine.hardware import Hardware
from tuner.recipes.loading import load
from tuner.recipes.recipe import Overrides
from tuner.recipes.schema.long_context import tokens_per_sample

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
GAME = '''
class Game:
    def reset(self, answer): ...
    def look(self) -> str:
        """Looks."""
        return ""
    def get_reward(self):
        return 1.0
'''


def run_of(folder: Path, *sets: str, hardware: Hardware = CPU) -> ResolvedRun:
    (folder / "game.py").write_text(GAME)
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": [{"role": "user", "content": "1 + 1?"}], "answer": "2"}) + "\n")
    sets = (f"train_dataloader.dataset.path={rows}", f"objective.environment={folder}/game.py:Game", *sets)
    return made(*sets, recipe="tiny_grpo_full_custom_e1", hardware=hardware)


def test_a_template_that_trl_does_not_know_is_refused_with_those_that_work(tmp_path: Path) -> None:
    for sets in ((), ("model.chat_template=chatml",)):
        with pytest.raises(ModelError, match=r"llama3_1, .*qwen2_5, qwen3"):
            list(inputs.tool_template(run_of(tmp_path, *sets)))
    known = f"model.chat_template={TEMPLATES / 'qwen3.jinja'}"
    assert list(inputs.tool_template(run_of(tmp_path, known))) == []


def test_vllm_on_several_ranks_calls_no_tools(tmp_path: Path) -> None:
    vllm = "objective.generation.engine=vllm"
    [error] = inputs.tools(run_of(tmp_path, vllm, hardware=machine(A100, A100)))

    assert isinstance(error, RecipeError) and error.where == "objective.generation.engine"
    assert list(inputs.tools(run_of(tmp_path, vllm, hardware=machine(A100)))) == []
    assert list(inputs.tools(run_of(tmp_path, hardware=machine(A100, A100)))) == []


def test_a_score_that_no_reward_calls_is_told_and_an_environment_is_begun_with_a_row(tmp_path: Path) -> None:
    [warning] = inputs.tool_functions(run_of(tmp_path))
    assert "get_reward" in str(warning)
    assert list(inputs.tool_functions(run_of(tmp_path, "objective.rewards=['environment']"))) == []
    run = run_of(tmp_path)
    (tmp_path / "game.py").write_text(GAME.replace("answer", "question"))
    with pytest.raises(ToolError, match="first row"):
        list(inputs.tool_functions(run))


def test_the_plan_counts_what_an_environment_adds_to_a_prompt(tmp_path: Path) -> None:
    keys = ("objective.environment=game.py:Game", "objective.max_result_tokens=100")
    plain, game = (
        load("tiny_grpo_full_custom_e1", Overrides(pairs=tuple(("--set", key) for key in sets))).config
        for sets in ((), keys)
    )

    assert tokens_per_sample(game) == tokens_per_sample(plain) + 100


def test_tools_belong_to_grpo_and_their_limits_to_tools() -> None:
    for name, key in (("rloo", "objective.tools=['a.py:b']"), ("grpo", "objective.max_calls=3")):
        with pytest.raises(RecipeError, match=re.escape(key.partition("=")[0])):
            load(f"tiny_{name}_full_custom_e1", Overrides(pairs=(("--set", key),)))
