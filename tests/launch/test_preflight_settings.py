"""Splits that leave no rows, early stopping that no validation can cause, and keys that nothing reads are told."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from tests.launch.plans import made
from tuner.errors import DataError, Text
from tuner.launch import preflight
from tuner.launch.checks import settings


def told(*sets: str) -> list[str]:
    """Return what is found of a run of 100 steps that holds rows out."""
    values = ("train_dataloader.dataset.val_split=0.25", "train_cfg.max_steps=100", *sets)
    return [Text(str(finding)).in_python for finding in settings.early_stopping(made(*values))]


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
    assert not list(settings.early_stopping(enough))


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

    (error,) = settings.held_out(run)

    assert isinstance(error, DataError)
    assert split in error.what and " 1 of the 64 rows" in error.what
    assert not list(settings.held_out(other))


# Keys that nothing reads: those that the user has set are named; defaults and those of parts are not

FULL, LORA, DPO = "tiny_full_sample_e1", "tiny_lora_sample_e1", "tiny_dpo_lora_sample_preferences_e1"


@pytest.mark.parametrize(
    ("recipe", "sets", "key"),
    [
        (FULL, ["image_max_pixels=1000"], "train_dataloader.dataset.image_max_pixels"),
        (FULL, ["optimizer.type=SGD", "betas=(0.5, 0.9)"], "optim_wrapper.optimizer.betas"),
        (FULL, ["optimizer.type=SGD", "optimizer.eps=1e-3"], "optim_wrapper.optimizer.eps"),
        (FULL, ["train_dataloader.dataset.packing=False", "pack_length=64"], "train_dataloader.dataset.pack_length"),
        (FULL, ["max_new_tokens=10"], "log.max_new_tokens"),
        (FULL, ["checkpoint.private=True"], "checkpoint.private"),
        (DPO, ["train_dataloader.dataset.packing=True"], "train_dataloader.dataset.packing"),
        (LORA, ["adapter.r=64", "betas=(0.5, 0.9)", "max_new_tokens=10", "log.generate=2"], None),
        (FULL, ["optimizer.type=SGD"], None),
        (DPO, [], None),
    ],
)
def test_a_key_that_nothing_reads_is_named(recipe: str, sets: list[str], key: str | None) -> None:
    told = [finding for finding in preflight.foresee(made(*sets, recipe=recipe)) if "has no effect" in finding]

    assert [finding.split(" = ")[0] for finding in told] == [key] * bool(key)


def test_a_split_of_a_local_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"instruction": "a", "output": "b"}\n' * 3)
    keys = (f"train_dataloader.dataset.path={path}", "train_dataloader.dataset.format=None")

    def told(*sets: str) -> list[str]:
        run = made(*keys, *sets, recipe="tiny_full_custom_sft_e1")
        return [finding.split(" = ")[0] for finding in preflight.foresee(run) if "has no effect" in finding]

    assert told("train_dataloader.dataset.split=test") == ["train_dataloader.dataset.split"]
    assert told("train_dataloader.dataset.name=main") == ["train_dataloader.dataset.name"]
    assert told("train_dataloader.dataset.split=train[:2]") == []


def test_the_recipe_of_a_run_which_holds_every_key_has_none_to_name(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(made(recipe=DPO).recipe.standalone())

    told = preflight.foresee(made(recipe=str(tmp_path / "recipe.py")))

    assert not [finding for finding in told if "has no effect" in finding]
