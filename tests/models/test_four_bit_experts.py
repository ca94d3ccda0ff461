"""Experts in 4 bits: they load a tensor at a time, compute what unpacked ones do, and LoRA on them learns the same."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import ParamWrapper
from safetensors.torch import load_file, save_file
from torch.nn.utils import parametrize
from transformers import AutoConfig, AutoModelForCausalLM

from tests.refused import refused
from tuner.errors import MachineError, ModelError, RecipeError
from tuner.models import compat_experts
from tuner.models.compat_experts import packed_in, packed_of
from tuner.models.load import load_model
from tuner.recipes.loading import load
from tuner.recipes.recipe import Overrides
from tuner.recipes.schema import RecipeConfig

pytestmark = [
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
]
_SHAPE = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
_SHAPE |= {"num_key_value_heads": 2, "vocab_size": 128, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, int]] = {
    "qwen3_moe": {**_SHAPE, "num_experts": 4, "moe_intermediate_size": 64},
    "mixtral": {**_SHAPE, "num_local_experts": 4},
    "gpt_oss": {**_SHAPE, "num_local_experts": 4},
}
"""The files of the first two have a tensor for each expert; PEFT puts LoRA on the experts of these."""
LINEAR_ROUTER = {**_SHAPE, "num_experts": 4, "moe_intermediate_size": 64, "num_dense_layers": 0, "head_dim": 16}
"""Of AFMoE: its router is a linear layer, in 4 bits as the others."""
IDS = torch.arange(5, 45)[None].repeat(2, 1)


@cache
def folder_of(kind: str) -> Path:
    """Return the folder of a small random model; it stays as long as this process's other temporary files."""
    folder = Path(mkdtemp())
    torch.manual_seed(0)
    shape = LINEAR_ROUTER if kind == "afmoe" else MODELS[kind]
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape)).save_pretrained(folder)
    return folder


def recipe(*pairs: str) -> RecipeConfig:
    sets = [("--set", pair) for pair in ("adapter.r=4", "gradient_checkpointing=True", *pairs)]
    return load("tiny_qlora_sample_e1", Overrides(pairs=sets)).config


def loaded(kind: str, *pairs: str, dtype: torch.dtype = torch.float32) -> Any:
    return load_model(recipe(*pairs), str(folder_of(kind)), dtype, "cpu", shards=False)


def trained(model: Any) -> Any:
    """Give the second factors of LoRA, which begin as zeros, values; the same to each model of a kind."""
    for name, weight in sorted(model.named_parameters()):
        if "lora_B" in name:
            weight.data = 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name)))
    return model


def unpacked(kind: str, packed: Any, *pairs: str) -> Any:
    """Return a model with experts in the compute type whose values are those of `packed`."""
    model = trained(loaded(kind, "quantization.experts=False", *pairs))
    modules = dict(model.named_modules())
    for name, module in packed.named_modules():
        for experts in packed_in(model=module) if type(module).__name__.endswith("Experts") else ():
            setattr(modules[name], experts.name, torch.nn.Parameter(experts.whole(), requires_grad=False))
    return model


def gradients(model: Any, experts: str, checkpoints: str) -> tuple[float, dict[str, torch.Tensor]]:
    base = model.get_base_model()
    base.set_experts_implementation(experts)
    if checkpoints:
        base.activation_checkpointing_enable({"use_reentrant": checkpoints == "reentrant"})
        type(base).enable_input_require_grads(base)
    for _ in range(2):  # what the first pass leaves behind would change the second
        model.zero_grad()
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
    return loss.item(), {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("experts", "checkpoints"), [("eager", "reentrant"), ("grouped_mm", "not reentrant"), ("grouped_mm", "")]
)
def test_loss_and_gradients_are_those_of_unpacked_experts_to_the_bit(kind: str, experts: str, checkpoints: str) -> None:
    model = trained(loaded(kind))

    loss, found = gradients(model, experts, checkpoints)
    expected_loss, expected = gradients(unpacked(kind, model), experts, checkpoints)

    assert loss == expected_loss
    assert found.keys() == expected.keys()
    assert all("lora_" in name and torch.equal(found[name], expected[name]) for name in expected)
    assert any("experts" in name for name in found) == (kind != "gpt_oss")
    assert not parametrize._cache, "no unpacked expert outlives its pass"


@pytest.mark.parametrize("double", [True, False])
def test_an_expert_takes_half_a_byte_and_its_scale(double: bool) -> None:
    found = packed_in(loaded("qwen3_moe", f"quantization.double_quant={double}"))

    stored = sum(experts.weight.nbytes + _scales(experts.state) for experts in found)
    # Two layers of 4 x (128 + 64) x 64, and of each tensor the tables of 16 and 256 numbers and an offset.
    assert stored / (2 * 4 * 192 * 64) == pytest.approx(0.5 + (1 / 64 + 1 / 4096 if double else 4 / 64), abs=1e-4)
    assert all(experts.weight.dtype == torch.uint8 and not experts.weight.requires_grad for experts in found)


def _scales(state: Any) -> int:
    return int(state.absmax.nbytes + (state.state2.absmax.nbytes if state.nested else 0))


def test_each_tensor_is_quantized_as_it_was_merged_from_the_file() -> None:
    model, layer = loaded("qwen3_moe"), "model.layers.1.mlp.experts"
    stored = load_file(folder_of("qwen3_moe") / "model.safetensors")
    halves = [torch.stack([stored[f"{layer}.{n}.{half}_proj.weight"] for n in range(4)]) for half in ("gate", "up")]

    expected = dequantize_4bit(*quantize_4bit(torch.cat(halves, dim=1), quant_type="nf4", compress_statistics=True))

    experts = packed_in(model.get_base_model().get_submodule(layer))[0]
    assert torch.equal(experts.whole(), expected)


def test_a_model_that_lacks_a_tensor_of_one_expert_is_refused(tmp_path: Path) -> None:
    weights = load_file(folder_of("qwen3_moe") / "model.safetensors")
    del weights["model.layers.1.mlp.experts.3.down_proj.weight"]
    AutoConfig.from_pretrained(folder_of("qwen3_moe")).save_pretrained(tmp_path)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})

    with refused(ModelError, "model.path"):
        load_model(recipe(), str(tmp_path), torch.float32, "cpu", shards=False)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "afmoe"])
def test_an_adapter_is_the_same_on_16_bit_experts(kind: str, tmp_path: Path) -> None:
    model, whole = trained(loaded(kind)), loaded(kind, "quantization.experts=False")
    model.save_pretrained(tmp_path / "packed")
    whole.save_pretrained(tmp_path / "whole")
    saved, expected = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("packed", "whole"))

    assert {name: weight.shape for name, weight in saved.items()} == {
        name: weight.shape for name, weight in expected.items()
    }

    again = loaded(kind, f"adapter.path={tmp_path / 'packed'}").eval()
    on_whole = unpacked(kind, model, f"adapter.path={tmp_path / 'packed'}").eval()
    with torch.no_grad():
        logits = model.eval()(IDS).logits
        assert torch.equal(again(IDS).logits, logits)
        assert torch.equal(on_whole(IDS).logits, logits)


def test_a_second_adapter_reaches_the_experts_too() -> None:
    """TRL compares a trained adapter that is trained further with a copy of it."""
    model = loaded("qwen3_moe")

    model.add_adapter("ref", model.peft_config["default"])

    wrappers = [module for module in model.modules() if isinstance(module, ParamWrapper)]
    assert len(wrappers) == 3 * 2 and all("ref" in wrapper.lora_A for wrapper in wrappers)
    model.set_adapter("ref")
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert all(w.grad is not None for name, w in model.named_parameters() if ".ref." in name)


def test_lora_merges_into_the_unpacked_experts() -> None:
    model = trained(loaded("qwen3_moe"))
    on_experts = [module for module in model.modules() if isinstance(module, ParamWrapper) and module.num_experts > 1]
    expected = [
        packed.whole()
        for wrapper in on_experts
        if (packed := packed_of(wrapper.get_base_layer(), wrapper.parameter_name))
    ]
    updates = [wrapper.get_delta_weight("default") for wrapper in on_experts]

    for wrapper in on_experts:
        wrapper.merge()

    assert len(expected) == 4 and not packed_in(model)
    for wrapper, weight, update in zip(on_experts, expected, updates, strict=True):
        found = getattr(wrapper.get_base_layer(), wrapper.parameter_name).data
        torch.testing.assert_close(found, weight + update, atol=2e-7, rtol=0)
        assert update.abs().max() > 1e-3


@pytest.mark.parametrize(
    "pairs", [("gradient_checkpointing=False",), ("recomputed_layers=1",), ("torch_compile=True",)]
)
def test_a_rank_refuses_what_only_a_loaded_model_shows_to_be_wrong(pairs: tuple[str, ...]) -> None:
    with refused(RecipeError, f"train_cfg.{pairs[0].partition('=')[0]}"):
        loaded("gpt_oss", *pairs)


ON_QUERIES = "adapter.target_modules=['q_proj']"


@pytest.mark.parametrize(
    ("key", "named", "pairs"),
    [
        ("modules_to_save", "experts", (ON_QUERIES, "adapter.modules_to_save=['experts']")),
        ("modules_to_save", "mlp", (ON_QUERIES, "adapter.modules_to_save=['mlp']")),
        ("modules_to_save", "modules_to_save", ("quantization.experts=False", "adapter.modules_to_save=['gate']")),
        ("init_lora_weights", "experts", ("quantization=None", "init_lora_weights=pissa")),
    ],
    ids=["packed experts", "what holds them", "a module with LoRA", "a beginning for linear layers"],
)
def test_what_an_adapter_of_experts_cannot_train_or_begin_with_is_refused(
    key: str, named: str, pairs: tuple[str, ...]
) -> None:
    with refused(ModelError, f"adapter.{key}", named):
        loaded("qwen3_moe", *pairs)


def test_a_name_that_matches_no_weight_is_refused() -> None:
    model = AutoModelForCausalLM.from_pretrained(folder_of("gpt_oss"))
    names = ["mlp.experts.gate_up_proj", "mlp.experts.up_proj"]
    lora = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=names)

    with refused(ModelError, "adapter.target_modules"):
        compat_experts.check_matched(get_peft_model(model, lora))


def test_a_library_without_a_name_that_is_built_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("peft.tuners.lora.layer._LoraFactorsProxy")

    with refused(MachineError, "peft"):
        loaded("gpt_oss")


@pytest.mark.parametrize("experts", [True, False])
def test_a_router_learns_its_balance_although_trl_wants_reentrant_checkpoints_at_zero_3(experts: bool) -> None:
    config = recipe(f"quantization.experts={experts}")
    model = load_model(config, str(folder_of("qwen3_moe")), torch.float32, "cpu", shards=True)
    model.get_base_model().config.output_router_logits = True

    model.gradient_checkpointing_enable({"use_reentrant": True})
    outputs = model(input_ids=IDS, labels=IDS)

    assert outputs.aux_loss.requires_grad
    outputs.aux_loss.backward()
    assert all(w.grad is not None and w.grad.any() for name, w in model.named_parameters() if "gate.lora_B" in name)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_no_more_than_one_tensor_of_experts_is_in_16_bits_at_a_time_while_they_load(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.models.loading", tmp_path, kind]

    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])

    found = json.loads(done.stdout.splitlines()[-1])
    assert found["in_16_bits"] >= 9 * found["largest"]
    assert found["grown"] < found["packed"] + 4 * found["largest"]


def test_16_bit_experts_are_left_alone() -> None:
    assert not packed_in(loaded("qwen3_moe", "quantization.experts=False"))
