"""Recomputation of some of a model's decoder layers: which ones are computed again, and that nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from tuner.errors import ModelError
from tuner.models.load import decoder_layers, recompute_first

IDS = torch.arange(1, 17).reshape(2, 8)


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2, use_cache=False
    )
    return LlamaForCausalLM(config).train()


def gradients(model: Any) -> tuple[dict[str, torch.Tensor], int]:
    """Return the gradients of a step, and how often an MLP was computed."""
    calls = []
    handles = [layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1)) for layer in decoder_layers(model)]
    model(input_ids=IDS, labels=IDS).loss.backward()
    for handle in handles:
        handle.remove()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}, len(calls)


@pytest.mark.parametrize("number", [1, 3, 4])
def test_the_first_layers_are_computed_again_and_gradients_stay_the_same_bits(number: int) -> None:
    plain, _ = gradients(llama())
    model = llama()
    recompute_first(model, number)

    model.activation_checkpointing_enable({"use_reentrant": False})
    found, num_calls = gradients(model)

    assert num_calls == 4 + number
    assert {*found} == {*plain} and all(torch.equal(found[name], plain[name]) for name in plain)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("enable", ["activation_checkpointing_enable", "gradient_checkpointing_enable"])
def test_trainers_that_switch_it_off_and_on_again_through_an_adapter_keep_the_choice(enable: str) -> None:
    model = llama()
    recompute_first(model, 2)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))

    getattr(adapted, enable)({"use_reentrant": False})
    adapted.activation_checkpointing_disable()
    getattr(adapted, enable)({"use_reentrant": False})

    assert [layer.gradient_checkpointing for layer in decoder_layers(model)] == [True, True, False, False]


def test_layers_that_cannot_be_told_one_by_one_are_refused() -> None:
    model = llama()
    model.model.layers[2] = torch.nn.Identity()

    with pytest.raises(ModelError, match="all of its layers or none"):
        recompute_first(model, 2)
