"""Every data-set part reads a row as its data set is published, into what an objective learns from."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.configs.rows_of_parts import ROWS
from tests.each import each
from tuner import paths
from tuner.data import formats
from tuner.data.sample import Feedback, Pair, lacks
from tuner.data.sample_kinds import for_objective
from tuner.recipes import catalog, loading
from tuner.recipes.schema import Dataset, RecipeConfig, Rows

# Their rows are the package's own files, or the user's, of any shape.
WITHOUT_ROWS = {"custom", "finetune_custom_dataset", "json", "sample", "sample_images", "sample_preferences"}
OBJECTIVES = {Pair: "dpo", Feedback: "kto", str: "pretrain"}
PARTS = sorted(set(catalog.names("datasets")) - WITHOUT_ROWS)


@cache
def config_with(name: str) -> RecipeConfig:
    return loading.load(f"tiny_full_{name}_e1").config


def dataset_of(name: str) -> Dataset:
    return config_with(name).train_dataloader.dataset


def sets_of(name: str) -> list[tuple[Rows, dict[str, Any]]]:
    dataset, made = dataset_of(name), ROWS[name]
    return list(zip(dataset.data_sets, made if isinstance(made, list) else [made], strict=True))


def test_there_is_a_row_for_every_part() -> None:
    assert set(ROWS) == set(PARTS)


@each(PARTS)
def test_a_published_row_becomes_a_sample_that_teaches(name: str) -> None:
    for rows, row in sets_of(name):
        assert rows.format is not None

        sample = formats.read_sample(rows.format, row, name, columns=rows.columns, system=rows.system)
        objective = OBJECTIVES.get(type(sample), "sft")

        assert not lacks(sample)
        assert for_objective(sample, objective, rows.format, name) == (sample,)


@each(PARTS)
def test_a_part_that_sets_an_objective_sets_the_one_of_its_rows(name: str) -> None:
    objective = config_with(name).objective.type

    for rows, row in sets_of(name):
        sample = formats.read_sample(str(rows.format), row, name, columns=rows.columns, system=rows.system)
        assert objective in ("sft", OBJECTIVES.get(type(sample)))


def read(name: str, number: int = 0) -> Any:
    rows, row = sets_of(name)[number]
    return formats.read_sample(str(rows.format), row, name, columns=rows.columns, system=rows.system)


def said(name: str, number: int = 0) -> list[str]:
    return [turn["content"] for turn in read(name, number).messages]


def test_columns_fill_the_question_and_the_answer() -> None:
    assert said("alpaca_zh") == ["为什么？", "因为。"]
    assert said("openorca") == ["Why?", "Because."]
    assert said("dolly_15k") == ["Why?\nIt is so.", "Because."]
    assert said("dolphin") == ["You are helpful.", "Why?", "Because."]
    assert said("limo") == ["1 + 1?", "It is 2."]
    assert said("s1k") == ["1 + 1?", "<think>\nHmm.\n</think>\n\nIt is 2."]
    assert said("synthetic_text_to_sql") == ["CREATE TABLE t (a INT);\n\nHow many?", "SELECT COUNT(*) FROM t;"]


@pytest.mark.parametrize(
    "name", ["arxiv_gentitle", "code_alpaca", "colorist", "lawyer", "medical", "sql", "tiny_codes", "samsum", "billsum"]
)
def test_a_data_set_that_names_no_task_has_a_system_turn_that_does(name: str) -> None:
    assert read(name).messages[0]["role"] == "system"


def test_the_better_answer_of_a_pair_is_the_chosen_one() -> None:
    for name in ("hh_rlhf", "stanford_shp", "pku_saferlhf", "stack_exchange_paired", "dpo_en", "orpo_dpo_mix_40k"):
        pair = read(name)
        assert [pair.prompt[-1]["content"], pair.chosen[-1]["content"]] == ["Why?", "Because."], name


def test_tools_and_their_calls_reach_the_conversation() -> None:
    called = read("glaive_function_calling")
    assert [turn["role"] for turn in called.messages] == ["user", "assistant", "tool", "assistant"]
    assert called.messages[1]["tool_calls"][0]["function"]["name"] == "weather"
    assert called.tools
    assert read("xlam_function_calling").tools


@each(catalog.names("datasets"))
def test_a_part_says_in_one_line_what_it_is(name: str) -> None:
    summary = catalog.summary(catalog.part_file("datasets", name))

    assert summary.endswith(".")
    assert len(summary) < 120


@each(catalog.names("datasets"))
def test_a_part_limits_no_rows(name: str) -> None:
    """A mixture takes a part's rows without its limit, so one there would be lost."""
    assert dataset_of(name).max_rows is None


@each(PARTS)
def test_a_part_names_the_hub_or_a_file_that_is_to_be_fetched(name: str) -> None:
    for rows, _ in sets_of(name):
        assert rows.path is None or paths.local(rows.path) is None or rows.path.startswith("./data/")


# XTuner's data sets and what its recipes set for them.
@pytest.mark.parametrize(
    ("name", "max_length", "packing"),
    [
        ("oasst1", 2048, True),
        ("oasst1_512", 512, False),
        ("msagent_react", 2048, False),
        ("moss_sft_all", 2048, False),
        ("moss_sft_plugins", 2048, False),
        ("pgbooks", 65536, False),
        ("finetune_custom_dataset", 32768, True),
        ("alpaca_enzh_oasst1", 2048, True),
    ],
)
def test_lengths_are_those_of_xtuner(name: str, max_length: int, packing: bool) -> None:
    dataset = dataset_of(name)

    assert (dataset.max_length, dataset.packing) == (max_length, packing)


def test_a_mixture_of_parts_is_their_rows() -> None:
    shares = dataset_of("alpaca_enzh_oasst1").mixture

    assert shares is not None
    assert [share.path for share in shares] == [
        *("tatsu-lab/alpaca", "silk-road/alpaca-data-gpt4-chinese", "timdettmers/openassistant-guanaco")
    ]
