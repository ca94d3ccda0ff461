"""The steps of a run by its samples and its batch, and what is said of too few of them."""

from __future__ import annotations

import re

import pytest

from tuner.data import step_count
from tuner.data.step_count import MIN_STEPS
from tuner.machine.topology import Batch
from tuner.recipes.loading import load
from tuner.recipes.recipe import Overrides
from tuner.recipes.schema import RecipeConfig

SIXTEEN = Batch(1, 16, 1)


def recipe(*pairs: str, name: str = "tiny_full_sample_e1") -> RecipeConfig:
    return load(name, Overrides(pairs=tuple(("--set", pair) for pair in pairs))).config


def few(batch: Batch, epochs: float, samples: int, unpacked: int | None = None) -> list[str]:
    """Return the numbers and the options of the warning."""
    told, _ = step_count.warnings(recipe(f"max_epochs={epochs}"), batch, samples, "rows", unpacked=unpacked)
    return re.findall(r"\d+|--[\w-]+|packing=False", told or "")


@pytest.mark.parametrize(("samples", "steps"), [(1, 1), (24, 1), (25, 2), (48, 2), (49, 3)])
def test_steps_of_an_epoch_round_up(samples: int, steps: int) -> None:
    assert step_count.steps_per_epoch(recipe(), Batch(3, 4, 2), samples) == steps
    assert step_count.steps_per_epoch(recipe(), Batch(3, 8, 1), samples) == steps


def test_a_run_of_one_step_is_warned_of_with_its_arithmetic_and_what_gives_more() -> None:
    assert few(SIXTEEN, 1, 9, unpacked=135) == [
        *("1", "16", "1"),  # steps, global batch, epochs
        *("--batch-size", "1", "9"),
        *("--set", "packing=False", "9"),
        *("--epochs", "30", "30"),
    ]


def test_a_run_of_enough_steps_gets_no_warning() -> None:
    assert not few(SIXTEEN, 1, 16 * MIN_STEPS)
    assert few(SIXTEEN, 1, 16 * (MIN_STEPS - 1))
    assert not few(SIXTEEN, 15, 32)


def test_what_gives_no_more_steps_is_not_advised() -> None:
    assert few(Batch(2, 1, 1), 2, 4) == ["4", "2", "2", "--batch-size", "1", "8", "--epochs", "15", "30"]


def test_a_batch_that_would_split_the_completions_of_a_prompt_is_not_advised() -> None:
    config = recipe("num_generations=4", "num_iterations=2", name="tiny_grpo_full_sample_e1")

    told, _ = step_count.warnings(config, Batch(16, 1, 1), 40, "rows")

    assert step_count.count_steps(config, Batch(16, 1, 1), 40) == 6, "three generations, two passes over each"
    assert told and re.findall(r"--batch-size (\d+) \((\d+) steps\)", told) == [("4", "20")]


def test_a_warm_up_beyond_the_end_is_told_of_a_number_of_steps_that_the_recipe_sets_too() -> None:
    set_steps = recipe("warmup_steps=50", "max_steps=40")

    assert step_count.warnings(set_steps, SIXTEEN, None, "")[0] is None
    assert "40" in (step_count.warnings(set_steps, SIXTEEN, None, "")[1] or "")
    assert step_count.warnings(recipe("warmup_steps=50"), SIXTEEN, 16 * 50, "rows") == (None, None)
    assert step_count.warnings(recipe("warmup_steps=50"), SIXTEEN, None, "rows") == (None, None)
