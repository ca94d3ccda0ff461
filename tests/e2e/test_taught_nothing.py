"""A run that changed no weight is no success, and the shortest one changes some."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import quick, train

pytestmark = pytest.mark.e2e


def test_a_run_whose_weights_did_not_move_fails_and_leaves_no_result(tmp_path: Path) -> None:
    run = train(quick(tmp_path, "full"), tmp_path / "run", "--set", "lr=1e-30", ranks=1)

    assert run.code == 1
    assert "no trained weight changed in 4 steps" in run.text
    assert "Raise the learning rate, which is 1e-30" in run.text
    assert not (run.path / "final").exists()
    assert (run.path / "checkpoints" / "checkpoint-4").is_dir()


def test_rewards_that_are_equal_for_all_completions_are_named_as_the_reason(tmp_path: Path) -> None:
    asked = ("--reward", "math", "--max-steps", "2", "--set", "max_completion_length=4", "--val-split", "0")
    rows = tmp_path / "sums.jsonl"
    rows.write_text("".join(f'{{"prompt": "{at} + 1 =", "answer": "{at + 1}"}}\n' for at in range(16)))

    run = train("tiny_grpo_lora_custom_e1", tmp_path / "run", "--data", rows, *asked, ranks=1)

    assert run.code == 1
    assert "no trained weight changed in 2 steps, because every gradient was 0" in run.text
    assert "All completions of a prompt got the same reward" in run.text
