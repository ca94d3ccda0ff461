"""What a checkpoint, a retry or `tuner tune` has decided replaces the choice of a stage, whichever stage it is."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path

import pytest

from tests.each import each
from tests.launch.plans import checkpoint, made, written_run
from tests.machine.gpus import CPU, H200, machine
from tuner.launch import memory
from tuner.launch.pins import Pins
from tuner.recipes.merging import Kind

PINNED = {
    "train_dataloader.dataset.val_split": 0.3,
    "val_dataloader.dataset.val_split": 0.3,
    "optim_wrapper.dtype": "fp32",
    "model.attn_implementation": "eager",
    "train_cfg.global_batch_size": 6,
    "optim_wrapper.accumulative_counts": 2,
    "train_cfg.gradient_checkpointing": True,
    "train_cfg.loss": "whole",
}


@each(PINNED)
def test_a_pin_replaces_the_choice_of_its_stage_and_its_origin_says_whose_it_is(key: str) -> None:
    recipe, hardware = "tiny_lora_sample_e1", machine(H200)
    pins = (Pins("first", {key: None}), Pins("tuner tune", {key: PINNED[key]}))

    before, after = (made(recipe=recipe, hardware=hardware, pins=pins).recipe for pins in ((), pins))

    assert attrgetter(key)(before.config) != PINNED[key] == attrgetter(key)(after.config)
    assert (after.origins[key].place.kind, after.origins[key].text) == (Kind.DERIVED, "tuner tune")


@pytest.mark.parametrize("deepspeed", [None, "zero1"])
def test_a_pinned_level_replaces_that_of_auto_and_of_the_flag(deepspeed: str | None) -> None:
    pins = (Pins("first", level="deepspeed_zero2"), Pins("tuner tune", level="deepspeed_zero3"), Pins("last"))

    found = made(hardware=machine(H200, H200), deepspeed=deepspeed, pins=pins)

    assert (found.level, found.final.config["zero_optimization"]["stage"]) == ("deepspeed_zero3", 3)
    assert str(memory.why(found.level_and_split)).startswith("tuner tune")


def test_a_pin_that_changes_nothing_leaves_the_origin() -> None:
    key = "train_cfg.max_epochs"
    origin = made(hardware=CPU).recipe.origins[key]

    assert made(hardware=CPU, pins=(Pins("tuner tune", {key: 1}),)).recipe.origins[key] == origin


def test_the_level_of_the_checkpoint_is_kept_and_the_plan_says_why(tmp_path: Path) -> None:
    run = written_run(tmp_path / "run", hardware=machine(H200, H200), deepspeed="zero3").path
    checkpoint(run, 2)

    found = made(resume=str(run), hardware=machine(H200, H200))

    assert found.level == "deepspeed_zero3"
    assert found.level_and_split.level_reason == "the level of the checkpoint"
    assert made(resume=str(run), hardware=machine(H200, H200), deepspeed="zero3").level_and_split.level_reason is None
