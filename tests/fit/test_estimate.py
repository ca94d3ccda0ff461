"""A step's memory, line by line, against the published formulas and against cases worked out by hand."""

from __future__ import annotations

import pytest

from tests.fit.published import model_state_bytes
from tests.fit.recipes import architecture_of, lightest
from tuner.fit import activations
from tuner.fit.estimate import frozen_bytes, model_states, peak
from tuner.fit.levels import Costs
from tuner.fit.parameters import Parameters, count, num_parameters, trained_tensors
from tuner.recipes.schema import RecipeConfig, Split
from tuner.recipes.schema.architecture import Architecture
from tuner.recipes.schema.objectives import OBJECTIVES
from tuner.zero.presets import RUNGS

GB = 10**9
FULL, QLORA = (lightest(f"internlm2_chat_7b_{method}_oasst1_e3") for method in ("full", "qlora"))


def facts(recipe: RecipeConfig = FULL) -> Architecture:
    return architecture_of(recipe)


def preset(name: str) -> Costs:
    return Costs.of_preset(name, facts().hidden_size)


def states(level: str, parameters: Parameters, ranks: int) -> float:
    return sum(model_states(FULL, parameters, preset(level), ranks, 2).values())


@pytest.mark.parametrize(("level", "gigabytes"), [("zero1", 38.5), ("zero2", 26.25), ("zero3", 14.0)])
def test_7b_on_8_gpus_needs_what_the_paper_says(level: str, gigabytes: float) -> None:
    assert states(f"deepspeed_{level}", Parameters(trainable=7 * GB), 8) == gigabytes * GB


@pytest.mark.parametrize("level", RUNGS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 64, 1024])
@pytest.mark.parametrize("trainable", [1, 10**6, 7 * GB])
def test_model_states_follow_the_published_formulas(level: str, trainable: int, ranks: int) -> None:
    expected = model_state_bytes(level, trainable, 0, ranks)

    assert states(level, Parameters(trainable), ranks) == pytest.approx(expected)


def test_frozen_weights_are_whole_on_every_gpu_below_stage_3_and_shared_at_it() -> None:
    parameters = Parameters(trainable=0, frozen=8 * GB)

    assert states("deepspeed_zero2", parameters, 8) == 16 * GB
    assert states("deepspeed_zero3", parameters, 8) == 2 * GB


def test_frozen_weights_take_the_bits_that_they_are_stored_in() -> None:
    assert frozen_bytes(Parameters(0, quantized=1000), 2) == 500
    assert frozen_bytes(Parameters(0, quantized=1000, quantized_bits=8), 2) == 1000
    assert [frozen_bytes(Parameters(0, frozen=1000), size) for size in (2, 4)] == [2000, 4000]


@pytest.mark.parametrize("level", RUNGS)
@pytest.mark.parametrize("ranks", [1, 8, 64])
def test_the_states_of_full_training_are_the_published_formulas(level: str, ranks: int) -> None:
    found = peak(FULL, facts(), preset(level), ranks, min(ranks, 8))

    assert found.model_states == pytest.approx(model_state_bytes(level, num_parameters(facts()), 0, ranks))


@pytest.mark.parametrize("level", RUNGS)
def test_the_lines_are_the_states_and_what_comes_on_top(level: str) -> None:
    found = peak(FULL, facts(), preset(level), 8, 8)

    assert sum(found.gpu[key] for key in ("weights", "gradients", "optimizer_states")) == found.model_states
    assert found.gpu_bytes == sum(found.gpu.values()) > found.model_states
    assert all(size >= 0 for size in (*found.gpu.values(), *found.host.values()))


def test_zero_shards_a_frozen_four_bit_base_at_stage_3_alone_and_its_scales_never() -> None:
    parameters = count(QLORA, facts(QLORA))
    scales = parameters.quantized * (1 / 64 + 1 / 4096)
    whole = parameters.quantized / 2 + 2 * parameters.frozen

    second, third = (peak(QLORA, facts(QLORA), preset(name), 8, 8) for name in ("deepspeed_zero2", "deepspeed_zero3"))
    assert second.gpu["weights"] == pytest.approx(whole + scales + 2 * parameters.trainable)
    assert third.gpu["weights"] == pytest.approx(whole / 8 + scales + 2 * parameters.trainable / 8)


def test_without_double_quantization_the_scales_take_a_sixteenth_of_a_byte() -> None:
    single = QLORA.with_values({"quantization.double_quant": False})
    grown = (
        peak(single, facts(), preset("none"), 1, 1).gpu["weights"]
        - peak(QLORA, facts(), preset("none"), 1, 1).gpu["weights"]
    )

    assert grown == pytest.approx(count(QLORA, facts()).quantized * (4 / 64 - 1 / 64 - 1 / 4096))


@pytest.mark.parametrize(
    ("level", "accumulation", "states", "gradients"),
    [
        ("deepspeed_zero2_offload", 16, 14, 6),
        ("deepspeed_zero2_offload", 1, 14, 4),
        ("deepspeed_zero3_offload", 16, 12, 6),
        ("deepspeed_zero3_offload", 1, 12, 6),
    ],
)
def test_offloading_moves_sixteen_to_twenty_bytes_a_trained_parameter_to_the_host(
    level: str, accumulation: int, states: int, gradients: int
) -> None:
    found = peak(FULL.with_values({"optim_wrapper.accumulative_counts": accumulation}), facts(), preset(level), 8, 8)

    assert found.gpu["gradients"] == found.gpu["optimizer_states"] == 0
    assert found.host["optimizer_states"] == pytest.approx(states * num_parameters(facts()))
    assert found.host["gradients"] == pytest.approx(gradients * num_parameters(facts()))


def test_of_an_offloaded_4_bit_base_the_scales_stay_on_the_gpu() -> None:
    here, offloaded = (
        peak(QLORA, facts(), preset(name), 8, 8) for name in ("deepspeed_zero3", "deepspeed_zero3_offload")
    )

    assert offloaded.gpu["weights"] == pytest.approx(count(QLORA, facts()).quantized * (1 / 64 + 1 / 4096))
    assert offloaded.gpu["weights"] + offloaded.host["weights"] / 8 == pytest.approx(here.gpu["weights"])


def test_offloaded_gradients_pass_through_a_buffer_of_the_largest_tensor() -> None:
    at_loss = peak(FULL, facts(), preset("deepspeed_zero2_offload"), 64, 8)

    assert at_loss.gpu["buckets"] == 2 * facts().vocab_size * facts().hidden_size


@pytest.mark.parametrize(
    ("level", "accumulation", "are_there"),
    [("deepspeed_zero1", 2, True), ("deepspeed_zero1", 1, False), ("deepspeed_zero2", 2, False)],
)
def test_at_the_loss_the_buffers_of_gradients_are_those_that_an_earlier_backward_pass_has_left(
    level: str, accumulation: int, are_there: bool
) -> None:
    recipe = FULL.with_values({"train_dataloader.dataset.max_length": 1024, "train_cfg.loss": "whole"})
    recipe = recipe.with_split(Split(64, accumulation, recompute=True))

    few, many = (
        peak(recipe, facts(), preset(level)._replace(reduce_bucket=size), 64, 8).gpu for size in (10**8, 2 * 10**8)
    )

    assert few["logits"] == many["logits"] > 0, "the peak is in the loss"
    assert many["buckets"] - few["buckets"] == 2 * 10**8 * are_there


@pytest.mark.parametrize("level", ["deepspeed_zero1", "deepspeed_zero2"])
def test_the_optimizers_step_has_no_buffers_of_gradients_below_stage_3(level: str) -> None:
    few, many = (peak(FULL, facts(), preset(level)._replace(reduce_bucket=size), 2, 2).gpu for size in (1, 10**8))

    assert few["step"] > 0 and few == many


def tied(recipe: RecipeConfig) -> RecipeConfig:
    return recipe.with_values({"architecture": facts().model_copy(update={"tie_word_embeddings": True})})


def test_the_gradient_of_a_head_that_is_the_embeddings_waits_for_theirs_while_the_layers_compute() -> None:
    recipe = FULL.with_values({"train_dataloader.dataset.max_length": 32_768})
    recipe = recipe.with_split(Split(1, 2, recompute=True))
    vocabulary = 2 * facts().vocab_size * facts().hidden_size

    for level in ("deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3"):
        of_two, of_one = (peak(each, facts(each), preset(level), 64, 8).gpu for each in (recipe, tied(recipe)))
        assert of_two["logits"] == of_one["logits"] == 0, "the peak is in a layer"
        assert of_one["activations"] - of_two["activations"] == vocabulary


@pytest.mark.parametrize("values", [{}, {"train_cfg.trainable_layers": 3}])
def test_no_gradient_waits_where_the_embeddings_are_not_trained_or_are_another_weight(
    values: dict[str, object],
) -> None:
    recipe = FULL.with_values(values)
    with_adapter = lightest("internlm2_chat_7b_lora_oasst1_e3")
    each = [recipe, tied(with_adapter), *([tied(recipe)] if values else [])]

    assert [activations.of_recipe(other, facts(other)).waiting for other in each] == [0.0] * len(each)


def test_a_step_of_few_tokens_and_layers_is_fullest_where_both_gradients_of_one_weight_are() -> None:
    recipe = FULL.with_values({"train_dataloader.dataset.max_length": 128})
    recipe = recipe.with_split(Split(1, 2, recompute=True))
    layer = facts(tied(recipe)).model_copy(update={"num_hidden_layers": 1})
    level = preset("deepspeed_zero2")._replace(reduce_bucket=10**9)

    lines = peak(recipe, layer, level, 8, 8).gpu

    vocabulary = facts().vocab_size * facts().hidden_size
    assert lines["activations"] == 2 * (2 * vocabulary + 128 * facts().hidden_size)


def test_the_norm_of_an_offloaded_gradient_is_computed_in_fp64_on_the_gpu() -> None:
    recipe = FULL.with_values({"train_dataloader.dataset.max_length": 256}).with_split(Split(1, 1, recompute=True))
    level = preset("deepspeed_zero2_offload")
    vocabulary = facts().vocab_size * facts().hidden_size

    for ranks, of_rank in ((8, vocabulary), (32, num_parameters(facts()) / 32)):
        buckets = peak(recipe, facts(), level, ranks, 8).gpu["buckets"]
        both = 2 * (vocabulary + vocabulary)
        assert buckets == pytest.approx(2 * level.reduce_bucket + both + 8 * of_rank)


def test_two_nodes_share_what_one_host_would_hold() -> None:
    one_node, two_nodes = (peak(FULL, facts(), preset("deepspeed_zero3_offload"), 8 * nodes, 8) for nodes in (1, 2))

    assert two_nodes.host["optimizer_states"] == one_node.host["optimizer_states"] / 2
    assert two_nodes.host["weights"] == one_node.host["weights"] / 2


def test_below_stage_3_every_rank_loads_the_whole_model_into_host_memory() -> None:
    second, third = (peak(FULL, facts(), preset(name), 8, 8) for name in ("deepspeed_zero2", "deepspeed_zero3"))

    assert second.host["loading"] == pytest.approx(8 * 2 * num_parameters(facts()))
    assert "loading" not in third.host


@pytest.mark.parametrize(
    ("level", "states_a_parameter"),
    [("none", 20), ("deepspeed_zero2", 2 + 20 / 2), ("deepspeed_zero3", 16 / 2)],
)
def test_the_optimizers_step_holds_fp32_gradients_as_measured(level: str, states_a_parameter: float) -> None:
    """DeepSpeed 0.19.8, two ranks: 20 bytes a parameter at stage 0, 2 + 20/N at stage 2, 16/N + a group at stage 3."""
    found = peak(FULL, facts(), preset(level)._replace(sub_group=2_000_000_000), 2, 2)
    at_step = found.model_states + found.gpu["step"]
    group = 4 * 2_000_000_000 if level == "deepspeed_zero3" else 0

    assert at_step == pytest.approx(states_a_parameter * num_parameters(facts()) + group)


@pytest.mark.parametrize(("stage", "states_a_parameter"), [(2, 2 + 8 / 2), (3, 10 / 2)])
def test_masters_and_moments_in_16_bits_take_half_as_measured(stage: int, states_a_parameter: float) -> None:
    """DeepSpeed 0.19.8, two ranks, after backward: 6 bytes a parameter at stage 2, 5 at stage 3; 9 and 8 with fp32."""
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    costs = Costs.of_config({"zero_optimization": {"stage": stage}, "bf16": bf16})

    assert peak(FULL, facts(), costs, 2, 2).model_states == pytest.approx(states_a_parameter * num_parameters(facts()))


def test_optimizers_hold_what_their_kind_needs() -> None:
    sizes = {}
    for kind in ("AdamW", "Lion", "SGD", "AdamW8bit", "AdEMAMix"):
        recipe = FULL.with_values({"optim_wrapper.optimizer.type": kind})
        sizes[kind] = peak(recipe, facts(), preset("none"), 1, 1).gpu["optimizer_states"] / num_parameters(facts())

    assert sizes == pytest.approx({"AdamW": 12, "Lion": 8, "SGD": 4, "AdamW8bit": 6, "AdEMAMix": 16})


def test_a_final_config_means_the_same_as_the_preset_it_came_from() -> None:
    square = facts().hidden_size ** 2
    config = {
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "reduce_bucket_size": square,
            "stage3_prefetch_bucket_size": int(0.9 * square),
            "stage3_param_persistence_threshold": 10 * facts().hidden_size,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
        }
    }

    assert Costs.of_config(config) == preset("deepspeed_zero3_offload")


@pytest.mark.parametrize("zero", [{}, {"offload_optimizer": None}, {"offload_param": {"device": "none"}}])
def test_a_config_without_the_blocks_has_deepspeeds_defaults(zero: dict[str, object]) -> None:
    costs = Costs.of_config({"zero_optimization": zero})

    assert (costs.stage, costs.offload_optimizer, costs.reduce_bucket) == (0, False, 500_000_000)
    assert costs == Costs.of_config({"zero_optimization": {**zero, "stage": 0}})


def test_a_model_whose_linear_layers_are_all_its_own_has_nothing_to_unpack_from_4_bits() -> None:
    """bitsandbytes leaves Falcon's layers as they are."""
    recipe = lightest("falcon_7b_qlora_alpaca_e1")

    found = peak(recipe, facts(recipe), preset("deepspeed_zero2"), 8, 8)

    assert found.gpu["weights"] > 2 * num_parameters(facts(recipe))


def test_states_on_disks_leave_the_host_their_buffers() -> None:
    zero: dict[str, object] = {"stage": 3, "sub_group_size": 1_000_000, "offload_optimizer": {"device": "nvme"}}
    zero["offload_param"] = {"device": "nvme", "buffer_count": 2, "buffer_size": 3_000_000, "max_in_cpu": 1_000_000}

    host = peak(FULL, facts(), Costs.of_config({"zero_optimization": zero}), 8, 4).host

    assert host["optimizer_states"] == 4 * (4 * 4 * 1_000_000), "four tensors of a sub-group in fp32, on each rank"
    assert host["weights"] == 4 * (2 * (2 * 3_000_000 + 1_000_000))
    assert host["gradients"] == num_parameters(facts()) / 8 * 4 * 2


def test_buffers_of_an_open_size_hold_a_ranks_part_of_the_largest_weight() -> None:
    zero = {"stage": 3, "offload_param": {"device": "nvme", "buffer_count": 3, "max_in_cpu": 0}}

    host = peak(FULL, facts(), Costs.of_config({"zero_optimization": zero}), 8, 4).host

    assert host["weights"] == 4 * 2 * 3 * (facts().vocab_size * facts().hidden_size // 8)


def test_a_single_rank_at_stage_3_has_no_second_copy_of_weights_that_stay_on_its_gpu() -> None:
    on_gpu, offloaded = (
        peak(FULL, facts(), preset(name), 1, 1).gpu for name in ("deepspeed_zero3", "deepspeed_zero3_offload")
    )

    assert on_gpu["gathered_weights"] == 0
    assert offloaded["gathered_weights"] > 0
    assert peak(FULL, facts(), preset("deepspeed_zero3"), 2, 2).gpu["gathered_weights"] > 0


def test_at_stage_2_a_rank_keeps_the_whole_gradients_of_the_tensors_at_its_borders() -> None:
    level = preset("deepspeed_zero2")._replace(reduce_bucket=0)
    by_ranks = {ranks: peak(FULL, facts(), level, ranks, 8).gpu["buckets"] for ranks in (1, 8, 512)}

    in_mlp, share = facts().hidden_size * facts().intermediate_size, num_parameters(facts()) / 512
    vocabulary = facts().vocab_size * facts().hidden_size
    assert by_ranks[1] == pytest.approx(0, abs=1)
    assert 0 < by_ranks[8] <= 2 * 2 * in_mlp, "two tensors of layers"
    assert 2 * (vocabulary - share) <= by_ranks[512] < 2 * (vocabulary + in_mlp), "the head, and one before it"


def test_at_stage_2_the_new_weights_are_passed_on_when_the_fp32_gradients_are_gone() -> None:
    level = preset("deepspeed_zero2")
    few, many = (peak(FULL, facts(), level._replace(allgather_bucket=size), 8, 8) for size in (1, 500_000_000))

    assert few.gpu_bytes == many.gpu_bytes


@pytest.mark.parametrize(
    "name", ["internlm2_chat_7b_full_oasst1_e3", "qwen3_30b_a3b_full_alpaca_e3", "llava_1_5_7b_full_sample_images_e1"]
)
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"model.freeze": ("vision",)},
        {"model.freeze": ("vision", "language")},
        {"train_cfg.trainable_layers": 3},
    ],
)
def test_the_trained_tensors_have_all_trained_parameters_but_norms_and_biases(
    name: str, values: dict[str, object]
) -> None:
    recipe = lightest(name).with_values(values)

    parameters = count(recipe, architecture_of(recipe)).trainable
    assert sum(trained_tensors(recipe, architecture_of(recipe))) == pytest.approx(parameters, rel=2e-3)


def test_with_an_adapter_a_recomputed_step_is_fullest_where_the_embeddings_are_gathered() -> None:
    recipe = QLORA.with_split(Split(1, 1, recompute=True))
    found = peak(recipe, facts(QLORA), preset("deepspeed_zero3"), 8, 8)

    work = activations.of_recipe(recipe, facts(QLORA), 2)
    freed = sum(work.of_layers[:-1])
    assert freed > 0
    assert found.gpu["activations"] == pytest.approx(work.kept + work.at_layer - freed)
    assert found.gpu["gathered_weights"] > 2 * 2 * facts(QLORA).vocab_size * facts(QLORA).hidden_size


def test_generation_at_stage_3_gathers_all_weights_and_keeps_the_keys_and_values_of_a_step() -> None:
    sampled = {"type": "grpo", "rewards": "length", "max_completion_length": 32_768}
    objective = OBJECTIVES["grpo"].model_validate(sampled)
    rows = {"dataset.max_length": 512, "dataset.packing": False, "batch_size": 1}
    recipe = FULL.with_values({f"train_dataloader.{key}": value for key, value in rows.items()})
    recipe = recipe.model_copy(update={"objective": objective, "val_dataloader": None})
    recipe = recipe.with_values({"train_cfg.accumulative_counts": 64, "train_cfg.gradient_checkpointing": True})

    lines = peak(recipe, facts(), preset("deepspeed_zero3"), 8, 8).gpu

    assert lines["gathered_weights"] == 2 * num_parameters(facts())
    of_token = 2 * facts().num_hidden_layers * facts().num_key_value_heads * facts().head_dim * 2
    assert lines["activations"] > recipe.split.accumulation * 33_280 * of_token
    assert peak(recipe, facts(), preset("deepspeed_zero2"), 8, 8).gpu["activations"] == lines["activations"]
