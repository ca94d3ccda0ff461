"""The rows on which rewards are tried: prompts with their other columns, and conversations without their answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tuner.launch.checks.inputs import trial_rows
from tuner.recipes.schema import Dataset
from tuner.rewards.reward_function import TrialRow

QUESTION = [{"role": "user", "content": "1 + 1?"}]
CHAT = [*QUESTION, {"role": "assistant", "content": "2"}]
PAIR = {"prompt": "1 + 1?", "completion": "2"}
NAMES = {"prompt": "question", "answer": "right"}


@pytest.mark.parametrize(
    ("row", "columns", "prompt", "others"),
    (
        ({"prompt": "1 + 1 =", "answer": "2", "level": 1}, None, "1 + 1 =", {"answer": "2", "level": 1}),
        ({"prompt": QUESTION, "answer": "2"}, None, QUESTION, {"answer": "2"}),
        ({"question": "1 + 1 =", "right": "2"}, NAMES, "1 + 1 =", {"answer": "2"}),
        ({"messages": CHAT, "level": 1}, None, QUESTION, {"answer": "2", "level": 1}),
        (PAIR, None, QUESTION, {"completion": "2", "answer": "2"}),
    ),
)
def test_a_reward_is_tried_on_a_rows_prompt_and_its_other_columns(
    row: dict[str, Any], columns: Any, prompt: Any, others: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    dataset = Dataset(path=str(file), columns=columns, max_length=16, packing=False)
    assert trial_rows(dataset, "grpo") == [TrialRow(prompt, others)]
