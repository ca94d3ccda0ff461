"""The formulas count as many parameters as transformers builds from the same facts, to the last one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from tests.each import each
from tests.fit.built import built, on_meta
from tests.fit.recipes import lightest
from tests.fit.small import SMALL, small
from tuner.errors import ModelError
from tuner.fit import parameters
from tuner.fit.families import FAMILIES
from tuner.fit.parameters import active_parameters, has_formula, largest_weight, num_parameters
from tuner.lab.shrink import config_of
from tuner.recipes import catalog
from tuner.recipes.recipe_file import read_part
from tuner.recipes.schema.architecture import Architecture


def _native_parts() -> list[tuple[str, Architecture]]:
    parts = ((name, read_part("models", name).values) for name in catalog.names("models"))
    return [
        (name, Architecture(**values["architecture"]))
        for name, values in parts
        if values.get("architecture") and not values["model"].get("remote_code")
    ]


NATIVE = dict(_native_parts())
COUNTED = {part: facts for part, facts in NATIVE.items() if has_formula(facts)}
"""The others are measured: tests/lab/test_measuring.py."""
ARCHITECTURES = {facts.model_dump_json(): part for part, facts in COUNTED.items()}
"""A part of each architecture: a base model and its chat model are the same one."""


@each(SMALL)
def test_the_count_is_that_of_the_built_model(facts: Architecture) -> None:
    assert num_parameters(facts) == built(facts)


@each(SMALL)
def test_the_largest_weight_is_that_of_the_built_model(facts: Architecture) -> None:
    recipe = lightest("internlm2_chat_7b_full_oasst1_e3")

    assert largest_weight(recipe, facts) == max(weight.numel() for weight in on_meta(facts).parameters())


def test_every_formula_is_held_against_two_built_models() -> None:
    assert sorted(facts.model_type for facts in SMALL) == sorted([*FAMILIES, *FAMILIES])


def _counted_llm(facts: Architecture) -> int:
    return num_parameters(facts) - sum(parameters.of_tower(facts).values())  # test_towers counts the tower


@each({facts.model_type: part for part, facts in COUNTED.items()}.values())
def test_the_count_of_a_shipped_model_of_each_type_is_that_of_the_built_one(part: str) -> None:
    assert _counted_llm(NATIVE[part]) == built(NATIVE[part])


@pytest.mark.long
@each(ARCHITECTURES.values())
def test_the_count_of_every_shipped_model_is_that_of_the_built_one(part: str) -> None:
    assert _counted_llm(NATIVE[part]) == built(NATIVE[part])


READ_BESIDE_ITS_FIELDS = {
    "bloom": {"max_position_embeddings"},  # ALiBi has no such limit: it is the length that BLOOM was trained on
    "gemma4_text": {"global_head_dim", "num_global_key_value_heads"},
    "glm4_moe": {"head_dim"},
    "qwen3_moe": {"head_dim"},
}


@each(NATIVE.items())
def test_every_key_of_a_part_is_one_that_transformers_class_reads(part: str, facts: Architecture) -> None:
    config = type(config_of(facts))
    known = {"model_type", *(field.name for field in dataclasses.fields(config)), *config.attribute_map}

    assert facts.model_dump().keys() - {"vision_config"} <= known | READ_BESIDE_ITS_FIELDS.get(facts.model_type, set())


@each(SMALL)
def test_the_linear_layers_have_the_names_and_sizes_of_the_built_ones(facts: Architecture) -> None:
    counted = parameters.built(facts).all_linears()

    assert sorted((_leaf(linear.name), linear.inputs, linear.outputs) for linear in counted) == sorted(
        _linear_layers(facts)
    )


def _linear_layers(facts: Architecture) -> Iterator[tuple[str, int, int]]:
    model = on_meta(facts)
    for name, module in model.named_modules():
        # Without shared experts, transformers makes them of no width.
        if module is model.get_output_embeddings() or not getattr(module, "weight", torch.empty(0)).numel():
            continue
        if isinstance(module, torch.nn.Linear):
            yield _leaf(name), module.in_features, module.out_features
        elif isinstance(module, Conv1D):
            yield _leaf(name), module.nx, module.nf


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def test_a_layers_shapes_are_those_of_its_linear_layers() -> None:
    shapes = [(linear.inputs, linear.outputs) for linear in parameters.built(small("llama")).layers[-1].linears]

    assert shapes == [(48, 60), (48, 20), (48, 20), (60, 48), (48, 80), (48, 80), (80, 48)]


def test_each_layer_is_counted_as_its_kind() -> None:
    layers = parameters.built(small("deepseek_v3")).layers

    assert [layer.experts is None for layer in layers] == [True, True, False, False]


def test_a_token_passes_through_the_experts_that_it_takes() -> None:
    facts = small("mixtral")
    fewer = Architecture(**{**facts.model_dump(), "num_experts": 2})
    routers = facts.num_hidden_layers * facts.hidden_size

    assert active_parameters(facts) == num_parameters(fewer) + routers
    assert active_parameters(small("llama")) == num_parameters(small("llama"))


def test_published_numbers_of_active_parameters() -> None:
    facts = {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
    facts |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000, "max_position_embeddings": 32768}
    facts |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 14336}
    mixtral = Architecture(model_type="mixtral", tie_word_embeddings=False, **facts)

    assert num_parameters(mixtral) == 46_702_792_704
    assert active_parameters(mixtral) == 12_879_925_248


def test_a_model_type_without_a_formula_is_said_by_name() -> None:
    facts = Architecture(**{**small("mixtral").model_dump(), "model_type": "mixtrall"})

    assert not has_formula(facts)
    with pytest.raises(ModelError, match=r"no formula for model_type 'mixtrall'.*Did you mean 'mixtral'\?"):
        num_parameters(facts)
