"""What is mended in DeepSpeed, mostly on stand-ins for its engine; tests/reference and tests/faults have real ones."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any, Never

import deepspeed
import deepspeed.ops
import pytest
import torch
from deepspeed.runtime import compiler
from deepspeed.runtime.engine import DeepSpeedEngine
from transformers import GPT2Config, GPT2LMHeadModel

from tests.e2e.runs import environment
from tests.e2e.warm import of_module, warm
from tests.refused import refused
from tuner.errors import MachineError
from tuner.worker import compat


def engine(max_norm: float) -> Any:
    """Return what is taken of DeepSpeed's engine at stage 0 in fp32: a model with gradients, and a limit."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(128, 1664), torch.nn.Linear(1664, 2))
    for weight in model.parameters():
        weight.grad = torch.randn_like(weight) * torch.rand(len(weight), *[1] * (weight.ndim - 1)) ** 6
    made = SimpleNamespace(module=model, gradient_clipping=lambda: max_norm, _global_grad_norm=None)
    made.autotp_size, made.has_moe_layers = lambda: 0, False
    made.optimizer, made.clip_fp32_gradients = torch.optim.SGD(model.parameters()), None
    return made


def gradient(made: Any) -> torch.Tensor:
    return torch.cat([weight.grad.double().flatten() for weight in made.module.parameters()])


def test_a_library_without_a_name_that_is_replaced_is_refused_and_the_installed_ones_have_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compat.check_names()

    monkeypatch.delattr(DeepSpeedEngine, "clip_fp32_gradients")

    with refused(MachineError, "deepspeed", "DeepSpeedEngine.clip_fp32_gradients"):
        compat.check_names()


@pytest.mark.parametrize("max_norm", [0.0, 1.0, 1e4])
def test_the_norm_at_stage_0_is_exact_and_clips_what_is_above_the_limit(max_norm: float) -> None:
    made = engine(max_norm)
    norm = float(gradient(made).norm())
    compat.check_gradients(made, pytest.fail)

    made.optimizer.step()

    assert made._global_grad_norm == pytest.approx(norm, rel=1e-9)
    assert float(gradient(made).norm()) == pytest.approx(min(max_norm or norm, norm), rel=1e-6)


def test_no_update_is_made_at_stage_0_of_a_gradient_that_is_no_number() -> None:
    made = engine(0.0)
    made.module[0].weight.grad[3, 4] = float("inf")
    before = made.module[0].weight.clone()

    def end() -> None:
        raise ZeroDivisionError

    compat.check_gradients(made, end)
    with pytest.raises(ZeroDivisionError):
        made.optimizer.step()

    assert torch.equal(made.module[0].weight, before)


@pytest.mark.parametrize("has_norm", [True, False])
def test_zero_looks_for_bad_gradients_by_itself_where_a_config_takes_their_norm_away(has_norm: bool) -> None:
    zero = SimpleNamespace(check_grad_overflow=False)

    compat.check_gradients(SimpleNamespace(optimizer=zero, zero_compute_grad_norm=lambda: has_norm), pytest.fail)

    assert zero.check_grad_overflow is not has_norm


def test_muon_trains_no_embeddings_and_no_head_whatever_they_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed, "set_optimizer_flags", deepspeed.set_optimizer_flags)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=1))
    compat.keep_muon_off_embeddings(model)

    deepspeed.set_optimizer_flags(SimpleNamespace(optimizer_name="muon", optimizer_params={}), model)

    flags = {name: weight.use_muon for name, weight in model.named_parameters()}
    assert flags["transformer.wte.weight"] is False
    assert flags["transformer.h.0.attn.c_attn.weight"] is True
    assert flags["transformer.h.0.ln_1.weight"] is False


def fails(*_: object, **__: object) -> Never:
    raise AssertionError("this takes seconds of each rank")


def test_a_rank_takes_muon_from_deepspeed_without_torchs_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "deepspeed.runtime.zero.muon.original_muon"
    monkeypatch.setitem(sys.modules, name, None)  # so that it is as before after the test
    del sys.modules[name]
    monkeypatch.setattr(torch, "compile", fails)

    compat.import_muon_without_compiler()

    assert callable(sys.modules[name].muon_update)
    assert compiler.compile() is torch.compile, "what a user compiles is compiled"


def test_looking_for_deepspeeds_names_runs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(vars(deepspeed.ops), "__compatible_ops__", raising=False)
    monkeypatch.setattr(deepspeed.ops, "_probe_compatible_ops", fails)

    compat.check_names()


@pytest.mark.long
def test_at_zero3_a_forward_pass_before_the_first_step_costs_no_gathers_afterwards() -> None:
    ended = warm().run([], code=of_module("tests.worker.gathers"), env=environment(), timeout_s=240)

    assert ended.returncode == 0, ended.stderr[-4000:]
    plain, validated_first = json.loads(ended.stdout.splitlines()[-1])
    assert validated_first[-1] == plain[-1], "0.19.8 alone: 40 gathers a step instead of 1"


@pytest.mark.long
def test_at_zero3_experts_in_4_bits_with_an_adapter_are_freed_layer_by_layer() -> None:
    quantizing = warm(has_bitsandbytes=True)
    ended = quantizing.run([], code=of_module("tests.worker.packed"), env=environment(), timeout_s=240)

    assert ended.returncode == 0, ended.stderr[-4000:]
    alone, spared = json.loads(ended.stdout.splitlines()[-1])
    assert (alone["backward"], spared["backward"]) == (2 * 6, 2), "0.19.8 alone keeps those of all layers"
    assert alone["loss"] == spared["loss"]
