"""A model folder's config.json gives the facts that planning needs, whoever wrote it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tests.fit.built import config_of
from tests.fit.small import SMALL, name_of
from tuner.recipes import catalog
from tuner.recipes.architecture import Architecture
from tuner.recipes.config_json import read_facts
from tuner.recipes.part import read_part

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
    return read_facts(folder)


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in LLAMA.items() if key not in keys}


@pytest.mark.parametrize("facts", SMALL, ids=name_of)
def test_what_transformers_saves_gives_the_facts_it_was_built_from(facts: Architecture, tmp_path: Path) -> None:
    config = config_of(facts)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    # Words of ours that this class does not know, but keeps and writes.
    known = {*AutoConfig.for_model(facts.model_type).to_dict(), "head_dim", "max_position_embeddings"}
    foreign = Architecture.model_fields.keys() - known

    found = facts_of({key: value for key, value in saved.items() if key not in foreign}, tmp_path)

    assert found == facts.model_dump()


@pytest.mark.parametrize(
    "part", ["internlm2_chat_7b", "qwen3_8b", "gemma_2b_it", "gemma2_9b_it", "mistral_7b_instruct"]
)
def test_a_model_part_says_what_the_saved_model_does(part: str, tmp_path: Path) -> None:
    facts = read_part("models", part).values["architecture"]
    AutoConfig.for_model(**facts).save_pretrained(tmp_path)

    assert read_facts(tmp_path) == facts


def test_the_tiny_model_says_of_itself_what_its_part_says() -> None:
    part = read_part("models", "tiny").values

    assert read_facts(Path(catalog.asset(part["model"]["path"]))) == part["architecture"]


def test_other_keys_are_left_out(tmp_path: Path) -> None:
    assert facts_of({**LLAMA, "rope_theta": 1e6}, tmp_path) == LLAMA


def test_facts_that_older_configs_leave_out_follow_from_the_others(tmp_path: Path) -> None:
    assert facts_of(without("head_dim"), tmp_path) == LLAMA
    assert facts_of({**LLAMA, "head_dim": None}, tmp_path) == LLAMA
    assert facts_of(without("num_key_value_heads"), tmp_path) == {**LLAMA, "num_key_value_heads": 4}


def test_embeddings_are_tied_where_the_key_is_left_out_as_in_gemma(tmp_path: Path) -> None:
    assert facts_of(without("tie_word_embeddings"), tmp_path) == {**LLAMA, "tie_word_embeddings": True}


def test_a_model_that_also_sees_tells_of_its_text_half(tmp_path: Path) -> None:
    assert facts_of({"model_type": "llava", "hidden_size": 7, "text_config": LLAMA}, tmp_path) == LLAMA


PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "DeepSeek-V3": (
        {"model_type": "deepseek_v3", "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128}
        | {"qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256, "num_experts_per_tok": 8}
        | {"n_shared_experts": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "moe_layer_freq": 1},
        {"model_type": "deepseek_v3", "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128}
        | {"qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 256, "num_experts_per_tok": 8, "head_dim": 192}
        | {"shared_expert_intermediate_size": 32, "moe_intermediate_size": 32, "num_dense_layers": 1},
    ),
    "Mixtral": (
        {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
        {"model_type": "mixtral", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    ),
    "Llama 4": (
        {"model_type": "llama4_text", "num_local_experts": 16, "num_experts_per_tok": 1, "use_qk_norm": True}
        | {"intermediate_size_mlp": 256, "interleave_moe_layer_step": 2},
        {"model_type": "llama4_text", "num_experts": 16, "num_experts_per_tok": 1, "decoder_sparse_step": 2}
        | {"intermediate_size": 256, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128},
    ),
    "Qwen3-Next": (
        {"model_type": "qwen3_next", "full_attention_interval": 4, "decoder_sparse_step": 1, "mlp_only_layers": []},
        {"model_type": "qwen3_next"},
    ),
    "gpt-oss": (
        {"model_type": "gpt_oss", "attention_bias": True, "num_local_experts": 32, "num_experts_per_tok": 4},
        {"model_type": "gpt_oss", "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 128},
    ),
    "GLM 4": ({"model_type": "glm4", "attention_bias": False}, {"model_type": "glm4", "attention_bias": False}),
    "Qwen 1.5": ({"model_type": "qwen2", "use_sliding_window": False}, {"model_type": "qwen2"}),
    "InternLM": ({"model_type": "internlm", "bias": True}, {"model_type": "internlm"}),
    "StableLM": (
        {"model_type": "stablelm", "use_qkv_bias": True, "qk_layernorm": False, "use_parallel_residual": False},
        {"model_type": "stablelm", "attention_bias": True},
    ),
    "Command R+": ({"model_type": "cohere", "use_qk_norm": True}, {"model_type": "cohere", "use_qk_norm": True}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_words_of_published_configs_are_understood(name: str, tmp_path: Path) -> None:
    words, facts = PUBLISHED[name]

    assert facts_of(LLAMA | words, tmp_path) == LLAMA | facts


def test_a_falcon_of_2023_is_understood(tmp_path: Path) -> None:
    words = {"model_type": "falcon", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    words |= {"vocab_size": 100, "bias": False, "multi_query": True, "parallel_attn": True, "alibi": False}
    first = {**LLAMA, "model_type": "falcon", "intermediate_size": 256, "num_key_value_heads": 1}
    first |= {"tie_word_embeddings": True, "max_position_embeddings": 2048}
    grouped = {"new_decoder_architecture": True, "num_kv_heads": 2}

    assert facts_of(words, tmp_path) == first
    second = {**first, "num_key_value_heads": 2, "num_ln_in_parallel_attn": 2}
    assert facts_of(words | grouped, tmp_path) == second
    assert facts_of(words | grouped | {"num_ln_in_parallel_attn": 1}, tmp_path) == {**first, "num_key_value_heads": 2}


def test_a_gpt_of_the_first_generation_is_understood(tmp_path: Path) -> None:
    words = {"model_type": "gpt_bigcode", "n_embd": 64, "n_head": 4, "n_layer": 2, "n_inner": 256, "n_positions": 512}
    facts = {**LLAMA, "model_type": "gpt_bigcode", "intermediate_size": 256, "num_key_value_heads": 1}

    found = facts_of(words | {"vocab_size": 100, "multi_query": True}, tmp_path)

    assert found == facts | {"tie_word_embeddings": True}


def test_an_opt_with_narrow_embeddings_is_understood(tmp_path: Path) -> None:
    words = {**without("intermediate_size", "head_dim", "num_key_value_heads"), "model_type": "opt", "ffn_dim": 128}
    facts = {**LLAMA, "model_type": "opt", "num_key_value_heads": 4}

    assert facts_of(words | {"word_embed_proj_dim": 64, "do_layer_norm_before": True}, tmp_path) == facts
    narrow = {"word_embed_proj_dim": 32, "do_layer_norm_before": False}
    assert facts_of(words | narrow, tmp_path) == facts | narrow


def test_a_gemma_3_whose_text_half_says_little_is_understood(tmp_path: Path) -> None:
    half = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}

    found = facts_of({"model_type": "gemma3", "text_config": half, "vision_config": {"hidden_size": 1152}}, tmp_path)

    assert found is not None
    assert (found["num_attention_heads"], found["num_key_value_heads"], found["head_dim"]) == (8, 4, 256)
    assert (found["vocab_size"], found["tie_word_embeddings"]) == (262208, True)


@pytest.mark.parametrize(
    "words",
    [
        {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [1]},
        {"model_type": "qwen3_next", "layer_types": ["full_attention", "full_attention", "linear_attention"]},
        {"model_type": "qwen3_next", "layer_types": ["linear_attention"]},
        {"model_type": "gemma3n_text", "intermediate_size": [128, 256]},
    ],
    ids=str,
)
def test_layers_in_an_order_without_a_formula_give_no_facts(words: dict[str, Any], tmp_path: Path) -> None:
    assert facts_of(LLAMA | words, tmp_path) is None


@pytest.mark.parametrize(
    "config",
    ["", "{", "[]", "null", "3", "[" * 100_000, '{"a": "\ud83d"', {}, without("vocab_size"), {"text_config": 3}],
    ids=lambda config: str(config)[:20],
)
def test_what_is_no_whole_config_gives_no_facts(config: object, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(config.encode(errors="replace") if isinstance(config, str) else json.dumps(config).encode())

    assert read_facts(tmp_path) is None


@pytest.mark.parametrize("name", ["missing", "file", "nul\0", "n" * 300])
def test_what_is_no_folder_gives_no_facts(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    assert read_facts(tmp_path / name) is None


@pytest.mark.parametrize("heads", [0, "4", None, True])
def test_a_strange_number_of_heads_is_no_crash(heads: object, tmp_path: Path) -> None:
    facts = facts_of({**without("head_dim"), "num_attention_heads": heads}, tmp_path)

    assert facts is None or facts["num_attention_heads"] == heads
