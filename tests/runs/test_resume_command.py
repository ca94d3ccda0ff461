"""The command that resumes a run can be pasted; a flag that runs code stands only beside the code that it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launch.plans import written_run
from tests.runs.made_records import run_json
from tuner.files import write_text
from tuner.runs.directory import RunDirectory, resume_command
from tuner.runs.resume_advice import resume_advice


def test_a_command_can_be_pasted_whatever_the_folder_is_called() -> None:
    assert resume_command(Path("my run")) == "tuner train 'my run/recipe.py' --resume 'my run'"


def written(folder: Path, recipe: object) -> Path:
    (folder / "recipe.json").write_text(json.dumps({"schema": 1, "recipe": recipe}))
    return folder


def of_nodes(folder: Path, *flags: str) -> Path:
    write_text(RunDirectory(folder).run_json, run_json(num_nodes=2, node_flags=flags))
    return folder


OWN_REWARD = {"objective": {"rewards": ["math", {"type": "my_rewards.py:length"}]}}


@pytest.mark.parametrize(
    ("recipe", "code"),
    [
        ({"log": {"notify": "touch canary"}}, "log.notify = 'touch canary'"),
        ({"log": {"notify": ["sh", "-c", "true"]}}, "log.notify = ['sh', '-c', 'true']"),
        ({"checkpoint": {"repository": "me/mine"}}, "checkpoint.repository = 'me/mine'"),
        (OWN_REWARD, "objective.rewards = 'my_rewards.py:length'"),
    ],
)
def test_the_flag_stands_beside_all_that_it_allows(tmp_path: Path, recipe: object, code: str) -> None:
    advice = resume_advice(written(tmp_path, recipe))

    assert advice == f"{resume_command(tmp_path)} --allow-code (--allow-code allows {code})"


def test_trust_in_a_models_code_stands_beside_its_files(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    model = {"trust_remote_code": True, "path": str(tmp_path), "revision": None}

    advice = resume_advice(written(tmp_path, {"model": model}))

    assert advice.startswith(f"{resume_command(tmp_path)} --trust-remote-code (")
    assert f"the code in {tmp_path}: mine.py" in advice


@pytest.mark.parametrize("hidden", ["true" + " " * 10_000 + "; touch canary", ["x" * 400]])
def test_code_that_is_too_long_to_show_is_not_advised(tmp_path: Path, hidden: object) -> None:
    assert resume_advice(written(tmp_path, {"log": {"notify": hidden}})) == resume_command(tmp_path)


def test_a_run_needs_a_flag_only_where_its_recipe_names_code(tmp_path: Path) -> None:
    run = written_run(tmp_path / "run")

    assert resume_advice(run.path) == resume_command(run.path)


def test_a_run_of_two_nodes_is_resumed_on_each_of_them(tmp_path: Path) -> None:
    of_nodes(tmp_path, "--nnodes=1:2", "--master-addr=a; touch canary", "--master-port=29500", "--allow-code", "--lr=1")
    line = f"{resume_command(tmp_path)} --nnodes=1:2 '--master-addr=a; touch canary' --master-port=29500 --node-rank="

    assert resume_advice(tmp_path, 1) == f"{line}1"
    assert resume_advice(tmp_path).startswith(f"{line}0 (")


def test_a_run_of_a_hostfile_is_resumed_by_it(tmp_path: Path) -> None:
    run = of_nodes(tmp_path, "--hostfile=/my hosts", "--nnodes=1:2")

    assert resume_advice(run, 1) == f"{resume_command(tmp_path)} '--hostfile=/my hosts' --nnodes=1:2"


def test_that_ssh_must_be_given_again_is_said_and_its_command_is_not_shown(tmp_path: Path) -> None:
    advice = resume_advice(of_nodes(tmp_path, "--hostfile=/hosts", "--ssh=touch canary", "--max-restarts=2"), 0)

    assert advice.startswith(f"{resume_command(tmp_path)} --hostfile=/hosts --max-restarts=2 (")
    assert "--ssh" in advice and "canary" not in advice


def test_flags_of_nodes_that_are_too_long_to_show_are_told_of(tmp_path: Path) -> None:
    include = "@".join(f"host-{number}" for number in range(64))

    advice = resume_advice(of_nodes(tmp_path, "--hostfile=/hosts", f"--include={include}"))

    assert advice.startswith(f"{resume_command(tmp_path)} (")
    assert "node_flags" in advice and "host-1" not in advice


@pytest.mark.parametrize("text", ['{"recipe": {"log": null}}', '{"recipe": []}', "{", "\0"])
def test_a_recipe_that_is_damaged_hides_no_message_behind_its_own(tmp_path: Path, text: str) -> None:
    (tmp_path / "recipe.json").write_text(text)

    assert resume_advice(tmp_path) == f"tuner train {tmp_path}/recipe.py --resume {tmp_path}"
