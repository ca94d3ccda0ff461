"""GRPO from the command line: one rank and two sample alike, a resumed run is the same run, and the reward rises."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import tuner
from tests.e2e.runs import environment, is_quantized
from tests.e2e.warm import warm
from tuner.errors import RewardError, UsageError

REWARD = """
def vowels(completions, **columns):
    texts = [one[0]["content"] for one in completions]
    return [sum(letter in "aeiou" for letter in text) / max(len(text), 1) for text in texts]
"""
RUN = (
    *("tiny_grpo_full_sample_e1", "--reward", "rewards.py:vowels", "--lr", "1e-3", "--set", "max_completion_length=12"),
    *("--set", "global_batch_size=16", "--save-every", "2", "--set", "num_iterations=2"),
    *("--set", "val_dataloader=None"),
)


RANKS = ("--nproc-per-node", "2", "--deepspeed", "zero3")


def train(folder: Path, *arguments: str) -> None:
    """Train in a folder, whose modules are the user's own."""
    forked = warm(has_bitsandbytes=is_quantized(arguments, folder))
    ended = forked.run(["train", *arguments], cwd=folder, env=environment(PYTHONPATH=str(folder)))
    assert ended.returncode == 0, ended.stderr


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def resumed(folder: Path, name: str, *, last_step: int) -> None:
    """Make `again`: a run on two ranks at ZeRO-3 that goes on from the checkpoint before its last one."""
    shutil.copytree(folder / name, folder / "again")
    for part in ("final", f"checkpoints/checkpoint-{last_step}"):
        shutil.rmtree(folder / "again" / part)
    train(folder, "again/recipe.py", "--resume", "again", "--allow-code", *RANKS)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the runs `one`, of one rank; `two`, of two at ZeRO-3; and `again`, which is `two` resumed from step 4.

    All take two steps on the same completions.
    """
    folder = tmp_path_factory.mktemp("runs")
    (folder / "rewards.py").write_text(REWARD)
    train(folder, *RUN, "--max-steps", "5", "--work-dir", "one")
    train(folder, *RUN, "--max-steps", "5", "--work-dir", "two", *RANKS)
    resumed(folder, "two", last_step=5)
    shared = (*RUN, "--max-steps", "2", "--set", "num_iterations=1", "--set", "generation_batch_size=32")
    train(folder, *shared, "--work-dir", "shared-one")
    train(folder, *shared, "--work-dir", "shared-two", *RANKS)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("names", [("one", "two"), ("shared-one", "shared-two")])
def test_one_rank_and_two_sample_the_same_completions(runs: Path, names: tuple[str, str]) -> None:
    first, second = (lines(runs / name, "completions.jsonl") for name in names)

    assert {line["completion"] for line in first} & {line["completion"] for line in second}
    if names[0] == "one":  # what is generated at once has another order on two ranks, and eight of it are listed
        assert [line["completion"] for line in first] == [line["completion"] for line in second]
    assert len({line["completion"] for line in first}) > len(first) / 2, "they are sampled"
    for line, other in zip(lines(runs / names[0]), lines(runs / names[1]), strict=True):
        if "loss" in line:
            assert (line["loss"], line["grad_norm"]) == pytest.approx((other["loss"], other["grad_norm"]), abs=1e-5)


@pytest.mark.long
def test_a_resumed_run_ends_with_the_same_bytes(runs: Path) -> None:
    for name in ("final/model.safetensors", "completions.jsonl"):
        assert (runs / "again" / name).read_bytes() == (runs / "two" / name).read_bytes()


@pytest.mark.long
def test_completions_are_generated_anew_after_all_steps_on_them(runs: Path) -> None:
    assert sorted({line["step"] for line in lines(runs / "two", "completions.jsonl")}) == [1, 3, 5]
    assert [line["step"] for line in lines(runs / "two") if "reward" in line] == [1, 3, 5]
    assert [line["step"] for line in lines(runs / "shared-one") if "reward" in line] == [1]


@pytest.mark.long
def test_a_step_is_logged_with_its_rewards(runs: Path) -> None:
    step = next(line for line in lines(runs / "one") if "loss" in line)

    assert {"reward", "reward_std", "entropy", "completion_length", "frac_reward_zero_std"} <= step.keys()


@pytest.mark.long
def test_the_reward_rises(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(REWARD)

    faster = ("--lr", "6e-3", "--set", "max_completion_length=8", "--set", "global_batch_size=64", "--val-split", "0")
    train(tmp_path, *RUN, *faster, "--set", "num_iterations=1", "--max-steps", "20", "--work-dir", "run")

    rewards = [line["reward"] for line in lines(tmp_path / "run") if "reward" in line]
    at_first = sum(rewards[:5]) / 5
    assert sum(rewards[-5:]) / 5 > at_first + 0.2
    rows = "package:sample/validation.jsonl"
    with pytest.raises(UsageError, match=r"the rewards of the run call code: .*rewards\.py:vowels"):
        tuner.evaluate(tmp_path / "run", data=rows)
    metrics = tuner.evaluate(tmp_path / "run", data=rows, max_rows=16, batch_size=4, allow_code=True).metrics
    assert metrics["reward"] == metrics["rewards/vowels"] > at_first + 0.2
    assert 0 < metrics["completion_length"] <= 8
    (tmp_path / "rewards.py").write_text("def vowels(completions, **columns):\n    raise ValueError('none')\n")
    with pytest.raises(RewardError, match="the reward 'vowels' failed, or returned None, for every completion"):
        tuner.evaluate(tmp_path / "run", data=rows, max_rows=4, batch_size=4, allow_code=True)
