"""The command that resumes a run is one that can be pasted, and has the flag that the run's recipe needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launch.plans import written_run
from tuner.runs.directory import resume_command


def test_a_command_can_be_pasted_whatever_the_folder_is_called() -> None:
    assert resume_command(Path("my run")) == "tuner train 'my run/recipe.py' --resume 'my run'"


OWN_REWARD = {"objective": {"rewards": ["math", {"type": "my_rewards.py:length"}]}}


@pytest.mark.parametrize(
    "recipe",
    [
        {"log": {"notify": "true"}},
        {"log": {"notify": ["sh", "-c", "true"]}},
        {"checkpoint": {"repository": "me/mine"}},
        OWN_REWARD,
    ],
)
def test_a_recipe_that_names_a_command_needs_the_flag(tmp_path: Path, recipe: dict[str, object]) -> None:
    (tmp_path / "recipe.json").write_text(json.dumps({"schema": 1, "recipe": recipe}))

    assert resume_command(tmp_path).endswith(f"--resume {tmp_path} --allow-code")


def test_a_run_needs_it_only_where_its_recipe_names_a_command(tmp_path: Path) -> None:
    run = written_run(tmp_path / "run")

    assert resume_command(run.path) == f"tuner train {run.recipe} --resume {run.path}"


@pytest.mark.parametrize("text", ['{"recipe": {"log": null}}', '{"recipe": []}', "{", "\0"])
def test_a_recipe_that_is_damaged_hides_no_message_behind_its_own(tmp_path: Path, text: str) -> None:
    (tmp_path / "recipe.json").write_text(text)

    assert resume_command(tmp_path) == f"tuner train {tmp_path}/recipe.py --resume {tmp_path}"
