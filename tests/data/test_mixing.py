"""Rows of several data sets come in one order that weights and contents decide, and nothing else."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tuner.data import mixing
from tuner.data.holdout import Holdout
from tuner.errors import DataError
from tuner.recipes.schema import Dataset, MixtureEntry


def write(folder: Path, name: str, count: int) -> str:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"text": f"{name}{number}"}) + "\n" for number in range(1, count + 1)))
    return str(path)


def block(*shares: dict[str, Any], **settings: Any) -> Dataset:
    mixed = {"mixture": tuple(MixtureEntry(**share) for share in shares)} if shares else {}
    return Dataset(**{"path": None, "max_length": 16, "packing": True, **mixed, **settings})


def texts(dataset: Dataset) -> list[str]:
    return [row["text"] for _, (_, row) in mixing.find(dataset).read()]


@pytest.mark.parametrize(
    ("weight", "max_rows", "expected"),
    [
        (1.0, None, ["a1", "a2", "a3", "a4"]),
        (0.5, None, ["a1", "a3"]),
        (0.25, None, ["a1"]),
        (0.75, None, ["a1", "a2", "a3"]),
        (2.0, None, ["a1", "a2", "a3", "a4"] * 2),
        (2.5, None, ["a1", "a2", "a3", "a4"] * 2 + ["a1", "a3"]),
        (1e-9, None, ["a1"]),
        (2.0, 3, ["a1", "a2", "a3"] * 2),
        (0.5, 3, ["a1", "a3"]),
        (1.0, 3, ["a1", "a2", "a3"]),
    ],
)
def test_a_weight_is_how_often_each_row_within_the_limit_is_taken(
    tmp_path: Path, weight: float, max_rows: int | None, expected: list[str]
) -> None:
    assert texts(block({"path": write(tmp_path, "a", 4), "weight": weight, "max_rows": max_rows})) == expected


def test_a_limit_counts_the_rows_of_its_own_data_set(tmp_path: Path) -> None:
    shares = [{"path": write(tmp_path, "a", 40), "max_rows": 5}, {"path": write(tmp_path, "b", 90), "max_rows": 60}]

    assert Counter(text[0] for text in texts(block(*shares))) == {"a": 5, "b": 60}


@given(number=st.integers(1, 100), hundredths=st.integers(1, 350))
@example(number=100, hundredths=7)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_weight_takes_its_share_of_the_rows_as_it_was_written(tmp_path: Path, number: int, hundredths: int) -> None:
    """0.07 of 100 rows are 7 rows, though 100 x 0.07 is more than 7 in floats; and rows are taken evenly."""
    taken = Counter(texts(block({"path": write(tmp_path, "a", number), "weight": hundredths / 100})))
    places = [at for at in range(number) if taken[f"a{at + 1}"] > hundredths // 100]
    rest = Fraction(hundredths % 100, 100)

    assert sum(taken.values()) == number * (hundredths // 100) + math.ceil(number * rest)
    assert all(rest * (after - before - 1) < 1 for before, after in itertools.pairwise(places))


def test_sets_take_turns_in_proportion_to_their_weights(tmp_path: Path) -> None:
    first, second = write(tmp_path, "a", 2), write(tmp_path, "b", 2)

    assert texts(block({"path": first}, {"path": second, "weight": 2.0})) == ["a1", "b1", "b2", "a2", "b1", "b2"]


def test_a_set_that_ends_leaves_the_rest_to_the_others(tmp_path: Path) -> None:
    first, second = write(tmp_path, "a", 1), write(tmp_path, "b", 3)

    assert texts(block({"path": first}, {"path": second})) == ["a1", "b1", "b2", "b3"]


def test_max_rows_are_the_first_of_the_whole(tmp_path: Path) -> None:
    shares = [{"path": write(tmp_path, "a", 9)}, {"path": write(tmp_path, "b", 9), "weight": 2.0}]
    whole = texts(block(*shares))

    assert texts(block(*shares, max_rows=6)) == whole[:6] == ["a1", "b1", "b2", "a2", "b3", "b4"]
    assert texts(block(path=write(tmp_path, "a", 9), max_rows=2)) == ["a1", "a2"]
    assert len(texts(block(*shares, max_rows=1_000))) == 27


def test_one_path_is_one_set(tmp_path: Path) -> None:
    path = write(tmp_path, "a", 3)
    opened = mixing.find(block(path=path, format="text", columns={"text": "text"}, system="Be brief."))

    assert opened.place == path
    assert [(data_set.number, data_set.format, data_set.columns, data_set.system) for data_set in opened.sets] == [
        (0, "text", {"text": "text"}, "Be brief.")
    ]
    assert [placed for _, placed in opened.read()] == [(f"{path}:{n}", {"text": f"a{n}"}) for n in (1, 2, 3)]


def test_every_row_comes_with_the_set_that_says_how_to_read_it(tmp_path: Path) -> None:
    shares = [
        {"path": write(tmp_path, "a", 2), "format": "text"},
        {"path": write(tmp_path, "b", 1), "format": "alpaca", "columns": {"instruction": "text"}, "system": "Hi."},
    ]

    opened = mixing.find(block(*shares))
    counts = Counter(data_set.number for data_set, _ in opened.read())

    assert counts == {0: 2, 1: 1}
    assert all(row["text"][0] == "ab"[data_set.number] for data_set, (_, row) in opened.read())
    assert [data_set.format for data_set in opened.sets] == ["text", "alpaca"]
    assert opened.sets[1].columns == {"instruction": "text"}
    assert opened.sets[1].system == "Hi."


def test_the_head_of_a_set_is_read_without_taking_it_away(tmp_path: Path) -> None:
    opened = mixing.find(block(path=write(tmp_path, "a", 3)))

    assert opened.sets[0].head(2) == [{"text": "a1"}, {"text": "a2"}]
    assert len(opened.sets[0].head(9)) == len(list(opened.read())) == 3


def test_the_fingerprint_follows_all_that_decides_the_rows(tmp_path: Path) -> None:
    path = write(tmp_path, "a", 3)
    other = write(tmp_path, "b", 3)
    same = {"path": path, "format": "text"}

    found = [
        mixing.find(dataset).fingerprint()
        for dataset in (
            block(same),
            block({**same, "weight": 2.0}),
            block({**same, "format": "alpaca"}),
            block({**same, "columns": {"text": "t"}}),
            block({**same, "system": "Be brief."}),
            block({**same, "path": other}),
            block(same, {"path": other}),
            block({"path": other}, same),
            block(same, max_rows=2),
            block({**same, "max_rows": 2}),
            block({**same, "image_folder": "a"}),
            block({**same, "image_folder": "b"}),
        )
    ]

    assert len(set(found)) == len(found)
    assert mixing.find(block(path=path, format="text")).fingerprint() == found[0]
    write(tmp_path, "a", 4)
    assert mixing.find(block(same)).fingerprint() != found[0]


def test_a_set_that_is_not_there_is_told_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no file or folder"):
        mixing.find(block({"path": write(tmp_path, "a", 1)}, {"path": str(tmp_path / "b.jsonl")}))


@given(
    number=st.integers(0, 400),
    part=st.sampled_from([0.01, 0.05, 0.07, 0.1, 0.3, 0.5, 0.9]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=60, deadline=None)
def test_each_row_is_held_out_or_trained_on_and_the_part_is_the_one_asked_for(
    number: int, part: float, seed: int
) -> None:
    train, val = Holdout(part, seed, taken=False), Holdout(part, seed, taken=True)
    held = [row for row in range(number) if val.keeps(0, row)]

    assert sorted([*held, *(row for row in range(number) if train.keeps(0, row))]) == list(range(number))
    assert abs(len(held) - number * part) <= 1
    assert train.count(0, number) == number - len(held)


def test_another_seed_holds_other_rows_out() -> None:
    held = {seed: [row for row in range(400) if Holdout(0.05, seed, taken=True).keeps(0, row)] for seed in range(5)}

    assert len({tuple(rows) for rows in held.values()}) == 5
    assert len({row % 20 for row in held[0]}) > 5  # no fixed place in each twenty


def test_a_row_that_is_read_more_than_once_is_held_out_each_time(tmp_path: Path) -> None:
    first, second = write(tmp_path, "a", 40), write(tmp_path, "b", 40)
    shares = ({"path": first, "weight": 2.0}, {"path": second, "weight": 0.5}, {"path": first})

    train = texts(block(*shares, val_split=0.2, val_seed=3))
    val = texts(block(*shares, val_split=0.2, val_seed=3, held_out=True))

    assert Counter([*train, *val]) == Counter(texts(block(*shares)))
    assert not {*train} & {*val}
    assert all(Counter(val)[text] == 3 for text in val if text.startswith("a"))


def test_rows_beyond_max_rows_are_in_neither_part(tmp_path: Path) -> None:
    kept = block(max_rows=10, val_split=0.2).model_copy(update={"path": write(tmp_path, "a", 40)})
    both = [*texts(kept), *texts(kept.model_copy(update={"held_out": True}))]

    assert sorted(both) == sorted(f"a{number}" for number in range(1, 11))
    assert mixing.find(kept).fingerprint() != mixing.find(kept.model_copy(update={"held_out": True})).fingerprint()
