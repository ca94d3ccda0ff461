"""Which splits of a step a recipe leaves open, and which of them the plan takes."""

from __future__ import annotations

import pytest

from tuner.errors import RecipeError
from tuner.fit.candidates import MARGIN, candidates, choose
from tuner.fit.gpu_catalog import GPUS
from tuner.fit.levels import Costs, Machines
from tuner.fit.splits import possible_splits
from tuner.fit.step_time import Cluster
from tuner.recipes import loading
from tuner.recipes.recipe import Overrides
from tuner.recipes.schema import RecipeConfig, Split

OPEN = "qwen3_8b_full_alpaca_e3"


def config_of(name: str, *sets: str) -> RecipeConfig:
    return loading.load(name, Overrides(pairs=[("--set", text) for text in sets])).config


def batches(config: RecipeConfig, ranks: int = 2) -> list[tuple[int, int]]:
    return list(dict.fromkeys((split.micro_batch, split.accumulation) for split in possible_splits(config, ranks)))


@pytest.mark.parametrize(
    ("name", "sets", "expected"),
    [
        (OPEN, (), [(1, 16), (2, 8), (4, 4), (8, 2), (16, 1)]),
        (OPEN, ("global_batch_size=12",), [(1, 6), (2, 3), (3, 2), (6, 1)]),
        (OPEN, ("train_dataloader.batch_size=4",), [(4, 16)]),
        (OPEN, ("accumulative_counts=4",), [(1, 4)]),
        (OPEN, ("global_batch_size=16", "accumulative_counts=4"), [(2, 4)]),
        (OPEN, ("train_dataloader.batch_size=3", "accumulative_counts=5"), [(3, 5)]),
        ("qwen3_8b_online_dpo_lora_custom_e1", ("global_batch_size=12", "accumulative_counts=auto"), [(2, 3), (6, 1)]),
        # One of XTuner's own names, and losses that depend on who shares a micro-batch.
        ("internlm2_chat_7b_qlora_oasst1_e3", (), [(1, 16), (2, 8), (4, 4), (8, 2), (16, 1)]),
        (
            "qwen3_8b_kto_lora_custom_e1",
            ("train_dataloader.batch_size=auto", "accumulative_counts=auto", "global_batch_size=32"),
            [(2, 8)],
        ),
        ("qwen3_8b_dpo_lora_custom_e1", ("loss_type=aot", "accumulative_counts=auto"), [(2, 8)]),
    ],
)
def test_a_recipe_leaves_the_splits_of_its_global_batch_open(
    name: str, sets: tuple[str, ...], expected: list[tuple[int, int]]
) -> None:
    assert batches(config_of(name, *sets)) == expected


@pytest.mark.parametrize(
    ("sets", "ranks", "said"),
    [
        (("global_batch_size=6",), 4, "a global batch of 6 cannot be split evenly over 4 ranks"),
        (("global_batch_size=16", "train_dataloader.batch_size=3"), 2, "16 is not 3 x auto x 2 ranks"),
        (
            ("global_batch_size=16", "train_dataloader.batch_size=2", "accumulative_counts=2"),
            2,
            "global_batch_size = 16 is not 2 x 2 x 2 ranks",
        ),
    ],
)
def test_a_global_batch_that_does_not_divide_is_refused_with_the_numbers(
    sets: tuple[str, ...], ranks: int, said: str
) -> None:
    with pytest.raises(RecipeError, match=said):
        possible_splits(config_of(OPEN, *sets), ranks)


def taken(name: str, level: str, gpu: str, gpus: int, nodes: int = 1, *sets: str) -> tuple[Split | None, float]:
    """Return the split that the plan takes, and the part of each GPU that it leaves."""
    config, machines = config_of(name, *sets), Machines(gpus, GPUS[gpu].memory_bytes, nodes)
    assert config.architecture is not None
    preset = Costs.of_preset(level, config.architecture.hidden_size)
    splits = possible_splits(config, machines.world_size)
    cluster = Cluster(nodes, GPUS[gpu], gpus)
    choice = choose(candidates(config, config.architecture, machines, {level: [preset]}, splits, cluster))
    if choice is None:
        return None, 0.0
    return choice.taken.split, choice.taken.fit.room


def test_what_fits_without_is_not_computed_again() -> None:
    split, room = taken("qwen3_8b_lora_alpaca_e3", "deepspeed_zero1", "h100-80g", 8)

    assert split == Split(2, 8, recompute=False)
    assert room >= MARGIN


def test_what_must_be_is_computed_again_and_then_in_the_largest_micro_batches() -> None:
    split, room = taken("qwen3_8b_qlora_alpaca_e3", "none", "rtx4090", 1)

    assert split == Split(8, 2, recompute=True)
    assert room >= MARGIN


def test_where_the_network_is_slower_than_the_arithmetic_recomputing_in_fewer_rounds_is_faster() -> None:
    flash = "model.attn_implementation=flash_attention_2"
    on_one_gpu, _ = taken("qwen3_32b_full_alpaca_e3", "deepspeed_zero3", "h200", 8, 1, flash)
    many, _ = taken("qwen3_32b_full_alpaca_e3", "deepspeed_zero3", "h200", 8, 8, flash)

    assert on_one_gpu is not None and not on_one_gpu.recompute
    assert many is not None and many.recompute and many.micro_batch > on_one_gpu.micro_batch


def test_where_nothing_fits_nothing_is_taken() -> None:
    assert taken(OPEN, "none", "rtx4090", 1)[0] is None
