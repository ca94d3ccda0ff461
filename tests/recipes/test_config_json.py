"""A model folder's config.json gives the facts that planning needs, whoever wrote it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tests.fit.small import SMALL, name_of
from tests.refused import refused
from tuner import assets
from tuner.errors import ModelError
from tuner.fit.parameters import Built, built
from tuner.lab.shrink import config_of
from tuner.recipes.model_facts import read_architecture
from tuner.recipes.recipe_file import read_part
from tuner.recipes.schema.architecture import Architecture

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
}


def facts_of(config: object, folder: Path) -> dict[str, Any] | None:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return read_architecture(folder)


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in LLAMA.items() if key not in keys}


def layers_of(config: object, folder: Path) -> Built:
    """Return the parts of the model whose config.json this is."""
    found = facts_of(config, folder)
    assert found is not None
    return built(Architecture(**found))


@pytest.mark.parametrize("facts", SMALL, ids=name_of)
def test_what_transformers_saves_gives_the_model_it_was_built_from(facts: Architecture, tmp_path: Path) -> None:
    config_of(facts).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    known = {
        *AutoConfig.for_model(facts.model_type).to_dict(),
        "head_dim",
        "per_layer_config",
        "max_position_embeddings",
    }

    found = layers_of({key: value for key, value in saved.items() if key in known | {"per_layer_config"}}, tmp_path)

    assert found == built(facts)


@pytest.mark.parametrize(
    "part", ["internlm2_chat_7b", "qwen3_8b", "gemma_2b_it", "gemma2_9b_it", "mistral_7b_instruct"]
)
def test_a_model_part_says_what_the_saved_model_does(part: str, tmp_path: Path) -> None:
    facts = read_part("models", part).values["architecture"]
    AutoConfig.for_model(**facts).save_pretrained(tmp_path)

    found = read_architecture(tmp_path)
    assert found is not None
    assert built(Architecture(**found)) == built(Architecture(**facts))


def test_the_tiny_model_says_of_itself_what_its_part_says() -> None:
    part = read_part("models", "tiny").values

    found = read_architecture(Path(assets.asset(part["model"]["path"])))
    assert found is not None
    assert found.items() >= part["architecture"].items()


def test_other_keys_are_left_out(tmp_path: Path) -> None:
    assert facts_of({**LLAMA, "rope_theta": 1e6}, tmp_path) == LLAMA


def test_what_older_configs_leave_out_follows_from_the_rest(tmp_path: Path) -> None:
    llama = built(Architecture(**LLAMA))

    assert layers_of(without("head_dim"), tmp_path) == llama
    assert layers_of({**LLAMA, "head_dim": None}, tmp_path) == llama
    every_head = layers_of(without("num_key_value_heads"), tmp_path)
    assert every_head == built(Architecture(**{**LLAMA, "num_key_value_heads": 4}))


def test_embeddings_are_tied_where_the_key_is_left_out_as_in_gemma(tmp_path: Path) -> None:
    assert facts_of(without("tie_word_embeddings"), tmp_path) == {**LLAMA, "tie_word_embeddings": True}


def test_a_model_that_also_sees_tells_of_its_text_half(tmp_path: Path) -> None:
    assert facts_of({"model_type": "llava", "hidden_size": 7, "text_config": LLAMA}, tmp_path) == LLAMA


PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "DeepSeek-V3": (
        {"model_type": "deepseek_v3", "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128}
        | {"qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256, "num_experts_per_tok": 8}
        | {"n_shared_experts": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "moe_layer_freq": 1},
        {"num_experts": 256, "num_experts_per_tok": 8, "head_dim": 192, "q_lora_rank": 1536, "kv_lora_rank": 512}
        | {"shared_expert_intermediate_size": 32, "moe_intermediate_size": 32, "first_k_dense_replace": 1},
    ),
    "Mixtral": (
        {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    ),
    "Llama 4": (
        {"model_type": "llama4_text", "num_local_experts": 16, "num_experts_per_tok": 1, "use_qk_norm": True}
        | {"intermediate_size_mlp": 256, "interleave_moe_layer_step": 2},
        {"num_experts": 16, "num_experts_per_tok": 1, "decoder_sparse_step": 2, "use_qk_norm": False}
        | {"intermediate_size": 256, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128},
    ),
    "gpt-oss": (
        {"model_type": "gpt_oss", "attention_bias": True, "num_local_experts": 32, "num_experts_per_tok": 4},
        {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "attention_bias": True},
    ),
    "GLM 4": ({"model_type": "glm4", "attention_bias": False}, {"attention_bias": False}),
    "Qwen 1.5": ({"model_type": "qwen2", "use_sliding_window": False}, {"attention_bias": True, "mlp_bias": False}),
    "InternLM": ({"model_type": "internlm", "bias": True}, {"attention_bias": True, "mlp_bias": False}),
    "StableLM": (
        {"model_type": "stablelm", "use_qkv_bias": True, "qk_layernorm": False, "use_parallel_residual": False},
        {"attention_bias": True, "mlp_bias": False, "use_qk_norm": False},
    ),
    "Command R+": ({"model_type": "cohere", "use_qk_norm": True}, {"use_qk_norm": True}),
    "GPT-BigCode": (
        {"model_type": "gpt_bigcode", "n_embd": 64, "n_head": 8, "n_layer": 3, "n_inner": 256, "n_positions": 99}
        | dict.fromkeys(("hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings"))
        | {"num_key_value_heads": None, "intermediate_size": None, "head_dim": None, "multi_query": True},
        {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 3, "max_position_embeddings": 99}
        | {"intermediate_size": 256, "num_key_value_heads": 1},
    ),
    "OPT": (
        {"model_type": "opt", "ffn_dim": 256, "word_embed_proj_dim": 64, "intermediate_size": None},
        {"intermediate_size": 256, "word_embed_proj_dim": None, "attention_bias": True, "mlp_bias": True},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_keys_of_published_configs_are_read_in_the_common_names(name: str, tmp_path: Path) -> None:
    config, common = PUBLISHED[name]

    found = facts_of({key: value for key, value in (LLAMA | config).items() if value is not None}, tmp_path)

    assert found is not None
    facts = Architecture(**found)
    assert {key: getattr(facts, key) for key in common} == common


def test_a_falcon_of_2023_is_understood(tmp_path: Path) -> None:
    config = {"model_type": "falcon", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    config |= {"vocab_size": 100, "bias": False, "multi_query": True, "parallel_attn": True, "alibi": False}
    grouped = {"new_decoder_architecture": True, "num_kv_heads": 2}

    def read(*more: dict[str, Any]) -> tuple[int, int, int | None]:
        found = facts_of({key: value for part in (config, *more) for key, value in part.items()}, tmp_path)
        assert found is not None
        facts = Architecture(**found)
        return facts.intermediate_size, facts.num_key_value_heads, facts.num_ln_in_parallel_attn

    assert read() == (256, 1, 1)
    assert read(grouped) == (256, 2, 2)
    assert read(grouped, {"num_ln_in_parallel_attn": 1}) == (256, 2, 1)


def test_a_gemma_3_whose_text_half_says_little_is_understood(tmp_path: Path) -> None:
    half = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}

    found = facts_of({"model_type": "gemma3", "text_config": half, "vision_config": {"hidden_size": 1152}}, tmp_path)

    assert found is not None
    assert (found["num_attention_heads"], found["num_key_value_heads"], found["head_dim"]) == (8, 4, 256)
    assert (found["vocab_size"], found["tie_word_embeddings"]) == (262208, True)


def test_layers_of_two_kinds_are_read_in_any_order(tmp_path: Path) -> None:
    kinds = ["full_attention", "linear_attention"]
    linear = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    linear |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2}

    model = layers_of({**LLAMA, **linear, "model_type": "qwen3_5_text", "layer_types": kinds}, tmp_path)

    first, second = ({weight.name.partition(".")[0] for weight in layer.linears} for layer in model.layers)
    assert (first, second) == ({"self_attn", "mlp"}, {"linear_attn", "mlp"})


def test_layers_without_experts_may_stand_between_the_others(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1]}

    model = layers_of({**LLAMA, **experts, "model_type": "qwen3_moe"}, tmp_path)

    assert [layer.experts is not None for layer in model.layers] == [True, False]


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gemma3n_text", "intermediate_size": [128, 256]},
        {"model_type": "mixtral"},
        {"model_type": "qwen3_next"},
    ],
    ids=str,
)
def test_a_config_without_what_its_type_needs_gives_no_facts(config: dict[str, Any], tmp_path: Path) -> None:
    assert facts_of(LLAMA | config, tmp_path) is None


@pytest.mark.parametrize(
    "config",
    ["", "{", "[]", "null", "3", "[" * 100_000, '{"a": "\ud83d"', {}, without("vocab_size")],
    ids=lambda config: str(config)[:20],
)
def test_what_is_no_whole_config_gives_no_facts(config: object, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(config.encode(errors="replace") if isinstance(config, str) else json.dumps(config).encode())

    assert read_architecture(tmp_path) is None


@pytest.mark.parametrize("name", ["missing", "file", "nul\0", "n" * 300])
def test_what_is_no_folder_gives_no_facts(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    assert read_architecture(tmp_path / name) is None


@pytest.mark.parametrize("heads", [0, "4", True])
def test_a_strange_number_of_heads_is_refused_with_its_file(heads: object, tmp_path: Path) -> None:
    with refused(ModelError, "config.json", "num_attention_heads") as caught:
        facts_of({**without("head_dim"), "num_attention_heads": heads}, tmp_path)

    assert str(caught.value.where).endswith("config.json")
    assert facts_of({**without("head_dim"), "num_attention_heads": None}, tmp_path) is None
