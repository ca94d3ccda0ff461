"""How many rows of a user's own data are held out where nobody says it, and that data, counts and steps agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.machine.gpus import CPU
from tuner.data import mixing
from tuner.data.pipeline import Pipeline
from tuner.launch import row_counts, validation_rows
from tuner.launch.machines import RunMachines
from tuner.launch.resolve import decide
from tuner.machine.launchers import resolve
from tuner.machine.topology import LaunchFlags
from tuner.recipes import loading
from tuner.recipes.recipe import Overrides, Recipe

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def rows(name: str, count: int) -> str:
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text("".join(f"{json.dumps(chat(f'{name} {number}', 'So.'))}\n" for number in range(count)))
    return name


def chat(question: str, answer: str, **others: object) -> dict[str, object]:
    return {
        "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
        **others,
    }


def settled(*data: str, pairs: tuple[str, ...] = ()) -> Recipe:
    asked = Overrides(model="tiny", data=data, pairs=tuple(("--set", pair) for pair in pairs))
    return validation_rows.hold_out(loading.load(None, asked))


def read(recipe: Recipe) -> list[int]:
    """Return how many rows training and validation read."""
    loaders = recipe.config.loaders.values()
    return [len(list(mixing.find(loader.dataset).read())) for loader in loaders]


@pytest.mark.parametrize(
    ("count", "held"), [(1, 0), (39, 0), (40, 8), (41, 8), (135, 8), (160, 8), (1000, 50), (9999, 500), (12_000, 500)]
)
def test_five_per_cent_are_held_out_at_least_8_rows_and_at_most_500(count: int, held: int) -> None:
    found = settled(rows("my.jsonl", count))

    assert read(found) == ([count - held, held] if held else [count])
    assert (f"validation: {held} of the {count:,} rows are held out" in found.notes[-1]) == bool(held)


def test_of_several_data_sets_the_share_is_of_all_rows() -> None:
    found = settled(rows("a.jsonl", 300), f"{rows('b.jsonl', 200)}:0.5")

    trained, held = read(found)
    assert trained + held == 400 and 18 <= held <= 22
    assert f"validation: {held} of the 400 rows" in found.notes[-1]


def test_few_rows_are_all_trained_on_unless_a_setting_needs_validation_rows() -> None:
    alone, needed = settled(rows("my.jsonl", 30)), settled("my.jsonl", pairs=("save_best=eval_loss",))

    assert alone.config.val_dataloader is None and alone.config.train_dataloader.dataset.val_split is None
    assert "30 rows are too few to hold some out (--val FILE, --val-split 0.2)" in alone.notes[-1]
    assert "too few" in alone.origins["val_dataloader"].text
    assert read(needed) == [24, 6], "a fifth at most"


def test_rows_that_are_not_counted_have_a_share_held_out() -> None:
    found = settled("owner/data")

    assert found.config.train_dataloader.dataset.val_split == validation_rows.HELD_OUT
    assert found.notes[-1].startswith("validation: 5 % of the training rows are held out")


def test_the_validation_split_of_a_folder_is_taken() -> None:
    rows("folder/train.jsonl", 100)
    rows("folder/validation.jsonl", 20)

    found = settled("folder")

    assert read(found) == [100, 20]
    assert found.notes[-1] == "validation: the validation split of folder."


def test_a_value_says_that_tuner_chose_it_and_why() -> None:
    origin = settled(rows("my.jsonl", 1000)).origins["train_dataloader.dataset.val_split"]

    assert origin.text == "derived: about 50 of 1,000 rows"
    assert str(origin.overridden[0].place) == "default without a recipe"


def test_a_run_trains_and_validates_on_the_rows_that_its_plan_has() -> None:
    loaded = loading.load(None, Overrides(model="tiny", data=rows("my.jsonl", 200)))
    topology = resolve(LaunchFlags(), {}, 0)

    recipe = decide(loaded, None, RunMachines.of(CPU, topology)).recipe
    Path("run.py").write_text(recipe.standalone())

    assert read(loading.load("./run.py")) == read(recipe) == [190, 10]


def copied(name: str, different: int, count: int) -> str:
    questions = (number % different for number in range(count))
    Path(name).write_text("".join(f"{json.dumps(chat(f'Q {question}', 'A'))}\n" for question in questions))
    return name


def test_rows_that_are_held_out_are_counted_with_their_copies() -> None:
    found = settled(copied("my.jsonl", 40, 120))

    sides = [Pipeline(loader.dataset, "sft") for loader in found.config.loaders.values()]
    read_rows = [
        [row["messages"][0]["content"] for _, (_, row) in side.mixture.read(key_of=side.key_of)] for side in sides
    ]
    assert [len(rows) for rows in read_rows] == [96, 24]
    assert not set(read_rows[0]) & set(read_rows[1])
    assert "validation: 24 of the 120 rows are held out" in found.notes[-1]
    assert [sum(size.taken or 0 for size in row_counts.dataset_sizes(found.config))] == [96]


def test_few_different_rows_are_all_trained_on() -> None:
    found = settled(copied("my.jsonl", 10, 120))

    assert found.config.train_dataloader.dataset.val_split is None
    assert "10 different rows are too few" in found.notes[-1]


def test_the_first_rows_of_a_mixture_are_counted() -> None:
    sets = settled(rows("a.jsonl", 60), rows("b.jsonl", 80), pairs=("max_rows=100",))

    assert sum(size.taken or 0 for size in row_counts.dataset_sizes(sets.config)) == 92
    assert read(sets) == [92, 8]


def test_an_adapter_with_held_out_rows_ends_with_its_best_weights() -> None:
    recipe = settled(rows("my.jsonl", 100))

    assert recipe.config.adapter and recipe.config.checkpoint.save_best == "eval_loss"
    assert settled(rows("few.jsonl", 5)).config.checkpoint.save_best is None


@pytest.mark.parametrize("pair", ["save_best=None", "adapter=None", "train_dataloader.dataset.val_split=0.1"])
def test_the_last_weights_are_kept_where_the_user_says_so_and_of_whole_models(pair: str) -> None:
    assert settled(rows("my.jsonl", 100), pairs=(pair,)).config.checkpoint.save_best is None
