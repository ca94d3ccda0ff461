"""The counts of adapters, 4-bit weights, score heads, frozen layers and reference models are those of the libraries."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BitsAndBytesConfig
from transformers.integrations import replace_with_bnb_linear
from transformers.quantizers.base import get_keys_to_not_convert

from tests.each import each
from tests.fit.built import on_meta
from tests.fit.recipes import lightest
from tests.fit.small import SMALL, name_of, small
from tuner.fit.parameters import Parameters, backward_share, built, count, num_parameters
from tuner.lab.shrink import config_of
from tuner.models.compat_experts import fused_in
from tuner.recipes.schema import Adapter, RecipeConfig
from tuner.recipes.schema.architecture import Architecture
from tuner.recipes.schema.unlearned_layers import WITHOUT_GRADIENT, without_gradient

pytestmark = pytest.mark.filterwarnings("ignore")  # peft on names that transformers renamed, on tied embeddings


@cache
def _config(name: str, *sets: str) -> RecipeConfig:
    return lightest(name, *sets)


def _trainable(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _by_peft(model: torch.nn.Module, adapter: Adapter, task_type: str = "CAUSAL_LM") -> int:
    """Return what PEFT trains; without the first values of its weights, so that no memory is needed."""
    ours = {"lora_dropout", "path", "vision", "vision_r", "vision_lora_alpha"}
    block = adapter.model_dump(exclude=ours) | {"task_type": task_type, "init_lora_weights": False}
    if without_gradient(name for name, _ in model.named_modules()):
        block["exclude_modules"] = WITHOUT_GRADIENT  # as `models.adapters` does
    return _trainable(get_peft_model(model, LoraConfig(**block), low_cpu_mem_usage=True))


def _by_us(adapter: Adapter, facts: Architecture, objective: str = "sft") -> int:
    config = _config("tiny_reward_lora_sample_preferences_e1" if objective == "reward" else "tiny_lora_sample_e1")
    return count(config.model_copy(update={"adapter": adapter}), facts).trainable


@each(SMALL, every=5)  # tied and untied ones in turn
def test_an_adapter_on_all_linear_layers_is_pefts(facts: Architecture) -> None:
    adapter = Adapter(r=4, lora_alpha=8)

    assert _by_us(adapter, facts) == _by_peft(on_meta(facts), adapter)


@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        ("llama", ["q_proj", "v_proj"]),
        ("llama", ["self_attn.o_proj", "down_proj", "lm_head", "embed_tokens"]),
        ("bloom", ["query_key_value", "word_embeddings"]),
        ("gpt2", ["attn.c_proj", "wte"]),
        ("gpt_bigcode", ["c_proj"]),
        ("gpt_neox", ["query_key_value", "dense", "embed_in"]),
        ("falcon", ["dense", "dense_4h_to_h"]),
        ("opt", ["out_proj", "fc1"]),
        ("phi3", ["qkv_proj", "gate_up_proj"]),
        ("deepseek_v2", ["kv_b_proj", "o_proj"]),
        ("qwen3_next", ["in_proj_qkvz", "q_proj"]),
        # The names of experts before transformers 5 fused them.
        ("mixtral", ["q_proj", "w1", "w2", "w3"]),
        ("mixtral", ["gate", "w2"]),
        ("qwen3_moe", ["q_proj", "gate_proj", "up_proj", "down_proj"]),
        ("deepseek_v3", ["gate_proj", "up_proj"]),
        ("qwen2_moe", ["gate_proj", "shared_expert_gate"]),
    ],
)
def test_an_adapter_on_named_modules_is_pefts(model_type: str, names: list[str]) -> None:
    adapter, facts = Adapter(r=4, lora_alpha=8, target_modules=names), small(model_type)

    assert _by_us(adapter, facts) == _by_peft(on_meta(facts), adapter)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma2", "phi", "deepseek_v2", "gpt2", "qwen2_moe"])
@pytest.mark.parametrize("names", ["all-linear", ["q_proj", "kv_b_proj", "c_attn"]], ids=["all", "named"])
def test_doras_magnitudes_are_pefts(model_type: str, names: str | list[str]) -> None:
    facts = small(model_type)
    if model_type == "deepseek_v2":  # PEFT has no DoRA for fused experts
        names = ["kv_b_proj", "o_proj"]
    adapter = Adapter(r=4, lora_alpha=8, target_modules=names, use_dora=True)
    model = AutoModelForCausalLM.from_config(config_of(facts))  # DoRA reads the weights' norms

    assert _by_us(adapter, facts) == _by_peft(model, adapter)


@pytest.mark.parametrize(("model_type", "tied"), [("llama", False), ("llama", True), ("opt", True), ("gpt2", False)])
def test_saved_modules_are_trained_as_copies(model_type: str, tied: bool) -> None:
    facts = small(model_type, tied=tied)
    embeddings = "wte" if model_type == "gpt2" else "embed_tokens"
    adapter = Adapter(r=4, lora_alpha=8, modules_to_save=[embeddings, "lm_head"])

    assert _by_us(adapter, facts) == _by_peft(on_meta(facts), adapter)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "mixtral", "opt", "gpt2"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_model_that_scores_has_one_output_and_no_language_model_head(model_type: str, tied: bool) -> None:
    facts, adapter = small(model_type, tied=tied), Adapter(r=4, lora_alpha=8)
    config = config_of(facts)
    config.num_labels = 1
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    size = sum(parameter.numel() for parameter in model.parameters())

    assert count(_config("tiny_reward_full_sample_preferences_e1"), facts) == Parameters(size)
    assert _by_us(adapter, facts, "reward") == _by_peft(model, adapter, "SEQ_CLS")
    assert count(_config("tiny_reward_lora_sample_preferences_e1"), facts).frozen == size


@each(SMALL, every=3)
def test_4_bits_reach_the_linear_layers_that_bitsandbytes_replaces_and_fused_experts(facts: Architecture) -> None:
    model = on_meta(facts)
    experts = sum(weight.numel() for module in model.modules() for weight in fused_in(module).values())
    replace_with_bnb_linear(model, get_keys_to_not_convert(model), BitsAndBytesConfig(load_in_4bit=True))
    replaced = sum(layer.in_features * layer.out_features for layer in model.modules() if isinstance(layer, Linear4bit))

    counted = count(_config("tiny_qlora_sample_e1"), facts)

    # transformers spares the model's last weight, taking it for the head. Where that is tied and no norm comes after
    # the layers, the last weight is one more linear layer: not worth a rule.
    spared = {"olmo-tied": 48 * 80, "gemma3n_text-tied": 48 * 48}.get(name_of(facts), 0)
    assert counted.quantized == replaced + spared + experts
    assert counted.quantized + counted.frozen == num_parameters(facts)
    assert counted.quantized_bits == 4


@pytest.mark.parametrize("setting", ["quantization.experts=False", "quantization.bits=8"])
def test_experts_that_are_not_asked_for_and_those_beside_8_bits_stay_in_16_bits(setting: str) -> None:
    facts = small("mixtral")
    experts = facts.num_hidden_layers * 3 * 3 * facts.hidden_size * 17

    counted = count(_config("tiny_qlora_sample_e1", setting), facts)

    assert counted.quantized == count(_config("tiny_qlora_sample_e1"), facts).quantized - experts


def test_a_tensor_that_bitsandbytes_cannot_count_stays_in_16_bits() -> None:
    facts = {"hidden_size": 8192, "num_experts": 128, "moe_intermediate_size": 2048, "num_experts_per_tok": 1}
    large = Architecture(**{**small("qwen3_moe").model_dump(), **facts, "num_hidden_layers": 1})
    [layer] = built(large).layers
    assert layer.experts is not None

    assert layer.experts.tensors == (2**32, 2**31)
    assert layer.experts.quantizable == 0
    assert layer.experts._replace(num=64).quantizable == 2**30, "those of the down projections alone"


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3", "qwen3_next", "gemma4_text", "opt"])
@pytest.mark.parametrize("num", [1, 3, 9])
def test_freezing_trains_the_last_layers_alone(model_type: str, num: int) -> None:
    facts = small(model_type)
    model = on_meta(facts).requires_grad_(False)
    layers = (model.model.decoder if model_type == "opt" else model.model).layers
    layers[-num:].requires_grad_(True)

    counted = count(_config("tiny_freeze_sample_e1", f"trainable_layers={num}"), facts)

    assert counted == Parameters(_trainable(model), num_parameters(facts) - _trainable(model))
    below = sum(weight.numel() for layer in layers[:-num] for weight in layer.parameters())
    passes = backward_share(_config("tiny_freeze_sample_e1", f"trainable_layers={num}"), facts)
    assert passes == pytest.approx(1 - below / num_parameters(facts))


def test_freezing_a_model_that_scores_trains_its_new_head_too() -> None:
    facts = small("llama")
    frozen, scoring = _config("tiny_freeze_sample_e1"), _config("tiny_reward_freeze_sample_preferences_e1")

    assert count(scoring, facts).trainable == count(frozen, facts).trainable + facts.hidden_size


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_a_reference_model_stands_frozen_beside_the_trained_one(objective: str) -> None:
    facts, name = small("llama"), f"tiny_{objective}_full_sample_preferences_e1"
    size = num_parameters(facts)

    assert count(_config(name), facts) == Parameters(size, frozen=size)
    assert count(_config(name, "objective.precompute_ref_log_probs=True"), facts) == Parameters(size)


def test_a_teacher_stands_frozen_beside_the_student_in_its_own_bits() -> None:
    student, teacher = small("llama"), small("qwen3")
    config = _config("tiny_distill_full_sample_e1")
    size, of_teacher, facts = num_parameters(student), num_parameters(teacher), teacher.model_dump()
    objectives = [
        config.objective.model_copy(update={"teacher": "x", "teacher_bits": bits, "teacher_architecture": facts})
        for bits in (16, 4)
    ]

    whole, four_bits = (count(config.model_copy(update={"objective": objective}), student) for objective in objectives)

    assert whole == Parameters(size, frozen=of_teacher)
    quantized = sum(linear.weights for linear in built(teacher).all_linears() if linear.quantizable)
    assert four_bits == Parameters(size, frozen=of_teacher - quantized, quantized=quantized)


@pytest.mark.parametrize("name", ["tiny_dpo_lora_sample_preferences_e1", "tiny_orpo_full_sample_preferences_e1"])
def test_an_adapter_switched_off_is_the_reference_and_orpo_needs_none(name: str) -> None:
    facts = small("llama")

    counted = count(_config(name), facts)

    assert counted.frozen == (num_parameters(facts) if "lora" in name else 0)


def test_a_reference_model_is_frozen_whole_however_few_layers_are_trained() -> None:
    facts, config = small("llama"), _config("tiny_dpo_freeze_sample_preferences_e1", "trainable_layers=1")
    size = num_parameters(facts)

    counted = count(config, facts)

    assert counted.trainable + counted.frozen == 2 * size


def test_full_training_trains_all_and_freezes_nothing() -> None:
    facts = small("qwen3_moe")

    assert count(_config("tiny_full_sample_e1"), facts) == Parameters(num_parameters(facts))


def test_a_regular_expression_is_counted_as_all_linear_layers() -> None:
    facts, pattern = small("llama"), Adapter(r=4, lora_alpha=8, target_modules=r".*\.(q|v)_proj")

    assert _by_us(pattern, facts) == _by_us(Adapter(r=4, lora_alpha=8), facts)
    assert _by_us(pattern, facts) >= _by_peft(on_meta(facts), pattern)
