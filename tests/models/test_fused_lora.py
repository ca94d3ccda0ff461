"""LoRA as one function gives PEFT's values and gradients, and leaves to PEFT what it does not compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tuner.models import fused_lora
from tuner.models.fused_lora import FusedLinear

IDS = torch.arange(1, 25).view(2, 12)


def adapted(kind: str = "qwen2", **options: Any) -> Any:
    """Return a small model with adapters that change it; Qwen 2 has biases beside linear layers without."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    config = AutoConfig.for_model(kind, **sizes, num_attention_heads=4, num_key_value_heads=2)
    lora = {"r": 4, "lora_alpha": 12, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options}
    model = get_peft_model(AutoModelForCausalLM.from_config(config), LoraConfig(**lora), autocast_adapter_dtype=False)
    for name, weight in model.named_parameters():
        if "lora_B" in name or name.endswith("bias"):
            torch.nn.init.normal_(weight, 0, 0.1)
    return model.train()


def computed(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    output = model(input_ids=IDS, labels=IDS, use_cache=False)
    output.loss.backward()
    gradients = [weight.grad.flatten() for weight in model.parameters() if weight.requires_grad]
    return output.logits.detach(), torch.cat(gradients)


def fused(model: Any) -> Any:
    fused_lora.fuse(model)
    return model


@pytest.mark.parametrize(
    "prepare",
    [
        lambda model: None,
        lambda model: model.gradient_checkpointing_enable({"use_reentrant": False}),
        lambda model: model.enable_input_require_grads(),
    ],
    ids=["plain", "recomputed", "gradients of the input"],
)
def test_values_and_gradients_are_pefts(prepare: Callable[[Any], None]) -> None:
    pefts, ours = adapted(), fused(adapted())
    prepare(pefts), prepare(ours)

    assert sum(type(layer) is FusedLinear for layer in ours.modules()) == 2 * 7
    for found, expected in zip(computed(ours), computed(pefts), strict=True):
        assert (found - expected).abs().max() < 4e-7 * expected.abs().max() + 1e-8


def test_a_step_keeps_fewer_and_makes_fewer_tensors_than_pefts() -> None:
    operations = []
    for model in (adapted(), fused(adapted())):
        with torch.profiler.profile() as recorded:
            model(input_ids=IDS, use_cache=False).logits.sum().backward()
        operations.append(
            sum(event.count for event in recorded.key_averages() if event.key in ("aten::mul", "aten::add"))
        )

    assert operations[1] <= operations[0] - 2 * 2 * 7  # a scaling and a sum for each of 14 layers


@pytest.mark.parametrize(
    "options",
    [
        {"lora_dropout": 0.5},
        {"use_dora": True},
        {"lora_bias": True, "target_modules": ["q_proj"]},
        {"bias": "lora_only", "target_modules": ["q_proj"]},
    ],
)
def test_what_is_more_than_the_plain_product_is_pefts(options: dict[str, Any]) -> None:
    answers = []
    for model in (adapted(**options), fused(adapted(**options))):
        torch.manual_seed(1)
        answers.append(computed(model))

    assert torch.equal(answers[0][0], answers[1][0]) and torch.equal(answers[0][1], answers[1][1])


def test_a_disabled_and_a_merged_adapter_are_the_base_and_the_sum() -> None:
    pefts, ours = adapted(), fused(adapted())
    with torch.no_grad():
        with_adapter = ours(input_ids=IDS).logits
        with ours.disable_adapter(), pefts.disable_adapter():
            assert torch.equal(ours(input_ids=IDS).logits, pefts(input_ids=IDS).logits)
        ours.merge_adapter()
        assert torch.allclose(ours(input_ids=IDS).logits, with_adapter, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 0, 32), (2, 1, 32), (5, 32)])
def test_inputs_of_every_shape_keep_it(shape: tuple[int, ...]) -> None:
    layer = next(layer for layer in fused(adapted()).modules() if type(layer) is FusedLinear)

    assert layer(torch.ones(shape)).shape == (*shape[:-1], layer.out_features)


def test_a_model_may_change_the_output_in_place() -> None:
    layer = next(layer for layer in fused(adapted()).modules() if type(layer) is FusedLinear)
    plain = next(layer for layer in adapted().modules() if type(layer) is Linear)
    gradients = []
    for which in (layer, plain):
        which(torch.ones(1, 3, 32)).mul_(2).sum().backward()
        gradients.append(which.lora_A["default"].weight.grad)

    assert torch.allclose(*gradients, atol=1e-6)


def test_the_saved_adapter_is_the_same(tmp_path: Path) -> None:
    saved = []
    for name, model in (("pefts", adapted()), ("ours", fused(adapted()))):
        model.save_pretrained(tmp_path / name)
        saved.append(load_file(tmp_path / name / "adapter_model.safetensors"))
        assert (tmp_path / name / "adapter_config.json").read_bytes() == (
            tmp_path / "pefts" / "adapter_config.json"
        ).read_bytes()

    assert saved[0].keys() == saved[1].keys()
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])


def test_layers_of_other_kinds_stay_as_they_are() -> None:
    model = adapted()
    layer = next(layer for layer in model.modules() if type(layer) is Linear)
    layer.base_layer = torch.nn.Embedding(3, 3)

    fused_lora.fuse(model)

    assert type(layer) is Linear
