"""A model folder's config.json gives the facts that planning needs, whoever wrote it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

import tuner.worker.models  # noqa: F401  registers internlm2
from tuner.recipes import catalog, source
from tuner.recipes.architecture import read_facts

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


@pytest.mark.parametrize(
    "part", ["internlm2_chat_7b", "qwen3_8b", "gemma_2b_it", "gemma2_9b_it", "mistral_7b_instruct"]
)
def test_what_transformers_saves_gives_the_facts_of_the_model_part(part: str, tmp_path: Path) -> None:
    facts = source.read_file(catalog.part_path("models", part)).values["architecture"]
    AutoConfig.for_model(**facts).save_pretrained(tmp_path)

    assert read_facts(tmp_path) == facts


def test_the_tiny_model_says_of_itself_what_its_part_says() -> None:
    part = source.read_file(catalog.part_path("models", "tiny")).values

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
