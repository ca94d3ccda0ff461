"""A mixture names parts and files; of a path and a mixture the later one counts; what is wrong is told in one line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.loaded import loaded
from tests.refused import refused
from tuner import paths
from tuner.errors import DataError, RecipeError
from tuner.recipes import catalog, loading, path_checks
from tuner.recipes.schema import Dataset, MixtureEntry

ALPACA = MixtureEntry(path="tatsu-lab/alpaca", format="alpaca")
OASST1 = MixtureEntry(path="timdettmers/openassistant-guanaco", format="oasst1")


def write(dataset: str, base: str = "tiny_full_alpaca_e1", name: str = "my.py") -> str:
    Path(name).write_text(f'_base_ = "{base}"\ntrain_dataloader = dict(\n    dataset=dict({dataset}),\n)\n')
    return f"./{name}"


def dataset_of(name: str, *sets: str, **flags: Any) -> Dataset:
    return loaded(name, *sets, **flags).config.train_dataloader.dataset


def test_a_part_stands_for_its_rows_and_what_is_said_beside_it() -> None:
    made = "mixture=[dict(part='alpaca'), dict(part='oasst1', weight=0.5), dict(path='my.jsonl', weight=2)]"

    assert dataset_of(write(made)).mixture == (
        ALPACA,
        OASST1.model_copy(update={"weight": 0.5}),
        MixtureEntry(path="my.jsonl", weight=2.0),
    )


def test_a_part_can_be_read_from_a_copy() -> None:
    (share,) = dataset_of(write("mixture=[dict(part='alpaca', path='alpaca.jsonl')]")).mixture or ()

    assert share == MixtureEntry(path="alpaca.jsonl", format="alpaca")


def test_a_part_keeps_its_columns_and_system() -> None:
    (share,) = dataset_of(write("mixture=[dict(part='colorist')]")).mixture or ()

    assert share.columns == {"instruction": "description", "output": "color"}
    assert share.system


def test_a_part_that_is_a_mixture_is_spliced_in_and_weights_multiply() -> None:
    (english, chinese, other) = (
        dataset_of(write("mixture=[dict(part='alpaca_enzh', weight=0.5), dict(part='oasst1')]")).mixture or ()
    )

    assert english == ALPACA.model_copy(update={"weight": 0.5})
    assert chinese.path == "silk-road/alpaca-data-gpt4-chinese"
    assert chinese.weight == 0.5
    assert other == OASST1


def test_weights_multiply_through_every_level(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parts(monkeypatch, tmp_path, one="mixture=[dict(part='two', weight=0.5)]", two="mixture=[dict(path='x', weight=3)]")

    (share,) = dataset_of(write("mixture=[dict(part='one', weight=4)]", base="tiny_full_one_e1")).mixture or ()

    assert share == MixtureEntry(path="x", weight=6.0)


def parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **made: str) -> None:
    """Let the user's own catalog hold these data sets."""
    folder = tmp_path / "own" / "datasets"
    folder.mkdir(parents=True)
    for name, text in made.items():
        (folder / f"{name}.py").write_text(f'"""x."""\ntrain_dataloader = dict(dataset=dict({text}))\n')
    monkeypatch.setenv(catalog.VARIABLE, str(folder.parent))


def test_parts_in_a_circle_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parts(monkeypatch, tmp_path, one="mixture=[dict(part='two')]", two="mixture=[dict(part='one')]")

    with refused(RecipeError, "one.py:2"):
        dataset_of("tiny_full_one_e1")


@pytest.mark.parametrize(
    ("mixture", "says"),
    [
        ("dict(part='alpacca')", "./my.py:3: no data set 'alpacca' for a mixture. Did you mean 'alpaca'?"),
        ("dict(part=3)", "./my.py:3: no data set 3 for a mixture. See: tuner list --datasets"),
        ("dict(part='custom')", "./my.py:3: part 'custom' has no data of its own."),
        ("dict(path='a.jsonl', wieght=2)", "./my.py:3: no key 'wieght' in a mixture's entry. Did you mean 'weight'?"),
        ("dict(format='text')", "./my.py:3: an entry of the mixture has no data set: {'format': 'text'}."),
        ("dict(part='alpaca_enzh', split='test')", "part 'alpaca_enzh' is a mixture itself, so 'split' cannot be"),
        ("dict(path='a.jsonl', weight=0)", "greater than 0"),
        ("dict(path='a.jsonl', weight='2')", "valid number"),
        ("dict(part='alpaca_enzh', weight='2')", "valid number"),
        ("dict(path=['a.jsonl'])", "valid string"),
        ("'alpaca'", "valid dictionary"),
        ("", "at least 1 item"),
    ],
)
def test_a_wrong_entry_is_refused_where_it_stands(mixture: str, says: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(says)) as caught:
        dataset_of(write(f"mixture=[{mixture}]"))

    assert caught.value.where == "./my.py:3"


def test_a_path_beside_a_mixture_is_refused_in_one_line() -> None:
    with pytest.raises(RecipeError) as caught:
        dataset_of(write("path='a.jsonl', mixture=[dict(part='alpaca')]"))

    assert str(caught.value) == (
        "bad-recipe: ./my.py:3: train_dataloader.dataset has both a mixture and path = 'a.jsonl'. Use one of them."
    )


@pytest.mark.parametrize("other", ["name='main'", "format='text'", "columns=dict(text='a')", "system='Be brief.'"])
def test_what_belongs_to_one_data_set_is_refused_beside_a_mixture(other: str) -> None:
    with refused(RecipeError, "./my.py:3"):
        dataset_of(write(f"{other}, mixture=[dict(part='alpaca')]"))


def test_a_mixture_takes_the_place_of_an_earlier_path_with_all_that_belongs_to_it() -> None:
    found = loading.load(write("mixture=[dict(part='oasst1')]", base="tiny_full_colorist_e1"))
    dataset = found.config.train_dataloader.dataset

    assert (dataset.path, dataset.format, dataset.columns, dataset.system) == (None, None, None, None)
    assert dataset.mixture == (OASST1,)
    assert found.origins["train_dataloader.dataset.path"].text == "./my.py:3"
    assert found.origins["train_dataloader.dataset.path"].overridden[0][0] == "burkelibbey/colors"


def test_a_path_takes_the_place_of_an_earlier_mixture() -> None:
    found = loaded("tiny_full_alpaca_enzh_e1", "train_dataloader.dataset.path=my.jsonl")

    assert found.config.train_dataloader.dataset.mixture is None
    assert found.config.train_dataloader.dataset.path == "my.jsonl"


def test_data_takes_the_place_of_a_mixture() -> None:
    dataset = dataset_of("tiny_full_alpaca_enzh_e1", data="my.jsonl")

    assert (dataset.path, dataset.mixture) == ("my.jsonl", None)


def test_a_mixture_can_be_set_on_the_command_line() -> None:
    dataset = dataset_of("tiny_full_alpaca_e1", "mixture=[dict(part='alpaca'), dict(part='oasst1', weight=2)]")

    assert dataset.mixture == (ALPACA, OASST1.model_copy(update={"weight": 2.0}))
    assert dataset.path is None


def test_validation_data_can_be_a_mixture() -> None:
    Path("my.py").write_text(
        '_base_ = "tiny_full_sample_e1"\nval_dataloader = dict(dataset=dict(mixture=[dict(part="alpaca_enzh")]))\n'
    )

    found = loading.load("./my.py").config

    assert found.val_dataloader is not None
    assert len(found.val_dataloader.dataset.mixture or ()) == 2
    assert found.train_dataloader.dataset.mixture is None


def test_a_standalone_file_of_a_mixture_is_the_same_recipe() -> None:
    whole = loading.load("tiny_full_lawyer_e1")
    Path("whole.py").write_text(whole.standalone(), encoding="utf-8")

    assert loading.load("./whole.py").values == whole.values


def test_files_of_a_mixture_are_checked_each_by_its_place(tmp_path: Path) -> None:
    Path("good.jsonl").write_text("{}\n")
    made = "dict(part='alpaca'), dict(path='good.jsonl'), dict(path='god.jsonl')"

    with refused(DataError, "train_dataloader.dataset.mixture[2].path") as caught:
        path_checks.check_data(loading.load(write(f"mixture=[{made}]")).config)

    assert "good.jsonl" in str(caught.value.fix)


def test_paths_of_a_mixture_are_anchored(tmp_path: Path) -> None:
    Path("here.jsonl").write_text("{}\n")
    made = "dict(part='alpaca'), dict(path='here.jsonl'), dict(path='*.jsonl'), dict(path='hf://datasets/a/b/*.json')"

    found = loading.anchored(loading.load(write(f"mixture=[{made}]")), "none").config.train_dataloader.dataset

    assert [share.path for share in found.mixture or ()] == [
        *("tatsu-lab/alpaca", str(tmp_path / "here.jsonl"), str(tmp_path / "*.jsonl"), "hf://datasets/a/b/*.json")
    ]


def test_a_pattern_is_data_where_a_file_matches_it(tmp_path: Path) -> None:
    config = loaded("tiny_full_sample_e1", data="data/*.jsonl").config

    with refused(DataError, "train_dataloader.dataset.path"):
        path_checks.check_data(config)

    Path("data").mkdir()
    Path("data/a.jsonl").write_text("{}\n")
    path_checks.check_data(config)


def test_files_on_the_hub_are_not_local() -> None:
    assert paths.local("hf://datasets/owner/name/*.parquet") is None
    path_checks.check_data(loading.load("tiny_full_medical_e1").config)
