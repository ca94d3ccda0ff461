"""Keys that contradict each other are refused by name; what a type always has needs no key."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tests.each import each
from tests.fit.small import SMALL, small
from tests.recipes.loaded import loaded
from tests.refused import refused
from tuner.errors import RecipeError
from tuner.fit.parameters import num_parameters
from tuner.recipes.schema.architecture import LACKS, Architecture
from tuner.recipes.schema.block import CONTRADICTION


def test_what_a_type_always_has_needs_no_key() -> None:
    assert small("qwen2").attention_bias
    assert small("phi").lm_head_bias
    assert small("qwen3_next", full_attention_interval=None).full_attention_interval == 4
    assert not small("llama").attention_bias


def test_a_given_fact_wins_over_what_the_type_has() -> None:
    assert not small("glm4", tied=True).attention_bias


def test_layers_with_experts_begin_after_the_dense_ones_and_come_at_their_step() -> None:
    facts = small("qwen2_moe", num_hidden_layers=6, mlp_only_layers=[0, 1], decoder_sparse_step=2)

    assert [facts.has_experts(layer) for layer in range(6)] == [False, False, False, True, False, True]
    assert not small("llama").has_experts(3)


def test_every_so_many_th_layer_attends_to_all() -> None:
    facts = small("qwen3_next", full_attention_interval=3, num_hidden_layers=6)

    assert [facts.attends_to_all(layer) for layer in range(6)] == [False, False, True, False, False, True]
    assert small("llama").attends_to_all(0)


@pytest.mark.parametrize(
    ("model_type", "wrong", "key"),
    [
        ("llama", {"num_key_value_heads": 4}, "num_key_value_heads"),
        ("mixtral", {"num_experts_per_tok": 4}, "num_experts_per_tok"),
        ("deepseek_v3", {"first_k_dense_replace": 5}, "first_k_dense_replace"),
        ("gemma3n_text", {"num_kv_shared_layers": 5}, "num_kv_shared_layers"),
        ("gemma4_text", {"layer_types": ["full_attention"]}, "layer_types"),
    ],
)
def test_facts_that_contradict_each_other_are_refused_by_name(model_type: str, wrong: dict[str, Any], key: str) -> None:
    with pytest.raises(ValidationError) as caught:
        small(model_type, **wrong)

    assert [(error["type"], error["loc"]) for error in caught.value.errors()] == [(CONTRADICTION, (key,))]


@pytest.mark.parametrize(
    ("model_type", "wrong", "key"),
    [
        ("mixtral", {"num_local_experts": None}, "num_experts"),
        ("qwen3_moe", {"moe_intermediate_size": None, "intermediate_size": None}, "intermediate_size"),
        ("deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank"),
        ("qwen3_next", {"linear_key_head_dim": None}, "linear_key_head_dim"),
        ("gemma3n_text", {"laurel_rank": None}, "laurel_rank"),
    ],
)
def test_a_fact_that_a_type_needs_is_named(model_type: str, wrong: dict[str, Any], key: str) -> None:
    with pytest.raises(ValidationError) as caught:
        small(model_type, **wrong)

    [error] = caught.value.errors()
    assert (error["type"], error["ctx"]) == (LACKS, {"kind": model_type, "key": key})


def test_a_recipe_with_such_facts_is_refused_with_the_key() -> None:
    with refused(RecipeError, "--set architecture.num_key_value_heads=3"):
        loaded("tiny_full_sample_e1", "architecture.num_key_value_heads=3")


def test_keys_that_mean_nothing_to_a_type_change_nothing() -> None:
    facts = small("llama", num_local_experts=8, num_experts_per_tok=2, qk_layernorm=False)

    assert facts.num_experts is None
    assert num_parameters(facts) == num_parameters(small("llama"))


def test_gpt_neox_has_two_norms_in_a_layer_whatever_its_parallel_residual_says() -> None:
    assert num_parameters(small("gpt_neox", use_parallel_residual=True)) == num_parameters(small("gpt_neox"))


def test_a_key_is_written_as_it_was_given() -> None:
    config = {**small("llama").model_dump(), "num_key_value_heads": 3, "mlp_only_layers": [1]}

    assert Architecture(**config).model_dump() == config


@each(SMALL)
def test_facts_survive_being_written_and_read(facts: Architecture) -> None:
    assert Architecture(**facts.model_dump()) == facts


def test_facts_are_the_same_whether_a_list_or_a_tuple_was_written() -> None:
    config = small("llama").model_dump()
    first, second = Architecture(**config, mlp_only_layers=[1]), Architecture(**config, mlp_only_layers=(1,))

    assert first == second
    assert hash(first) == hash(second)
