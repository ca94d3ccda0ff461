"""Columns that an objective does not learn from are named, with the method that does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.refused import refused
from tuner.data.pipeline import Pipeline
from tuner.errors import DataError
from tuner.recipes.schema import Dataset

TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
CHAT = {"messages": TURNS}
QUESTION = {"conversations": [{"from": "human", "value": "q"}]}
TEXT = {"text": "Once."}
ANSWERED = {"prompt": "q", "completion": "a"}


def pipeline(folder: Path, row: dict[str, Any], objective: str = "sft", **settings: Any) -> Pipeline:
    path = folder / "rows.jsonl"
    path.write_text(f"{json.dumps(row)}\n" * 3)
    return Pipeline(Dataset(path=str(path), max_length=16, packing=False, **settings), objective)


@pytest.mark.parametrize(
    ("row", "method"),
    [
        (CHAT | {"chosen": TURNS, "rejected": TURNS}, "--method dpo_lora"),
        (QUESTION | {"chosen": {"from": "gpt", "value": "a"}, "rejected": {"from": "gpt", "value": "b"}}, "dpo_lora"),
        ({"instruction": "q", "output": "a", "rejected": "b"}, "--method dpo_lora"),
        (CHAT | {"rejected_response": "b"}, "--method dpo_lora"),
        (ANSWERED | {"label": False}, "--method kto_lora"),
        (CHAT | {"label": "true"}, "--method kto_lora"),
        (CHAT | {"label": 0}, "--method kto_lora"),
        (CHAT | {"kto_tag": True}, "--method kto_lora"),
        (ANSWERED | {"reward": 0.5}, "--method kto_lora"),
        ({"prompt": "q", "response": "a", "score": "7"}, "--method kto_lora"),
    ],
)
def test_rows_of_another_method_are_named_where_they_train_as_conversations(
    tmp_path: Path, row: dict[str, Any], method: str
) -> None:
    (hint,) = pipeline(tmp_path, row).hints

    assert method in hint


@pytest.mark.parametrize(
    "row", [CHAT, ANSWERED, CHAT | {"label": "a category"}, CHAT | {"score": None}, {"problem": "q", "solution": "a"}]
)
def test_rows_of_conversations_have_no_hint(tmp_path: Path, row: dict[str, Any]) -> None:
    assert pipeline(tmp_path, row).hints == ()


def test_conversations_under_pretrain_are_named_and_texts_are_not(tmp_path: Path) -> None:
    (hint,) = pipeline(tmp_path, CHAT, "pretrain").hints

    assert "--method lora" in hint
    assert pipeline(tmp_path, TEXT, "pretrain").hints == ()


def test_a_format_that_the_user_named_has_no_hint(tmp_path: Path) -> None:
    assert pipeline(tmp_path, CHAT | {"label": True}, format="messages").hints == ()


@pytest.mark.parametrize(
    ("row", "objective", "method"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "sft", "--method dpo_lora"),
        ({"prompt": "q", "solution": "4"}, "sft", "--method grpo_lora"),
        ({"prompt": [TURNS[0]], "reward_model": {"ground_truth": "4"}}, "sft", "--method grpo_lora"),
        (TEXT, "sft", "--method pretrain_lora"),
        (CHAT, "dpo", "--method lora"),
    ],
)
def test_rows_that_the_objective_cannot_learn_from_are_refused_with_the_method(
    tmp_path: Path, row: dict[str, Any], objective: str, method: str
) -> None:
    rows = pipeline(tmp_path, row, objective)
    tally = rows.tally()

    with refused(DataError, "rows.jsonl:1", method):
        list(rows.samples(tally, tally.refuse))


@pytest.mark.parametrize("label", ["good", "", None, 2, "yes"])
def test_another_label_is_named(tmp_path: Path, label: Any) -> None:
    rows = pipeline(tmp_path, ANSWERED | {"label": label}, "kto")
    tally = rows.tally()

    with refused(DataError, "rows.jsonl:1", repr(label)):
        list(rows.samples(tally, tally.refuse))
