"""The rows on which rewards are tried: prompts with their other columns, and conversations without their answer."""

from __future__ import annotations

from typing import Any

from tests.each import each
from tuner.launch.checks.reward_trial import trial_row
from tuner.rewards import TrialRow

QUESTION = [{"role": "user", "content": "1 + 1?"}]
CHAT = [*QUESTION, {"role": "assistant", "content": "2"}]


PAIR = {"prompt": "1 + 1?", "completion": "2"}
NAMES = {"prompt": "question", "answer": "right"}


@each(
    (
        ({"prompt": "1 + 1 =", "answer": "2", "level": 1}, None, TrialRow("1 + 1 =", {"answer": "2", "level": 1})),
        ({"prompt": QUESTION, "answer": "2"}, None, TrialRow(QUESTION, {"answer": "2"})),
        ({"question": "1 + 1 =", "right": "2"}, NAMES, TrialRow("1 + 1 =", {"answer": "2"})),
        ({"messages": CHAT, "level": 1}, None, TrialRow(QUESTION, {"answer": "2", "level": 1})),
        (PAIR, None, TrialRow(QUESTION, {**PAIR, "answer": "2"})),
    )
)
def test_a_row_is_its_prompt_and_its_other_columns(row: dict[str, Any], columns: Any, expected: TrialRow) -> None:
    assert trial_row(row, None, columns, "sft") == expected
