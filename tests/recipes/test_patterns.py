from __future__ import annotations

import itertools
from fnmatch import fnmatchcase

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.recipes import catalog, patterns

PARTS = {
    "models": ("gem_2b", "gem_2b_it", "qwen_8b", "tiny"),
    "methods": ("full", "lora", "qlora"),
    "objectives": ("dpo", "pretrain", "sft"),
    "datasets": ("alpaca", "alpaca_zh", "pairs"),
    "recipes": ("qwen_8b_lora_alpaca_e3", "tiny_full_alpaca"),
}


@pytest.fixture(autouse=True)
def few_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "names", PARTS.__getitem__)


def learners(dataset: str) -> set[str]:
    return {"dpo"} if dataset == "pairs" else {"pretrain", "sft"}


def composed() -> set[str]:
    """Every composed name, the slow way."""
    combinations = itertools.product(*(PARTS[kind] for kind in ("models", "objectives", "methods", "datasets")))
    return {catalog.Parts(*four, 3).name for four in combinations if four[1] in learners(four[3])}


def matching(pattern: str) -> set[str]:
    """What a pattern means, the slow way."""
    stems = {name for name in composed() if fnmatchcase(name.removesuffix("_e3"), pattern)}
    return stems | {name for name in composed() | {*PARTS["recipes"]} if fnmatchcase(name, pattern)}


def expanded(pattern: str) -> list[str]:
    return list(patterns.expand(pattern, 10_000, learners).names)


def test_a_pattern_means_the_names_that_it_matches() -> None:
    assert expanded("gem*_lora_alpaca*") == [
        "gem_2b_lora_alpaca_e3",
        "gem_2b_lora_alpaca_zh_e3",
        "gem_2b_pretrain_lora_alpaca_e3",
        "gem_2b_pretrain_lora_alpaca_zh_e3",
        "gem_2b_it_lora_alpaca_e3",
        "gem_2b_it_lora_alpaca_zh_e3",
        "gem_2b_it_pretrain_lora_alpaca_e3",
        "gem_2b_it_pretrain_lora_alpaca_zh_e3",
    ]


def test_the_epochs_are_the_patterns_or_three() -> None:
    assert expanded("tiny_full_alpaca_e12") == ["tiny_full_alpaca_e12"]
    assert expanded("tiny_full_alpaca_z*") == ["tiny_full_alpaca_zh_e3"]
    assert expanded("tiny_full_alpaca_zh_e*") == ["tiny_full_alpaca_zh_e3"]


def test_a_recipe_of_the_catalog_is_found_once_and_under_its_own_name() -> None:
    assert expanded("tiny_full_alpaca") == ["tiny_full_alpaca", "tiny_full_alpaca_e3"]
    assert expanded("qwen_8b_lora_alpaca") == ["qwen_8b_lora_alpaca_e3"]


def test_an_objective_is_not_put_on_data_that_it_cannot_learn_from() -> None:
    assert expanded("tiny*_lora_*pairs*") == ["tiny_dpo_lora_pairs_e3"]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from(["*", "**", "?", "[ql]", "[!q]", "_", "e3", "qwen", "a", "lora", "_8b_", "t"]), max_size=7)
)
def test_part_by_part_finds_what_the_whole_product_holds(pieces: list[str]) -> None:
    pattern = "".join(pieces)

    found = patterns.expand(pattern, 10_000, learners)

    assert sorted(found.names) == sorted(matching(pattern))
    assert found.total == len(found.names)


def test_all_names_are_counted_where_only_the_first_are_given() -> None:
    found = patterns.expand("*", 2, learners)

    assert len(found.names) == 2
    assert found.total == len(matching("*"))


@pytest.mark.parametrize(
    ("start", "offered"),
    [
        ("", ["gem_2b_", "gem_2b_it_", "qwen_8b_", "qwen_8b_lora_alpaca_e3", "tiny_", "tiny_full_alpaca"]),
        ("gem", ["gem_2b_", "gem_2b_it_"]),
        ("qwen_8b_p", [f"qwen_8b_pretrain_{method}_" for method in PARTS["methods"]]),
        ("qwen_8b_q", ["qwen_8b_qlora_alpaca_e3", "qwen_8b_qlora_alpaca_zh_e3"]),
        ("qwen_8b_dpo_", [f"qwen_8b_dpo_{method}_" for method in PARTS["methods"]]),
        ("qwen_8b_dpo_f", ["qwen_8b_dpo_full_pairs_e3"]),
        ("tiny_lora_alpaca_z", ["tiny_lora_alpaca_zh_e3"]),
        ("tiny_lora_alpaca_zh_e", ["tiny_lora_alpaca_zh_e3"]),
        ("tiny_lora_p", []),
        ("nobody", []),
    ],
)
def test_a_name_is_completed_to_the_end_of_its_next_part(start: str, offered: list[str]) -> None:
    assert patterns.complete(start, learners) == offered


def test_a_step_to_the_next_part_is_never_offered_alone() -> None:
    starts = {name[:length] for name in composed() for length in range(len(name))}

    for start in starts:
        offered = patterns.complete(start, learners)
        assert offered, start
        assert len(offered) > 1 or not offered[0].endswith("_"), start
        assert all(name.startswith(start) for name in offered)
