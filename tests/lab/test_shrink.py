"""A small model is of the large one's kind: every type of the catalog, its ratios, its kinds of layers."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, set_seed

from tests.each import each
from tests.fit.built import built
from tuner.lab.shrink import config_of, shrink
from tuner.recipes import catalog
from tuner.recipes.recipe_file import read_part
from tuner.recipes.schema.architecture import Architecture

VOCABULARY = 1664


def of_the_parts() -> dict[str, Architecture]:
    """Return the facts of one part of each model_type."""
    values = (read_part("models", name).values for name in catalog.names("models"))
    found = (Architecture(**part["architecture"]) for part in values if "architecture" in part)
    return {facts.model_type: facts for facts in found}


TYPES = of_the_parts()


def kinds_of_layers(facts: Architecture) -> set[tuple[str, bool]]:
    names = getattr(config_of(facts), "layer_types", None) or [""] * facts.num_hidden_layers
    return {(name, facts.has_experts(layer)) for layer, name in enumerate(names)}


def of_type(model_type: str) -> tuple[Architecture, Architecture]:
    return TYPES[model_type], shrink(TYPES[model_type], VOCABULARY)


@each(TYPES, every=3)
def test_a_small_model_is_built_in_the_shape_of_the_large_one(model_type: str) -> None:
    large, small = of_type(model_type)

    assert small.model_type == large.model_type
    assert small.tie_word_embeddings == large.tie_word_embeddings
    assert small.vocab_size == VOCABULARY
    assert kinds_of_layers(small) == kinds_of_layers(large)
    assert built(small) < 12e6 < built(large)


@each(TYPES)
def test_a_small_model_keeps_the_ratios_of_heads_and_experts(model_type: str) -> None:
    large, small = of_type(model_type)

    groups = large.num_attention_heads // large.num_key_value_heads
    assert small.num_attention_heads // small.num_key_value_heads == min(groups, 8)
    assert small.head_dim % 2 == 0
    assert (small.hidden_size == small.num_attention_heads * small.head_dim) >= (
        large.hidden_size == large.num_attention_heads * large.head_dim
    )
    assert small.num_experts_per_tok == large.num_experts_per_tok
    assert (small.num_experts or 0) >= min(large.num_experts or 0, 4)
    assert bool(small.q_lora_rank) == bool(large.q_lora_rank)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "gemma4_text", "gpt_oss", "internlm2", "qwen3_next"])
def test_a_small_model_learns_from_a_text(model_type: str) -> None:
    _, small = of_type(model_type)
    set_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(small))
    tokens = torch.randint(3, VOCABULARY, (1, 20))

    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()

    assert 6 < loss.item() < 9, "near the logarithm of the vocabulary"
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


def test_layers_that_share_keys_and_values_come_after_one_of_each_kind() -> None:
    large = Architecture(**{**TYPES["gemma4_text"].model_dump(), "num_kv_shared_layers": 3})

    small = shrink(large, VOCABULARY)

    own = small.num_hidden_layers - small.num_kv_shared_layers
    assert small.num_kv_shared_layers > 0
    assert set(config_of(small).layer_types[:own]) == set(config_of(large).layer_types)


def test_a_model_type_that_transformers_lacks_is_told() -> None:
    unknown = Architecture(**{**TYPES["llama"].model_dump(), "model_type": "gone"})

    with pytest.raises(ValueError, match="gone"):
        shrink(unknown, VOCABULARY)
