"""A reward is a text or a block; a wrong one is refused with the nearest name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from tests.each import each
from tests.recipes.loaded import loaded
from tests.refused import refused
from tuner.errors import RecipeError
from tuner.recipes.schema.rewards import BUILT_IN, FormatReward, MathReward, OwnReward, Rewards, file_of

BLOCKS = TypeAdapter(Rewards)


def _read(rewards: Any) -> Any:
    return BLOCKS.validate_python(rewards)


def test_a_text_is_the_block_of_its_type() -> None:
    assert _read("math") == _read(["math"]) == _read([{"type": "math"}]) == (MathReward(type="math"),)
    first, second = _read([{"type": "format", "pattern": "a.*", "weight": 2}, "my_rewards.py:length"])
    assert isinstance(first, FormatReward) and first.weight == 2.0
    assert isinstance(second, OwnReward) and (second.name, file_of(second.type)) == ("length", "my_rewards.py")


def test_a_run_that_trained_a_reward_model_means_its_result(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    base = {"model_type": "llama", "vocab_size": 256, "max_position_embeddings": 512, **sizes}
    for folder, name, facts in (
        ("base", "config.json", base),
        ("run/final", "adapter_config.json", {"peft_type": "LORA", "base_model_name_or_path": str(tmp_path / "base")}),
    ):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / name).write_text(json.dumps(facts))
    reward = f"objective.rewards=[dict(type='model', path={str(tmp_path / 'run')!r})]"

    (block,) = loaded("tiny_grpo_lora_custom_e1", reward).config.objective.rewards

    assert block.path == str(tmp_path / "run" / "final")
    assert block.architecture["hidden_size"] == 64, "the plan counts its base"


def test_a_written_reward_is_read_as_the_same() -> None:
    rewards = _read(["math", {"type": "json", "json_schema": {"type": "object"}}, {"type": "a.b:c", "timeout": 3}])
    written = BLOCKS.dump_python(rewards, mode="json")
    assert written[2] == {"type": "a.b:c", "timeout": 3}
    assert _read(written) == rewards


@each(
    (
        ("mat", "Did you mean 'math'?"),
        ([{"type": "math", "colum": "x"}], "Did you mean 'column'?"),
        ([{"type": "format"}], "needs pattern"),
        ([{"type": "format", "pattern": "("}], "not a regular expression"),
        ([{"type": "math", "weight": 0}], "leave the reward out"),
        ([{"type": "math", "weight": float("nan")}], "finite"),
        ([{"type": "math", "timeout": 0}], "greater than 0"),
        ([{"weight": 1.0}], "needs a type"),
        ([3], "is not a reward"),
        ([], "name at least one"),
        ("my_rewards.py:", "does not name a function"),
    )
)
def test_a_wrong_reward_is_refused(rewards: object, message: str) -> None:
    with pytest.raises(ValidationError) as raised:
        _read(rewards)
    assert message in str(raised.value)
    assert raised.value.error_count() == 1


def test_every_built_in_reward_has_a_block() -> None:
    assert set(BUILT_IN) == {"math", "exact", "contains", "format", "json", "length", "model", "environment"}


def test_a_reward_of_an_objective_without_rewards_is_refused() -> None:
    with refused(RecipeError, "--reward math"):
        loaded("tiny_full_sample_e3", rewards=("math",))
