"""Accelerators of other makers: made-up files of their drivers, and a made-up accelerator of DeepSpeed's.

They stand for what cannot be here, and show what tuner asks and says; that a device computes right they cannot show.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from tests.machine.gpus import GIB
from tuner.fit.gpu_catalog import like
from tuner.launch import kernels
from tuner.machine import hardware, libraries
from tuner.machine.hardware import Gpu, Hardware, decide_precision, detect
from tuner.recipes import loading
from tuner.worker import consensus, step_log, train


@pytest.fixture
def no_nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "has_driver", lambda: False)
    monkeypatch.setattr(libraries, "torch_built_for", lambda key: None)


def _files(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def _found_in(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = hardware.other_accelerators
    monkeypatch.setattr(hardware, "other_accelerators", lambda: looked(root))


@pytest.mark.parametrize(
    ("package", "file", "device", "variable"),
    [
        ("torch_npu", "dev/davinci{}", "npu", "ASCEND_RT_VISIBLE_DEVICES"),
        ("habana_frameworks", "dev/accel/accel{}", "hpu", "HABANA_VISIBLE_MODULES"),
    ],
)
def test_another_makers_devices_are_those_of_its_torch_and_driver(
    package: str,
    file: str,
    device: str,
    variable: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    no_nvidia: None,
) -> None:
    _files(tmp_path, file.format(0), file.format(1))
    _found_in(tmp_path, monkeypatch)
    without = detect({})
    monkeypatch.setattr(libraries, "is_installed", lambda name: name == package)

    found = detect({})

    assert without.device == "cpu"
    assert (found.device, len(found.gpus), found.has_nvidia, found.has_native_bf16) == (device, 2, False, True)
    assert len(detect({variable: "1"}).gpus) == 1
    assert detect({"DS_ACCELERATOR": "cpu"}).device == "cpu"


def test_amds_gpus_are_told_from_its_processors_and_have_their_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_nvidia: None
) -> None:
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for name, units in (("0", 0), ("1", 304)):
        _files(nodes, f"{name}/properties", f"{name}/mem_banks/0/properties")
        (nodes / name / "properties").write_text(f"cpu_cores_count 8\nsimd_count {units}\n")
        (nodes / name / "mem_banks/0/properties").write_text(f"heap_type 1\nsize_in_bytes {192 * GIB}\n")
    _found_in(tmp_path, monkeypatch)
    monkeypatch.setattr(libraries, "torch_built_for", lambda key: "6.4" if key == "hip" else None)

    found = detect({})

    assert (found.device, found.maker, found.has_nvidia) == ("cuda", "AMD", False)
    assert [gpu.memory_bytes for gpu in found.gpus] == [192 * GIB]
    assert detect({"HIP_VISIBLE_DEVICES": ""}).gpus == ()


def test_what_is_compiled_for_nvidia_is_not_taken_elsewhere() -> None:
    npu = Hardware((Gpu("Ascend accelerator", 0, (0, 0)),), maker="Ascend")

    assert decide_precision("auto", npu).dtype == "bf16"
    settled = kernels.choose_kernels(loading.load("tiny_full_sample_e3"), npu, "bf16")
    assert settled.config.model.attn_implementation == "sdpa"
    assert settled.origins["model.attn_implementation"].text == "derived: flash attention needs NVIDIA GPUs"
    assert like("Ascend accelerator", 0) is None


class Made(CPU_Accelerator):  # type: ignore[misc]
    """An accelerator that DeepSpeed calls npu, whose device is the CPU."""

    def device_name(self, device_index: int | None = None) -> str:
        return "npu" if device_index is None else f"npu:{device_index}"

    def communication_backend_name(self) -> str:
        return "hccl"

    def set_device(self, device_index: int) -> None:
        self.chosen = device_index

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return 5 * GIB

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return torch.tensor([7])


def test_a_rank_asks_the_accelerator_for_its_device_its_memory_and_its_random_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, asked = get_accelerator(), dict[str, Any]()
    monkeypatch.setattr(train.deepspeed, "init_distributed", asked.update)
    monkeypatch.setattr(train.compat, "wait_for_ever", lambda: None)
    monkeypatch.setattr(train.torch, "device", lambda name, index: f"{name}:{index}")  # this torch has no npu
    rank, config = _rank_and_config()
    set_accelerator(Made())
    try:
        device = train._join(rank, config)
        held, states = step_log.peak_bytes(), consensus.random_states()
    finally:
        set_accelerator(before)

    assert (device, asked["dist_backend"]) == ("npu:3", "hccl")
    assert held == 5 * GIB
    assert states[1].tolist() == [7]


def _rank_and_config() -> tuple[Any, Any]:
    from types import SimpleNamespace

    return SimpleNamespace(local_rank=3), SimpleNamespace(randomness=SimpleNamespace(seed=1))
