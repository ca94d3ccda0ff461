"""A split that leaves no rows, and early stopping that no validation can cause, are told before the start."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from tests.launch.plans import made
from tuner.errors import DataError, Text
from tuner.launch import preflight
from tuner.launch.checks import validation


def told(*sets: str) -> list[str]:
    """Return what is found of a run of 100 steps that holds rows out."""
    values = ("train_dataloader.dataset.val_split=0.25", "train_cfg.max_steps=100", *sets)
    return [Text(str(finding)).in_python for finding in validation.early_stopping(made(*values))]


@pytest.mark.parametrize(
    ("interval", "patience", "validations"),
    [(40, 3, 3), (500, 1, 1), (0.5, 1, 2), (25, 3, 4), (20, 3, None), (25, 2, None), (0.25, 2, None), (1, 98, None)],
)
def test_too_few_validations_to_stop_a_run_early_are_told_with_their_number(
    interval: float, patience: int, validations: int | None
) -> None:
    found = told(f"val_interval={interval}", f"early_stopping_patience={patience}")

    assert len(found) == (validations is not None)
    for text in found:
        numbers = [int(number) for number in re.findall(r"[0-9]+", text)]
        assert numbers[:3] == [patience, patience + 2, validations]
        assert not told(f"val_interval={numbers[-1]}", f"early_stopping_patience={patience}")


def test_without_early_stopping_nothing_is_told() -> None:
    assert told("val_interval=500") == []


def test_a_run_of_fewer_steps_than_it_takes_validations_is_told_to_do_without() -> None:
    (text,) = told("early_stopping_patience=200", "val_interval=1")

    assert "early_stopping_patience" in text.rpartition("Try ")[2]


def test_without_an_interval_the_validations_are_those_at_the_ends_of_epochs(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"instruction": "question {number}", "output": "b"}}\n' for number in range(64)))
    rows = (f"train_dataloader.dataset.path={path}", "train_dataloader.dataset.val_split=0.25")
    keys = (*rows, "train_dataloader.dataset.packing=False", "early_stopping_patience=3")
    few, enough = (made(*keys, f"max_epochs={epochs}", recipe="tiny_full_custom_sft_e1") for epochs in (4, 5))

    (text,) = [finding for finding in preflight.foresee(few) if "cannot end this run early" in finding]
    assert few.steps.total.value and few.steps.per_epoch.value
    assert f"it has {math.ceil(few.steps.total.value / few.steps.per_epoch.value)} " in text
    assert not list(validation.early_stopping(enough))


@pytest.mark.parametrize(("seed", "split"), [(0, "training"), (1, "validation")])
def test_equal_rows_that_are_all_on_one_side_of_the_split_are_refused_with_the_reason(
    seed: int, split: str, tmp_path: Path
) -> None:
    equal, different = (tmp_path / name for name in ("equal.jsonl", "different.jsonl"))
    equal.write_text('{"instruction": "a", "output": "b"}\n' * 64)
    different.write_text("".join(f'{{"instruction": "question {number}", "output": "b"}}\n' for number in range(64)))
    block = "train_dataloader.dataset"
    keys = (f"{block}.val_split=0.5", f"{block}.val_seed={seed}")
    run, other = (made(*keys, f"{block}.path={path}", recipe="tiny_full_custom_sft_e1") for path in (equal, different))

    (error,) = validation.held_out(run)

    assert isinstance(error, DataError)
    assert split in error.what and " 1 of the 64 rows" in error.what
    assert not list(validation.held_out(other))
