from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

import tuner.worker.models  # noqa: F401  registers internlm2
from tests.configs.test_model_parts import PUBLISHED_PARAMETERS
from tests.machine.gpus import GIB
from tuner.fit.memory import LEVELS, Parameters, count, lowest_level, model_state_bytes, num_parameters
from tuner.recipes import catalog, recipe
from tuner.recipes.recipe import Overrides
from tuner.recipes.schema import Architecture, RecipeConfig
from tuner.recipes.source import read_file

GB = 10**9
BILLIONS_7 = Parameters(trainable=7 * GB)
SMALL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 160,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
}


def _config(name: str, *sets: str) -> RecipeConfig:
    return recipe.load(name, Overrides(pairs=[("--set", text) for text in sets])).config


@pytest.mark.parametrize(("level", "gigabytes"), [("zero1", 38.5), ("zero2", 26.25), ("zero3", 14.0)])
def test_7b_on_8_gpus_needs_what_the_paper_says(level: str, gigabytes: float) -> None:
    assert model_state_bytes(f"deepspeed_{level}", BILLIONS_7, 8) == gigabytes * GB


@pytest.mark.parametrize("ranks", [1, 2, 3, 64, 1024])
@pytest.mark.parametrize("trainable", [1, 10**6, 7 * GB])
def test_model_states_follow_the_published_formulas(trainable: int, ranks: int) -> None:
    def needed(level: str) -> float:
        return model_state_bytes(level, Parameters(trainable), ranks)

    assert needed("none") == 16 * trainable
    assert needed("deepspeed_zero1") == pytest.approx(4 * trainable + 12 * trainable / ranks)
    assert needed("deepspeed_zero2") == pytest.approx(2 * trainable + 14 * trainable / ranks)
    assert needed("deepspeed_zero3") == pytest.approx(16 * trainable / ranks)
    assert needed("deepspeed_zero2_offload") == 2 * trainable
    assert needed("deepspeed_zero3_offload") == 0


def test_frozen_weights_are_whole_on_every_gpu_below_stage_3_and_shared_at_it() -> None:
    parameters = Parameters(trainable=0, frozen=8 * GB)

    assert model_state_bytes("deepspeed_zero2", parameters, 8) == 16 * GB
    assert model_state_bytes("deepspeed_zero3", parameters, 8) == 2 * GB


def test_4_bit_weights_take_half_a_byte_and_their_scales() -> None:
    assert Parameters(0, quantized=1000).frozen_bytes == pytest.approx(516)
    assert Parameters(0, quantized=1000, quantized_bits=8).frozen_bytes == 1000
    assert Parameters(0, frozen=1000).frozen_bytes == 2000


@pytest.mark.parametrize("part", sorted(PUBLISHED_PARAMETERS))
def test_the_count_of_a_shipped_model_is_the_published_one(part: str) -> None:
    facts = Architecture(**read_file(catalog.part_path("models", part)).values["architecture"])

    assert num_parameters(facts) == PUBLISHED_PARAMETERS[part]


def test_every_shipped_model_is_counted_against_its_published_size() -> None:
    assert set(catalog.names("models")) - set(PUBLISHED_PARAMETERS) <= {"tiny"}


def _meta_model(facts: dict[str, Any]) -> torch.nn.Module:
    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**facts))
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "mistral", "internlm2", "qwen2", "qwen3", "gemma", "gemma2"])
def test_the_count_is_that_of_the_built_model(kind: str, tied: bool) -> None:
    facts = SMALL | {"model_type": kind, "tie_word_embeddings": tied}

    built = sum(parameter.numel() for parameter in _meta_model(facts).parameters())

    assert num_parameters(Architecture(**facts)) == built


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft reads a name that transformers 6 drops
@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2"])
@pytest.mark.parametrize("rank", [4, 16])
def test_an_adapters_trainable_count_is_pefts(kind: str, rank: int, use_dora: bool) -> None:
    facts = SMALL | {"model_type": kind}
    config = _config("tiny_dora_sample_e1" if use_dora else "tiny_lora_sample_e1", f"adapter.r={rank}")
    lora = LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM", use_dora=use_dora)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**facts))  # DoRA reads the weights' norms

    wrapped = get_peft_model(model, lora)
    trainable = sum(parameter.numel() for parameter in wrapped.parameters() if parameter.requires_grad)

    assert count(config, Architecture(**facts)).trainable == trainable


def test_full_training_trains_all_and_freezes_nothing() -> None:
    config = _config("qwen3_8b_full_alpaca_e1")
    assert config.architecture

    assert count(config, config.architecture) == Parameters(PUBLISHED_PARAMETERS["qwen3_8b"])


def test_quantization_takes_the_linear_layers_and_leaves_embeddings_and_norms() -> None:
    config = _config("qwen3_8b_qlora_alpaca_e1")
    assert config.architecture
    facts = config.architecture

    counted = count(config, facts)

    left = 2 * facts.vocab_size * facts.hidden_size  # and some norms
    assert counted.quantized + counted.frozen == PUBLISHED_PARAMETERS["qwen3_8b"]
    assert left < counted.frozen < left * 1.001
    assert counted.quantized_bits == 4


# The lowest level that fits


@pytest.mark.parametrize(("ranks", "level"), [(1, "none"), (2, "deepspeed_zero2"), (8, "deepspeed_zero2")])
def test_a_cpu_takes_no_sharding_alone_and_zero_2_together(ranks: int, level: str) -> None:
    chosen = lowest_level(_config("tiny_full_sample_e1"), ranks, 0)

    assert chosen.level == level
    assert "CPU" in chosen.reason


@pytest.mark.parametrize(
    ("name", "ranks", "gib", "level"),
    [
        ("tiny_full_sample_e1", 1, 16, "none"),
        ("tiny_full_sample_e1", 8, 16, "deepspeed_zero1"),
        ("internlm2_7b_full_alpaca_e1", 8, 80, "deepspeed_zero1"),
        ("internlm2_7b_full_alpaca_e1", 8, 32, "deepspeed_zero2"),
        ("internlm2_7b_full_alpaca_e1", 8, 16, "deepspeed_zero2_offload"),
        ("internlm2_7b_full_alpaca_e1", 1, 80, "deepspeed_zero2_offload"),
        ("qwen2_5_72b_instruct_full_alpaca_e1", 16, 80, "deepspeed_zero3"),
        ("qwen2_5_72b_instruct_full_alpaca_e1", 8, 80, "deepspeed_zero3_offload"),
        ("internlm2_chat_7b_qlora_oasst1_e3", 1, 16, "none"),
        ("qwen2_5_72b_instruct_qlora_alpaca_e1", 1, 24, "deepspeed_zero3_offload"),
    ],
)
def test_the_lowest_level_whose_states_fit_is_taken(name: str, ranks: int, gib: int, level: str) -> None:
    chosen = lowest_level(_config(name), ranks, gib * GIB)

    assert chosen.level == level
    assert f"of {gib} GiB a GPU" in chosen.reason


@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
def test_no_lower_level_would_have_fitted(ranks: int) -> None:
    config = _config("qwen3_14b_full_alpaca_e1")
    assert config.architecture
    parameters = count(config, config.architecture)
    for gib in (8, 24, 40, 80, 141, 288):
        level = lowest_level(config, ranks, gib * GIB).level

        lower = [name for name in LEVELS[: LEVELS.index(level)] if ranks == 1 or name != "none"]
        assert model_state_bytes(level, parameters, ranks) <= gib * GIB
        assert min((model_state_bytes(name, parameters, ranks) for name in lower), default=math.inf) > gib * GIB


def test_a_model_of_unknown_size_takes_zero_3() -> None:
    config = _config("tiny_full_sample_e1", "model.path=someone/unknown")

    assert lowest_level(config, 8, 80 * GIB).level == "deepspeed_zero3"


def test_every_level_is_a_preset_or_none() -> None:
    assert set(LEVELS) == {*catalog.presets(), "none"}
