from __future__ import annotations

from tests.machine.gpus import A100, CPU, H200, V100, machine
from tests.refused import refused
from tuner.errors import MachineError
from tuner.machine.hardware import decide_precision


def test_the_reason_names_the_capability_that_decided() -> None:
    assert "7.0" in decide_precision("auto", machine(H200, V100)).reason
    assert "8.0 or more (lowest: 9.0)" in decide_precision("auto", machine(H200)).reason


def test_emulated_bf16_is_called_that() -> None:
    assert "emulated" in decide_precision("bf16", machine(V100)).reason
    assert "emulated" not in decide_precision("bf16", machine(A100)).reason
    assert "emulated" not in decide_precision("bf16", CPU).reason


def test_a_weight_has_four_bytes_in_fp32_alone() -> None:
    assert [decide_precision(dtype, machine(A100)).weight_bytes for dtype in ("bf16", "fp16", "fp32")] == [2, 2, 4]


def test_fp16_on_a_cpu_is_refused_with_what_to_set() -> None:
    with refused(MachineError, "optim_wrapper.dtype", "optim_wrapper.dtype", "--set dtype=fp32"):
        decide_precision("fp16", CPU)
