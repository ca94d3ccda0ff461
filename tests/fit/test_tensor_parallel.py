"""Which runs may split their layers over ranks, what of memory and time that costs, and what the fullest rank has."""

from __future__ import annotations

from typing import cast

import pytest

from tests.fit.recipes import lightest
from tests.fit.test_communication import ZERO3, computing, nodes
from tests.refused import refused
from tuner.errors import ModelError, RecipeError, TunerError
from tuner.fit.candidates import traffic
from tuner.fit.estimate import peak
from tuner.fit.levels import Costs, Machines
from tuner.fit.operations import of_step
from tuner.fit.parameters import built, num_parameters
from tuner.fit.splits import data_parallel_ranks
from tuner.fit.step_time import Traffic, step_time
from tuner.recipes.schema import RecipeConfig
from tuner.recipes.schema.architecture import Architecture
from tuner.recipes.schema.tensor_parallel import SPLIT_BY, heads_of_fullest, of_rank, refuse_across_nodes, uneven_heads

NAME, LORA, HALF = "qwen3_8b_full_alpaca_e3", "qwen3_8b_lora_alpaca_e3", "autotp_size=2"
H100 = Machines(8, 80 * 2**30)


def recipe(*sets: str, name: str = NAME) -> RecipeConfig:
    return lightest(name, *sets)


def facts(**changes: int) -> Architecture:
    return cast("Architecture", recipe().architecture).model_copy(update=changes)


def level(name: str) -> Costs:
    return Costs.of_preset(name, facts().hidden_size)


# Which runs


def test_ranks_that_split_the_layers_count_once() -> None:
    assert data_parallel_ranks(recipe(HALF), 8) == 4
    assert data_parallel_ranks(recipe("autotp_size=8"), 8) == 1


@pytest.mark.parametrize(
    ("name", "sets", "kind", "where"),
    [
        (NAME, ("autotp_size=3",), RecipeError, SPLIT_BY),
        ("qwen3_8b_qlora_alpaca_e3", (HALF,), RecipeError, "quantization"),
        (NAME, (HALF, "sequence_parallel_size=2"), RecipeError, "train_cfg.sequence_parallel_size"),
        ("llama2_7b_dpo_full_custom_e3", (HALF, "train_dataloader.dataset.path=my.jsonl"), RecipeError, SPLIT_BY),
        ("mixtral_8x7b_full_alpaca_e3", (HALF,), ModelError, SPLIT_BY),
        (NAME, (HALF, "torch_compile=True"), RecipeError, "train_cfg.torch_compile"),
        (NAME, (HALF, "tiled_mlp=True"), RecipeError, "train_cfg.tiled_mlp"),
        (NAME, (HALF, "activation_offloading=True"), RecipeError, "train_cfg.activation_offloading"),
        (LORA, (HALF, "lora_dropout=0.1"), RecipeError, "adapter.lora_dropout"),
        (NAME, (HALF, "log.generate=4", "val_split=0.1"), RecipeError, "log.generate"),
        (LORA, (HALF, "use_dora=True"), RecipeError, "adapter"),
        (NAME, (HALF, "neftune_noise_alpha=5"), RecipeError, "objective.neftune_noise_alpha"),
        (NAME, (HALF, "optimizer.type=Muon", "clip_grad=None"), RecipeError, "optim_wrapper.optimizer.type"),
        (LORA, (HALF, "loraplus_lr_ratio=16"), RecipeError, "optim_wrapper.optimizer"),
    ],
)
def test_what_would_not_learn_the_same_or_was_never_tried_is_refused(
    name: str, sets: tuple[str, ...], kind: type[TunerError], where: str
) -> None:
    with refused(kind, where):
        data_parallel_ranks(recipe(*sets, name=name), 8)


def test_a_layer_is_not_split_between_nodes() -> None:
    refuse_across_nodes(recipe(HALF), 4, 2)
    refuse_across_nodes(recipe(HALF), 3, 1)  # `data_parallel_ranks` refuses it
    with refused(RecipeError, SPLIT_BY, 3, 2):
        refuse_across_nodes(recipe(HALF), 3, 2)


# What a rank has


@pytest.mark.parametrize(
    ("query", "keys", "size", "fullest"),
    [(32, 8, 2, (16, 4)), (32, 8, 8, (4, 1)), (32, 8, 3, (12, 3)), (8, 1, 2, (8, 1)), (32, 8, 16, (4, 1))],
)
def test_the_first_rank_has_the_most_heads(query: int, keys: int, size: int, fullest: tuple[int, int]) -> None:
    assert heads_of_fullest(facts(num_attention_heads=query, num_key_value_heads=keys), size) == fullest


def test_heads_that_cannot_be_split_evenly_are_a_warning_with_the_numbers() -> None:
    assert uneven_heads(recipe(HALF)) is None
    assert uneven_heads(recipe()) is None
    one_key = recipe(HALF).model_copy(update={"architecture": facts(num_key_value_heads=1)})
    assert "computes 32 of the 32 heads" in str(uneven_heads(one_key))


def test_a_rank_has_its_part_of_the_layers_and_all_embeddings_and_norms() -> None:
    whole, half = built(facts()), built(of_rank(facts(), 2))

    assert (half.embeddings, half.head, half.others) == (whole.embeddings, whole.head, whole.others)
    linears, of_half = (sum(linear.weights for linear in model.all_linears()) for model in (whole, half))
    assert of_half == linears / 2
    norms, of_half = (sum(layer.parameters for layer in model.layers) for model in (whole, half))
    assert norms - linears == of_half - linears / 2


def test_weights_gradients_and_optimizer_are_split_by_the_layers_and_then_by_zero() -> None:
    config, of_half = recipe(HALF), num_parameters(of_rank(facts(), 2))

    none, zero1, zero3 = (
        peak(config, facts(), level(f"deepspeed_{name}") if name != "none" else level(name), 8, 8)
        for name in ("none", "zero1", "zero3")
    )

    assert none.model_states == pytest.approx(16 * of_half)
    assert zero1.model_states == pytest.approx((4 + 12 / 4) * of_half)
    assert zero3.model_states == pytest.approx(16 * of_half / 4)
    assert none.host["loading"] == pytest.approx(8 * 2 * num_parameters(facts()))  # each rank loads the whole model


def test_an_adapter_is_split_on_the_side_of_its_layer() -> None:
    config = recipe(HALF, name=LORA)
    assert config.adapter
    rank, sizes = config.adapter.r, [(linear.inputs, linear.outputs) for linear in built(facts()).all_linears()]
    names = [linear.name.rpartition(".")[2] for linear in built(facts()).all_linears()]
    assert names[:7] == ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    expected = 0.0
    for name, (inputs, outputs) in zip(names, sizes, strict=True):
        by_rows = name in ("o_proj", "down_proj")
        expected += rank * (inputs / 2 + outputs if by_rows else inputs + outputs / 2)

    assert peak(config, facts(), level("none"), 2, 2).gpu["optimizer_states"] == pytest.approx(12 * expected)


# Time


def test_a_rank_computes_its_part_of_the_layers_and_the_whole_head() -> None:
    whole, half = (of_step(recipe(*sets), facts(), level("none"), 2) for sets in ((), (HALF,)))

    of_head = built(facts()).head.weights
    tokens = whole.matmul_flops / (num_parameters(facts()) - built(facts()).embeddings)
    assert half.matmul_flops < whole.matmul_flops
    assert half.matmul_flops > tokens * of_head
    assert half.attention_flops == whole.attention_flops / 2


def test_each_layer_waits_for_two_sums_forward_and_five_backward() -> None:
    config = recipe(HALF)
    config = config.with_split(config.split._replace(recompute=False))
    tokens = config.split.samples * config.train_dataloader.dataset.max_length

    sent = traffic(config, facts(), H100, level("deepspeed_zero1"))

    of_sum = 2 * tokens * facts().hidden_size  # two ranks: 2 x (2 - 1) / 2 of it
    assert sent.layer_bytes == pytest.approx((2 + 5) * facts().num_hidden_layers * of_sum)
    assert traffic(recipe(), facts(), H100, level("deepspeed_zero1")).layer_bytes == 0


def test_nothing_hides_what_layers_wait_for() -> None:
    volume = Traffic(gather_bytes=1e9, layer_bytes=45e9)

    time = step_time(ZERO3, volume, computing(3.0), nodes(1))

    assert time.visible_communication_s == pytest.approx(volume.layer_bytes / nodes(1).gpu.link_bytes_s)
    assert time.communication_s > time.visible_communication_s
