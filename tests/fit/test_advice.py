"""Which level is taken, and what is advised where none fits: every advice is followed and must then fit."""

from __future__ import annotations

import itertools
import re
import shlex

import pytest

from tests.fit.recipes import architecture_of, lightest
from tuner.fit.advice import changes, levels
from tuner.fit.candidates import MARGIN, TIGHT, Candidate, choose
from tuner.fit.gpu_catalog import GPUS
from tuner.fit.levels import Costs, Fit, Machines, Peak
from tuner.fit.step_time import Operations
from tuner.recipes.schema import RecipeConfig

GIB = 2**30


def found(name: str, machines: Machines, *pairs: str) -> list[bool]:
    recipe = lightest(name, *pairs)
    return [fit.fits for fit in levels(recipe, architecture_of(recipe), machines)]


def recommended(recipe: RecipeConfig, machines: Machines) -> Fit | None:
    """Return the level that is taken with the recipe's own split, where no speed is known."""
    fits = levels(recipe, architecture_of(recipe), machines)
    choice = choose(
        [Candidate(recipe, fit, Operations(), None) for fit in fits if fit.level != "none" or machines.world_size == 1]
    )
    return choice.taken.fit if choice else None


def level(name: str, machines: Machines) -> str | None:
    best = recommended(lightest(name), machines)
    return best.level if best else None


@pytest.mark.parametrize(
    ("name", "machines", "expected"),
    [
        ("internlm2_chat_7b_qlora_oasst1_e3", Machines(1, 24 * GIB), "none"),
        ("internlm2_chat_7b_qlora_oasst1_e3", Machines(8, 24 * GIB), "deepspeed_zero1"),
        ("internlm2_chat_7b_full_oasst1_e3", Machines(8, 80 * GIB), "deepspeed_zero1"),
        ("internlm2_chat_7b_full_oasst1_e3", Machines(8, 40 * GIB), "deepspeed_zero2"),
        ("internlm2_chat_7b_full_oasst1_e3", Machines(8, 24 * GIB), "deepspeed_zero3"),
        ("gemma3_27b_it_full_alpaca_e1", Machines(8, GPUS["h100-80g"].memory_bytes), "deepspeed_zero3"),
        ("gemma3_12b_it_lora_alpaca_e1", Machines(1, GPUS["rtx4090"].memory_bytes), "deepspeed_zero3_offload"),
        ("internlm2_chat_7b_full_oasst1_e3", Machines(8, 24 * GIB, host_bytes=100 * GIB), "deepspeed_zero3"),
        ("qwen2_5_72b_instruct_full_oasst1_e3", Machines(8, 80 * GIB, num_nodes=4), "deepspeed_zero3"),
        ("qwen2_5_72b_instruct_full_oasst1_e3", Machines(1, 24 * GIB, host_bytes=64 * GIB), None),
    ],
)
def test_the_lowest_level_that_fits_is_taken(name: str, machines: Machines, expected: str | None) -> None:
    assert level(name, machines) == expected


def test_32768_tokens_of_lora_on_8b_fit_one_h100_since_logits_are_never_whole() -> None:
    of_xtuner = ("adapter.r=64", "lora_dropout=0.1")
    recipe = lightest("qwen3_8b_lora_alpaca_e3", "max_length=32768", "train_dataloader.batch_size=1", *of_xtuner)
    assert recipe.architecture is not None
    best = recommended(recipe, Machines(1, 80 * GIB))

    assert best is not None
    lines = {name: size / GIB for name, size in best.peak.gpu.items()}
    # 36 layers' inputs 9.0 and the mask 1.0; one layer again 7.9, its keys and values copied to all heads 0.4, and its
    # mask in bf16 2.0; 1.75 for its backward.
    assert lines["activations"] == pytest.approx(9.0 + 1.0 + 7.9 + 0.4 + 2.0 + 1.75, abs=0.1)
    assert lines["logits"] == 0, "the tile of logits is gone when a layer's backward runs"
    assert (best.level, lines["weights"]) == ("none", pytest.approx(15.6, abs=0.1))
    assert best.peak.gpu_bytes / GIB == pytest.approx(42.6, abs=0.5)


def test_several_gpus_never_take_stage_0() -> None:
    assert level("tiny_full_sample_e3", Machines(2, 80 * GIB)) == "deepspeed_zero1"
    assert level("tiny_full_sample_e3", Machines(1, 80 * GIB)) == "none"


@pytest.mark.parametrize(
    ("name", "machines"),
    [
        ("qwen2_5_72b_instruct_full_oasst1_e3", Machines(1, 24 * GIB, host_bytes=128 * GIB)),
        ("qwen2_5_7b_instruct_lora_oasst1_e3", Machines(1, 12 * GIB, host_bytes=8 * GIB)),
        ("internlm2_chat_20b_full_oasst1_e3", Machines(2, 40 * GIB, host_bytes=128 * GIB)),
    ],
)
def test_every_change_advised_makes_its_level_fit(name: str, machines: Machines) -> None:
    recipe = lightest(name)
    advised = changes(recipe, architecture_of(recipe), machines)

    assert advised
    for change in advised:
        flags = shlex.split(change.flags)
        pairs = [value for flag, value in itertools.pairwise(flags) if flag == "--set"]
        assert any(found(name, change.machines, *pairs)), change.description


def test_a_change_that_costs_nothing_comes_first_and_alone() -> None:
    machines = Machines(1, 24 * GIB, host_bytes=64 * GIB)
    sets = ("train_dataloader.batch_size=64", "gradient_checkpointing=False")
    big = lightest("qwen2_5_1_5b_instruct_lora_oasst1_e3", *sets)

    (only,) = changes(big, architecture_of(big), machines)
    assert "accumulation" in only.description
    assert re.search(r"batch_size=1\b.*accumulative_counts=1024", only.flags)


def test_a_micro_batch_of_kto_is_made_no_smaller_than_its_loss_takes() -> None:
    sets = ("train_dataloader.batch_size=64", "gradient_checkpointing=False")
    name, machines = "qwen2_5_1_5b_instruct_kto_lora_custom_e1", Machines(1, 24 * GIB, host_bytes=64 * GIB)
    big = lightest(name, *sets)

    (only,) = changes(big, architecture_of(big), machines)
    assert re.search(r"batch_size=2\b.*accumulative_counts=256", only.flags)
    assert any(found(name, machines, *shlex.split(only.flags)[1::2]))


@pytest.mark.parametrize("model", ["qwen3_0_6b", "qwen3_8b", "gemma3_12b_it", "gemma3_27b_it", "llama2_70b"])
def test_no_level_that_offloads_or_is_tight_is_taken_where_a_better_one_fits(model: str) -> None:
    num_taken = 0
    for method, gpu, (gpus, nodes) in itertools.product(
        ("full", "lora", "qlora"), ("rtx4090", "a100-40g", "h100-80g"), ((1, 1), (8, 1), (8, 4))
    ):
        recipe, case = lightest(f"{model}_{method}_alpaca_e1"), (method, gpu, gpus, nodes)
        machines = Machines(gpus, GPUS[gpu].memory_bytes, nodes, 512 * GIB)
        fits = levels(recipe, architecture_of(recipe), machines)[machines.world_size > 1 :]
        best = recommended(recipe, machines)
        rooms = [fit.room for fit in fits if fit.fits and not fit.offloads]
        assert best is not None or not any(fit.fits for fit in fits)
        if best is None:
            continue
        num_taken += 1
        if best.offloads:
            assert not rooms, case
        elif best.room < TIGHT:
            assert best.room == max(rooms), case
        elif best.room < MARGIN:
            assert max(rooms) < MARGIN, case
    assert num_taken


def made_up(level: str, part: float) -> Candidate:
    """Return a level of two GPUs that takes this part of each; one called "swaps" has the optimizer on a disk."""
    config = lightest("tiny_full_sample_e1")
    costs = Costs(3, offload_optimizer=True, optimizer_buffers=4) if level == "swaps" else Costs.of_preset(level, 1)
    return Candidate(
        config,
        Fit(level, costs, Peak({"weights": 100 * part}, {}, 0.0), Machines(2, 100)),
        Operations(),
        None,
    )


@pytest.mark.parametrize(
    ("taken", "level"),
    [
        ({"deepspeed_zero1": 0.89, "deepspeed_zero3": 0.5}, "deepspeed_zero1"),
        ({"deepspeed_zero1": 0.94, "deepspeed_zero3": 0.5}, "deepspeed_zero3"),
        ({"deepspeed_zero1": 0.94, "deepspeed_zero3": 0.92}, "deepspeed_zero1"),
        ({"deepspeed_zero1": 0.998, "deepspeed_zero2": 0.97, "deepspeed_zero3": 0.9}, "deepspeed_zero3"),
        ({"deepspeed_zero1": 0.998, "deepspeed_zero3": 0.97, "deepspeed_zero3_offload": 0.1}, "deepspeed_zero3"),
        ({"deepspeed_zero3_offload": 0.998, "swaps": 0.1}, "deepspeed_zero3_offload"),
        ({"deepspeed_zero3_offload": 1.01, "swaps": 0.1}, "swaps"),
        (
            {"deepspeed_zero3": 1.01, "deepspeed_zero2_offload": 0.99, "deepspeed_zero3_offload": 0.5},
            "deepspeed_zero3_offload",
        ),
    ],
)
def test_a_level_with_little_to_spare_comes_after_one_with_more(taken: dict[str, float], level: str) -> None:
    choice = choose([made_up(name, part) for name, part in taken.items()])

    assert choice and choice.taken.level == level


def test_before_offloading_the_changes_that_need_none_are_named() -> None:
    recipe = lightest("gemma3_12b_it_lora_alpaca_e1")

    first, *others = changes(recipe, architecture_of(recipe), Machines(1, GPUS["rtx4090"].memory_bytes))

    assert "quantization" in first.flags and first.level == "none"
    assert not any(Costs.of_preset(change.level, 1).offload_optimizer for change in others)


def test_no_change_is_advised_that_the_launch_would_refuse() -> None:
    split = lightest("llama2_70b_full_alpaca_e3", "autotp_size=2")
    refused = ("none", "deepspeed_zero2_offload", "deepspeed_zero3_offload")

    advised = changes(split, architecture_of(split), Machines(8, 80 * GIB, host_bytes=4000 * GIB), refused)

    assert advised and not [change for change in advised if "adapter" in change.flags or change.level in refused]
