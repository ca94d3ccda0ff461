from __future__ import annotations

import pytest

from tests.machine.gpus import A100, CPU, H200, T4, V100, machine
from tuner.errors import MachineError
from tuner.machine.hardware import Hardware, decide_precision

MACHINES = [
    pytest.param(machine(H200), "bf16", id="H200"),
    pytest.param(machine(A100, A100), "bf16", id="A100"),
    pytest.param(machine(T4), "fp16", id="T4"),
    pytest.param(machine(V100), "fp16", id="V100"),
    pytest.param(machine(A100, V100), "fp16", id="mixed, newest first"),
    pytest.param(machine(V100, H200), "fp16", id="mixed, oldest first"),
    pytest.param(CPU, "fp32", id="CPU"),
]


@pytest.mark.parametrize(("hardware", "dtype"), MACHINES)
def test_auto_is_decided_by_the_weakest_gpus_compute_capability(hardware: Hardware, dtype: str) -> None:
    assert decide_precision("auto", hardware).dtype == dtype


def test_the_reason_names_the_capability_that_decided() -> None:
    assert "7.0" in decide_precision("auto", machine(H200, V100)).reason
    assert "8.0 or more (lowest: 9.0)" in decide_precision("auto", machine(H200)).reason


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("hardware", [machine(H200), machine(V100)], ids=["H200", "V100"])
def test_a_recipes_dtype_wins_over_the_gpus(hardware: Hardware, dtype: str) -> None:
    decided = decide_precision(dtype, hardware)

    assert decided.dtype == dtype
    assert decided.reason.startswith("optim_wrapper.dtype")


def test_emulated_bf16_is_called_that() -> None:
    assert "emulated" in decide_precision("bf16", machine(V100)).reason
    assert "emulated" not in decide_precision("bf16", machine(A100)).reason
    assert "emulated" not in decide_precision("bf16", CPU).reason


def test_a_weight_has_four_bytes_in_fp32_alone() -> None:
    assert [decide_precision(dtype, machine(A100)).weight_bytes for dtype in ("bf16", "fp16", "fp32")] == [2, 2, 4]


def test_fp16_on_a_cpu_is_refused_with_what_to_set() -> None:
    with pytest.raises(MachineError) as caught:
        decide_precision("fp16", CPU)

    assert caught.value.exit_code == 3
    assert "optim_wrapper.dtype" in str(caught.value)
    assert "--set dtype=fp32" in str(caught.value)
