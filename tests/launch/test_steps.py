"""What the steps of a run are worth before its data is read. That they are the trainer's: see worker/test_steps.py."""

from __future__ import annotations

from typing import Any

import pytest

from tuner.launch.steps import Certainty, DatasetSize, Steps, count_steps, packed_rows, sample_tokens
from tuner.machine.topology import Batch
from tuner.recipes.loading import load
from tuner.recipes.recipe import Overrides

SFT, KTO = "tiny_full_custom_e2", "tiny_kto_full_custom_e2"
HUB = DatasetSize(None, "owner/data is on the hub")
PACKED = {"train_dataloader.dataset.packing": True}


def steps(*sizes: DatasetSize, recipe: str = SFT, done: int = 0, trained_on: int | None = None, **values: Any) -> Steps:
    """Return the steps of a recipe of two epochs on some data, without packing unless it is asked for."""
    changed = {"train_dataloader.dataset.packing": False} | values
    pairs = [("--set", f"{key}={value}") for key, value in changed.items()]
    return count_steps(load(recipe, Overrides(pairs=pairs)).config, Batch(2, 1, 2), sizes, done, trained_on)


def numbers(found: Steps) -> tuple[int | None, ...]:
    return tuple(number.value for number in (found.rows, found.samples, found.per_epoch, found.total))


def test_rows_become_samples_and_samples_become_steps() -> None:
    found = steps(DatasetSize(1000))

    assert numbers(found) == (1000, 1000, 250, 500)
    assert (found.rows.certainty, found.total.certainty) == (Certainty.EXACT, Certainty.UNLESS_DROPPED)
    assert found.describe() == "500 (fewer if rows are dropped: no token to train on within max_length)"


def test_no_more_rows_than_max_rows_are_read() -> None:
    assert numbers(steps(DatasetSize(1000), max_rows=10)) == (10, 10, 3, 6)
    assert numbers(steps(DatasetSize(7), max_rows=10)) == (7, 7, 2, 4)


def test_data_that_is_not_counted_has_at_most_max_rows() -> None:
    found = steps(HUB, max_rows=10)

    assert numbers(found) == (10, 10, 3, 6)
    assert found.total.most == 6
    assert str(found.total) == str(found.rows) == "at most: max_rows is 10; owner/data is on the hub"
    assert numbers(steps(HUB)) == (None, None, None, None)
    assert steps(HUB).describe() == "known once the data is read (owner/data is on the hub)"


def test_what_is_counted_may_be_enough_for_max_rows() -> None:
    assert steps(DatasetSize(10), HUB, max_rows=10).rows.certainty is Certainty.EXACT
    assert steps(DatasetSize(9), HUB, max_rows=10).rows.certainty is Certainty.AT_MOST


@pytest.mark.parametrize(("weight", "taken"), [(1, 100), (0.07, 7), (0.071, 8), (2.5, 250), (1e-9, 1)])
def test_a_weight_is_how_often_a_row_is_taken(weight: float, taken: int) -> None:
    assert DatasetSize(100, weight=weight).taken == taken


def test_a_pair_is_two_samples_to_kto() -> None:
    pairs, judged = DatasetSize(10, samples_a_row=2), DatasetSize(10, samples_a_row=1)

    assert numbers(steps(pairs, recipe=KTO)) == (10, 20, 5, 10)
    assert numbers(steps(pairs, judged, recipe=KTO))[:2] == (20, 30)
    assert steps(pairs, judged, recipe=KTO).samples.certainty is Certainty.UNLESS_DROPPED
    assert numbers(steps(pairs, recipe=KTO, max_rows=4))[:2] == (4, 8)


@pytest.mark.parametrize(
    "sizes",
    [
        (DatasetSize(10, samples_a_row=2), DatasetSize(10)),
        (DatasetSize(10, samples_a_row=2), DatasetSize(10, samples_a_row=None)),
        (DatasetSize(10, samples_a_row=None),),
        (DatasetSize(4, samples_a_row=2), HUB._replace(samples_a_row=1)),
    ],
)
def test_which_of_two_kinds_max_rows_leaves_is_not_told_on_paper(sizes: tuple[DatasetSize, ...]) -> None:
    found = steps(*sizes, recipe=KTO, max_rows=4)

    assert (found.samples.value, found.samples.certainty) == (8, Certainty.AT_MOST)


def test_few_rows_are_all_fitted_into_packed_rows() -> None:
    assert packed_rows(4, (20, 18, 18, 18), 64, 2048) == 2
    assert packed_rows(400, (20, 18, 18, 18), 64, 2048) == 134


def test_the_sample_of_a_token_is_longer_than_the_mean_sample_and_no_longer_than_a_row() -> None:
    config = load(SFT, Overrides(pairs=[("--set", "train_dataloader.dataset.max_length=100")])).config
    long, short = DatasetSize(2, lengths=(250,)), DatasetSize(20, lengths=(10, 30))

    assert sample_tokens(config, [short]) == (10**2 + 30**2) / 40
    assert sample_tokens(config, [long]) == (2 * 100**2 + 50**2) / 250
    assert sample_tokens(config, [long, short]) == (2 * 22_500 + 10 * 1_000) / (2 * 250 + 10 * 40)
    assert sample_tokens(config, [short, DatasetSize(None)]) is None


def test_packed_rows_are_counted_by_the_tokens_of_sampled_rows_and_have_no_bound() -> None:
    found = steps(DatasetSize(1000, lengths=(500, 500, 100, 900)), **PACKED, pack_length=1000)

    assert numbers(found) == (1000, 500, 125, 250)
    assert (found.total.certainty, found.total.most) == (Certainty.ABOUT, None)
    assert found.describe().startswith("about 250 (1,000 rows pack into about 500 rows of 1,000 tokens")
    assert steps(DatasetSize(1000), **PACKED, recipe=KTO).total.certainty is Certainty.UNLESS_DROPPED


def test_without_a_tokenizer_the_bytes_of_the_files_count() -> None:
    found = steps(DatasetSize(1000, num_bytes=4_000_000), **PACKED, pack_length=2048)

    assert found.samples.value == 500


@pytest.mark.parametrize("pack_length", [64, 256])
def test_rows_above_the_pack_length_have_a_row_each_and_those_above_max_length_several(pack_length: int) -> None:
    assert packed_rows(8, (1000, 2500, 4000, 2048), pack_length, 1024) == 2 * (1 + 3 + 4 + 2)


def test_max_steps_wins_and_is_exact_whatever_the_data() -> None:
    found = steps(HUB, max_steps=3)

    assert (found.total.value, str(found.total), found.per_epoch.value) == (3, "exact", None)
    assert steps(DatasetSize(4), max_steps=9, **PACKED).total.most == 9


@pytest.mark.parametrize("more", [{}, {"max_steps": 7}])
def test_early_stopping_makes_every_total_an_upper_bound(more: dict[str, int]) -> None:
    stopping = {"early_stopping_patience": 1, "val_interval": 2}

    found = steps(DatasetSize(100), recipe="tiny_full_sample_e2", **stopping, **more)

    assert found.total.certainty is Certainty.AT_MOST
    assert found.describe() == f"at most {found.total.value} (early stopping may end the run sooner)"
    assert steps(HUB, recipe="tiny_full_sample_e2", **stopping).total.certainty is Certainty.UNKNOWN


@pytest.mark.parametrize("values", [{}, PACKED])
def test_a_checkpoint_knows_the_samples_that_its_run_has(values: dict[str, bool]) -> None:
    found = steps(HUB, done=4, trained_on=21, **values)

    assert numbers(found) == (None, 21, 6, 12)
    assert (found.total.certainty, found.left) == (Certainty.EXACT, 8)
    assert found.describe() == "12, resuming from step 4, 8 left"


def test_a_run_goes_on_to_more_steps_or_has_none_left() -> None:
    assert steps(HUB, done=4, trained_on=21, max_steps=30).left == 26
    assert steps(HUB, done=40, max_steps=30).left == 0
    assert steps(HUB, done=30, max_steps=30).describe().startswith("30, all of them done: ")
    assert steps(HUB, done=30).describe().endswith("; resuming from step 30")


def test_bad_rows_that_may_be_left_out_are_told() -> None:
    assert str(steps(DatasetSize(10), bad_rows=3).total).endswith(", and up to 3 bad rows")
