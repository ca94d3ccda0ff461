"""NCCL, the 4-bit kernels and flash attention, each tried by the doctor's own probe; and memory against the plan."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from bench.memory import Case, make_data, make_model, measure
from tests.configs.test_packing import samples
from tests.e2e.runs import ok, quick, train
from tests.models.test_mixers import POSITIONS, farthest, gradients
from tests.models.test_mixers import made as mixed
from tuner.lab import probes
from tuner.lab.probes import Probe
from tuner.machine.hardware import Hardware
from tuner.models import attention, compat

pytestmark = [pytest.mark.gpu, pytest.mark.e2e]


def probed(*arguments: str) -> str:
    """Run a probe of the doctor, which has to succeed, and return its text."""
    row = probes.run(Probe("the probe", arguments, "See its text."), os.environ, deadline_s=300)
    assert row.status == "ok", row.text
    return row.text


def test_nccl_adds_between_all_gpus(machine: Hardware) -> None:
    assert probed("all-reduce", str(len(machine.gpus))).startswith("nccl all-reduce ")


@pytest.mark.usefixtures("machine")
def test_four_bits_are_stored_and_read_on_the_gpu() -> None:
    assert " on cuda " in probed("bitsandbytes")


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("kind", "probe", "dtype"),
    [
        pytest.param(
            *("flash_attention_2", "flash-attention", "auto"),
            marks=pytest.mark.skipif(not find_spec("flash_attn"), reason="flash-attn is not installed"),
        ),
        ("varlen", "varlen", "bf16"),
    ],
)
def test_flash_attention_computes_what_torchs_does_and_trains_to_its_loss(
    kind: str, probe: str, dtype: str, tmp_path: Path
) -> None:
    probed(probe)
    recipe, asked = quick(tmp_path, "full"), ("--set", f"dtype={dtype}", "--set", "max_steps=2")

    flash, torchs = (
        ok(train(recipe, tmp_path / name, *asked, "--set", f"model.attn_implementation={name}", ranks=1))
        for name in (kind, "sdpa")
    )

    assert flash.losses == pytest.approx(torchs.losses, abs=5e-2)


@pytest.mark.parametrize("method", ["full", "qlora"])
@pytest.mark.parametrize("preset", ["deepspeed_zero2", "deepspeed_zero3"])
def test_the_peak_of_a_step_is_within_a_tenth_of_the_plans(
    machine: Hardware, tmp_path: Path, method: str, preset: str
) -> None:
    model = make_model(tmp_path, "1B", "cuda")

    found = measure(Case("1B", method, preset, "bf16"), model, make_data(tmp_path), tmp_path / "run", machine)

    if found is None:
        pytest.skip("a GPU is too small for a model of 1B")
    assert abs(found.peak_off) < 0.1, (found.predicted_peak, found.measured_peak)


@pytest.mark.usefixtures("machine")
@pytest.mark.skipif(not find_spec("liger_kernel"), reason="liger-kernel is not installed")
@pytest.mark.parametrize("method", ["full", "lora"])
def test_ligers_kernels_train_to_the_same_loss(tmp_path: Path, method: str) -> None:
    recipe, asked = quick(tmp_path, method), ("--set", "dtype=auto", "--set", "max_steps=2")

    fused, torchs = (
        ok(train(recipe, tmp_path / str(use), *asked, "--set", f"use_liger_kernel={use}", ranks=1))
        for use in (True, False)
    )

    assert fused.losses == pytest.approx(torchs.losses, abs=5e-2)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("window", [None, 128])
def test_sinks_through_the_kernel_are_those_of_sdpa_in_bf16(window: int | None) -> None:
    torch.manual_seed(0)
    ends = torch.tensor([0, 300, 512], dtype=torch.int32)
    states = [torch.randn(1, heads, 512, 64) for heads in (8, 2, 2)] + [torch.randn(8)]
    module, of_out = torch.nn.Module(), torch.randn(1, 512, 8, 64)
    module.num_key_value_groups = 4  # type: ignore[assignment]
    found = []
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        leaves = [state.bfloat16().to(device, dtype).requires_grad_() for state in states]
        options = {"s_aux": leaves[3], "sliding_window": window, "cu_seq_lens_q": ends.to(device), "max_length_q": 300}
        out, _ = attention.attend(module, *leaves[:3], None, **options)
        out.backward(of_out.to(device, dtype))
        found.append([tensor.float().cpu() for tensor in (out, *(leaf.grad for leaf in leaves))])

    for ours, wanted in zip(*found, strict=True):
        assert (ours - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.usefixtures("machine")
@pytest.mark.skipif(not find_spec("fla"), reason="fla-core is not installed")
@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2"])
def test_kernels_of_linear_attention_give_packed_samples_the_gradients_they_have_alone(kind: str) -> None:
    compat.offer_kernels()
    model = mixed(kind).float().cuda()
    parts = [part.cuda() for part in samples(model)]
    alone = gradients(model, [{"input_ids": part} for part in parts])

    row = {"input_ids": torch.cat(parts, dim=1), "position_ids": POSITIONS.cuda()}

    assert farthest(gradients(model, [row]), alone) < 2e-2  # TF32
