"""The batch of an objective that generates: all completions of a prompt are in one step, on any number of ranks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from tests.launch.plans import made
from tests.machine.gpus import CPU
from tests.refused import refused
from tuner.errors import RecipeError
from tuner.fit.splits import possible_splits
from tuner.launch.announcement import of_recipe
from tuner.launch.batch_size import choose_global_batch
from tuner.recipes.loading import load
from tuner.recipes.recipe import Overrides, Recipe

RECIPE = "tiny_grpo_full_sample_e1"
MICRO = "train_dataloader.batch_size"


def recipe(**values: object) -> Recipe:
    return load(RECIPE, Overrides(pairs=tuple(("--set", f"{key}={value}") for key, value in values.items())))


@given(
    some.integers(2, 16),
    some.integers(1, 8),
    some.one_of(some.just("auto"), some.integers(1, 16)),
    some.one_of(some.just("auto"), some.integers(1, 64)),
)
@settings(max_examples=100, deadline=None)
def test_a_batch_holds_whole_groups_or_is_refused_with_one_that_does(
    generations: int, ranks: int, micro: int | str, batch: int | str
) -> None:
    values = {"num_generations": generations, MICRO: micro, "global_batch_size": batch}
    loaded = choose_global_batch(recipe(**values), ranks)
    try:
        splits = possible_splits(loaded.config, ranks)
    except RecipeError as error:
        assert batch != "auto", f"tuner chose it itself: {error}"
        if "cannot hold" in error.what:
            near = error.fix.partition(" to ")[2].partition(";")[0].split(",")[0] if error.fix else ""
            values["global_batch_size"], values[MICRO] = int(near), "auto"
            assert possible_splits(recipe(**values).config, ranks)
        return

    for split in splits:
        assert split.micro_batch * split.accumulation * ranks % generations == 0, "TRL 1.16 refuses it"


@pytest.mark.parametrize(
    ("sets", "line"),
    [
        (("num_generations=4",), "batch size: 4 prompts x 4 completions = 16 (16 per device"),
        (
            ("generation_batch_size=64", "num_iterations=2"),
            "generation: 64 completions at once, then 8 steps on them, 2 passes over each",
        ),
    ],
)
def test_the_announcement_counts_prompts_completions_and_the_steps_on_them(sets: tuple[str, ...], line: str) -> None:
    run = made("global_batch_size=16", *sets, recipe=RECIPE, hardware=CPU)

    assert of_recipe(run.recipe, run.steps, run.batch)[-1].startswith(line)


@pytest.mark.parametrize(
    ("shared", "steps"),
    [
        ("num_iterations=1", 3),  # 10 prompts, 4 a step
        ("num_iterations=2", 6),
        ("generation_batch_size=32", 4),  # 8 of the 10 prompts at once, 2 steps
    ],
)
def test_an_epoch_has_all_steps_on_the_same_completions(shared: str, steps: int) -> None:
    sets = ("global_batch_size=16", "num_generations=4", "max_rows=10", shared)

    assert made(*sets, recipe=RECIPE, hardware=CPU).steps.per_epoch.value == steps


@pytest.mark.parametrize("key", ["checkpoint.interval", "train_cfg.val_interval"])
@pytest.mark.parametrize("shared", ["num_iterations=2", "generation_batch_size=32"])
def test_a_checkpoint_between_two_steps_on_completions_that_were_generated_at_once_is_refused(
    key: str, shared: str
) -> None:
    with refused(RecipeError, f"{key} (--set {key}=5)", 5, 2) as caught:
        made("global_batch_size=16", shared, f"{key}=5", recipe=RECIPE, hardware=CPU)

    assert caught.value.fix == "Set it to 6."


def test_the_batch_is_chosen_so_that_steps_share_what_is_generated_at_once() -> None:
    sets = ("generation_batch_size=48", "num_generations=4")
    run = made(*sets, recipe=RECIPE, hardware=CPU, flags={"nproc_per_node": 2})

    assert 48 % run.batch.global_batch == 0
    assert run.batch.global_batch // 2 % 4 == 0, "a rank has whole groups"
    steps = 48 // run.batch.global_batch
    assert run.recipe.config.checkpoint.interval % steps == 0, "the package's interval is rounded up"


@pytest.mark.parametrize(("at_once", "ranks"), [(8, 1), (16, 1), (16, 2), (48, 3)])
def test_the_batch_that_is_chosen_is_not_larger_than_what_is_generated_at_once(at_once: int, ranks: int) -> None:
    flags = {"nproc_per_node": ranks}
    run = made(f"generation_batch_size={at_once}", recipe=RECIPE, hardware=CPU, flags=flags)

    assert at_once % run.batch.global_batch == 0


@pytest.mark.parametrize(
    ("sets", "where", "fix"),
    [
        (
            ("global_batch_size=16", "generation_batch_size=24"),
            "objective.generation_batch_size (--set generation_batch_size=24)",
            "32",
        ),
        (("global_batch_size=8", "generation_batch_size=16"), "train_cfg.global_batch_size", "16"),
    ],
)
def test_a_generation_that_steps_cannot_share_is_refused(sets: tuple[str, ...], where: str, fix: str) -> None:
    with refused(RecipeError, where) as caught:
        made(*sets, recipe=RECIPE, hardware=CPU, flags={"nproc_per_node": 2})

    assert caught.value.fix and fix in caught.value.fix


def test_a_batch_that_splits_a_group_is_refused_with_the_nearest_that_do_not() -> None:
    with refused(RecipeError, "train_cfg.global_batch_size", 12, 8) as caught:
        made("global_batch_size=12", recipe=RECIPE, hardware=CPU)

    assert caught.value.fix and "8, 16" in caught.value.fix
