"""The level that `auto` takes where the arithmetic has nothing to say."""

from __future__ import annotations

import json

import pytest

from tests.launch.plans import TINY, made
from tests.machine.gpus import A100, CPU, H200, machine
from tests.refused import refused
from tuner.errors import RecipeError
from tuner.launch import render
from tuner.machine.hardware import Gpu, Hardware


@pytest.mark.parametrize(("ranks", "level"), [(1, "none"), (2, "deepspeed_zero2"), (8, "deepspeed_zero2")])
def test_a_cpu_takes_no_sharding_alone_and_zero_2_together(ranks: int, level: str) -> None:
    found = made(hardware=CPU, flags={"nproc_per_node": ranks})

    assert found.level == level
    assert found.level_and_split.level_reason and "CPU" in found.level_and_split.level_reason
    assert found.fit is None


@pytest.mark.parametrize(
    ("sets", "model", "reason"),
    [((), "someone/unknown", "size is unknown"), (["architecture.model_type=mamba"], None, "model_type 'mamba'")],
)
def test_a_model_of_unknown_size_takes_zero_3_and_says_so(sets: list[str], model: str | None, reason: str) -> None:
    found = made(*sets, hardware=machine(A100, A100), model=model)

    assert found.level == "deepspeed_zero3"
    assert found.level_and_split.level_reason and found.level_and_split.level_reason.endswith(reason)


# How the loss is computed

GPU_8B = "llama3_1_8b_lora_alpaca_e3"


@pytest.mark.parametrize(
    ("sets", "recipe", "hardware", "loss"),
    [
        ((), TINY, CPU, "chunked"),
        (("torch_compile=True",), TINY, CPU, "whole"),
        (("train_dataloader.batch_size=8",), "tiny_dpo_full_sample_preferences_e1", CPU, "whole"),
        (("train_dataloader.batch_size=2",), GPU_8B, machine(A100), "chunked"),
        (("train_dataloader.batch_size=2", "torch_compile=True"), GPU_8B, machine(A100), "whole"),
        (
            ("train_dataloader.batch_size=16", "max_length=8192", "packing=False", "torch_compile=True"),
            *(GPU_8B, machine(H200), "chunked"),
        ),
        (("architecture.model_type=mamba",), TINY, machine(A100), "chunked"),
        (("loss=chunked",), TINY, CPU, "chunked"),
        ((), "tiny_orpo_full_sample_preferences_e1", CPU, "auto"),
    ],
)
def test_logits_are_whole_on_a_cpu_or_compiled_where_chunks_compute_them_twice_and_the_fit_counts_what_is_taken(
    sets: tuple[str, ...], recipe: str, hardware: Hardware, loss: str
) -> None:
    found = made(*sets, recipe=recipe, hardware=hardware, ignore_fit=True)

    assert found.recipe.config.train_cfg.loss == loss
    assert f'loss="{loss}"' in render.files(found)["recipe.py"]
    if loss == "whole":
        assert found.recipe.origins["train_cfg.loss"].text.startswith("derived: the full logits fit")
    if found.fit:
        chunked = made(*sets, "loss=chunked", recipe=recipe, hardware=hardware, ignore_fit=True)
        assert chunked.fit
        assert (found.fit.peak.gpu_bytes > chunked.fit.peak.gpu_bytes) == (loss == "whole")


def test_another_way_to_compute_a_loss_that_has_one_alone_is_refused() -> None:
    with refused(RecipeError, "--set loss=chunked", "orpo"):
        made("loss=chunked", recipe="tiny_orpo_full_sample_preferences_e1")


# What a GPU's use is worked out with


def arithmetic(*sets: str, recipe: str = "llama2_7b_full_alpaca_e3", hardware: object = None) -> object:
    found = made(*sets, recipe=recipe, hardware=hardware or machine(A100, H200), deepspeed="zero3", ignore_fit=True)
    return json.loads(render.files(found)["run.json"])["arithmetic"]


def test_full_training_takes_6_flops_a_parameter_and_an_adapter_little_more_than_4() -> None:
    whole, adapted = arithmetic(), arithmetic(recipe="llama2_7b_lora_alpaca_e3")

    assert whole == {"flops_per_token": 6 * 6_738_415_616, "peak_flops_per_gpu": 312e12}, "the slower GPU's"
    assert 4 < adapted["flops_per_token"] / 6_738_415_616 < 4.1  # type: ignore[index]


@pytest.mark.parametrize(
    ("sets", "hardware"),
    [
        ((), CPU),
        ((), machine(A100, Gpu("NVIDIA Q9000", 80 << 30, (9, 9)))),
        (("optim_wrapper.dtype=fp32",), machine(A100)),
        (("architecture.model_type=mamba",), machine(A100)),
    ],
)
def test_where_a_part_is_not_known_nothing_is_claimed(sets: tuple[str, ...], hardware: object) -> None:
    assert arithmetic(*sets, hardware=hardware) is None


@pytest.mark.parametrize(("batch_size", "loss"), [(2, "whole"), (3, "chunked")])
def test_batches_of_a_validation_that_are_larger_than_twice_those_of_training_are_computed_in_tiles(
    batch_size: int, loss: str
) -> None:
    sizes = ("train_dataloader.batch_size=1", f"val_dataloader.batch_size={batch_size}")
    found = made(*sizes, recipe="tiny_dpo_full_sample_preferences_e1")

    assert found.recipe.config.train_cfg.loss == loss


# Recomputation of some layers


def test_as_few_layers_are_recomputed_as_leave_a_tenth_of_the_gpu_free() -> None:
    recipe, gpu = "llama3_8b_instruct_qlora_alpaca_e3", machine(Gpu("NVIDIA GeForce RTX 4090", 24 << 30, (8, 9)))
    found = made("recomputed_layers=auto", recipe=recipe, hardware=gpu)
    split = found.recipe.config.split
    assert found.fit and split.recomputed_layers
    fewer, every = (
        made("gradient_checkpointing=True", f"recomputed_layers={number}", recipe=recipe, hardware=gpu, ignore_fit=True)
        for number in (split.recomputed_layers - 1, None)
    )

    assert 1 < split.recomputed_layers < 32
    assert fewer.fit and every.fit and fewer.fit.room < 0.1 <= found.fit.room < every.fit.room
    assert every.recipe.config.split.recomputed_layers is None


@pytest.mark.parametrize("sets", [("gradient_checkpointing=True", "recomputed_layers=auto"), ()])
def test_a_recipe_that_asks_for_all_layers_recomputes_all(sets: tuple[str, ...]) -> None:
    gpu = machine(Gpu("NVIDIA GeForce RTX 4090", 24 << 30, (8, 9)))
    split = made(*sets, recipe="llama3_8b_instruct_qlora_alpaca_e3", hardware=gpu).recipe.config.split

    assert split.recompute and split.recomputed_layers is None


@pytest.mark.parametrize(
    ("sets", "key", "decides"),
    [
        (("gradient_checkpointing=True", "recomputed_layers=auto"), "recomputed_layers", "gradient_checkpointing is"),
        (("gradient_checkpointing=auto", "recomputed_layers=1"), "gradient_checkpointing", "recomputed_layers is 1"),
    ],
)
def test_which_layers_are_recomputed_has_its_true_reason(sets: tuple[str, ...], key: str, decides: str) -> None:
    found = made(*sets, "train_dataloader.batch_size=1", "optim_wrapper.accumulative_counts=2", hardware=machine(A100))

    assert decides in found.recipe.origins[f"train_cfg.{key}"].text


AUTO = ("train_dataloader.batch_size=auto", "accumulative_counts=auto")


def test_a_micro_batch_whose_size_changes_what_is_learned_has_that_as_its_reason() -> None:
    origins = made(*AUTO, recipe="tiny_kto_lora_sample_preferences_e1", hardware=CPU).recipe.origins

    assert "changes what is learned" in origins["train_dataloader.batch_size"].text
    assert "per rank and step" in origins["optim_wrapper.accumulative_counts"].text


def test_a_number_of_layers_asks_for_recomputation_and_contradicts_none() -> None:
    assert made("recomputed_layers=1", "gradient_checkpointing=auto").recipe.config.split[2:] == (True, 1)
    with refused(RecipeError, "--set recomputed_layers=1", "train_cfg.gradient_checkpointing"):
        made("recomputed_layers=1", "gradient_checkpointing=False")
