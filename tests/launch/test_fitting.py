"""The level that `auto` takes where the arithmetic has nothing to say."""

from __future__ import annotations

import pytest

from tests.launch.plans import TINY, made
from tests.machine.gpus import A100, CPU, machine


@pytest.mark.parametrize(("ranks", "level"), [(1, "none"), (2, "deepspeed_zero2"), (8, "deepspeed_zero2")])
def test_a_cpu_takes_no_sharding_alone_and_zero_2_together(ranks: int, level: str) -> None:
    found = made(hardware=CPU, flags={"nproc_per_node": ranks})

    assert found.level == level
    assert found.level_reason and "CPU" in found.level_reason
    assert found.fit is None


def test_a_model_of_unknown_size_takes_zero_3() -> None:
    found = made(recipe=TINY, hardware=machine(A100, A100), model="someone/unknown")

    assert found.level == "deepspeed_zero3"
    assert found.level_reason == "the model's size is unknown"


def test_a_model_without_a_formula_takes_zero_3_and_says_so() -> None:
    found = made("architecture.model_type=mamba", hardware=machine(A100))

    assert found.level == "deepspeed_zero3"
    assert found.level_reason and "no formula" in found.level_reason and "'mamba'" in found.level_reason
