"""Each row of the table of DeepSpeed's errors meets its own config on its own versions, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.each import each
from tests.launch.plans import made
from tests.machine.gpus import A100, machine
from tuner.errors import MachineError
from tuner.launch.checks import deepspeed_config
from tuner.machine import libraries
from tuner.machine.libraries import MINIMUM, TESTED
from tuner.zero import guards
from tuner.zero.guards import GUARDS, Guard

BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}
FP32_SUMS = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
MUON = {"optimizer": {"type": "Muon"}}


def zero_of(stage: int, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **keys}}


OFFLOADED = zero_of(2, offload_optimizer={"device": "cpu"})
CONFIGS: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = [
    # A config that the row of the same number meets, and one beside it that it does not.
    ({**OFFLOADED, "gradient_accumulation_steps": 2}, {**OFFLOADED, "gradient_accumulation_steps": 1}),
    (
        {**zero_of(1), **FP32_SUMS, "gradient_accumulation_steps": 2},
        {**zero_of(1), **BF16, "gradient_accumulation_steps": 2},
    ),
    (zero_of(2, overlap_comm=True), zero_of(3, overlap_comm=True)),
    (zero_of(1, overlap_comm=True), zero_of(1, overlap_comm=False)),
    (zero_of(3, stage3_use_all_reduce_for_fetch_params=True), zero_of(3)),
    (zero_of(3, zero_hpz_partition_size=8), zero_of(3, zero_hpz_partition_size=1)),
    (
        {**zero_of(3, zero_quantized_nontrainable_weights=True), **BF16},
        {**zero_of(3, zero_quantized_weights=True), **FP16},
    ),
    ({**zero_of(0), **BF16}, {**zero_of(1), **BF16}),
    (zero_of(2), zero_of(3)),
    (zero_of(3), zero_of(2)),
    (zero_of(2), zero_of(0)),
    ({**zero_of(2), **FP16, **MUON}, {**zero_of(2), **BF16, **MUON}),
    ({**zero_of(0), **MUON}, {**zero_of(0), "optimizer": {"type": "Lion"}}),
    ({**zero_of(1), **FP32_SUMS, **MUON}, {**zero_of(2), **FP32_SUMS, **MUON}),
]


@each(list(zip(GUARDS, CONFIGS, strict=True)))
def test_an_error_is_met_by_its_config_on_its_versions_alone(
    guard: Guard, configs: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    meets, another = configs
    assert guard.fixed, "with an open error the next release is not yet known"
    major, minor, patch = map(int, guard.fixed.split("."))
    last_bad = f"{major}.{minor}.{patch - 1}" if patch else f"{major}.{minor - 1}.9"

    for version in {last_bad, guard.first if guard.first != "0" else last_bad}:
        assert guard in guards.met(meets, version, has_gpus=True)
        assert guard not in guards.met(another, version, has_gpus=True)
        assert (guard in guards.met(meets, version, has_gpus=False)) is not guard.on_gpus
    assert guard not in guards.met(meets, guard.fixed, has_gpus=True)
    assert guard.first == "0" or guard not in guards.met(meets, "0.15.1", has_gpus=True)


def test_an_error_names_where_it_was_read() -> None:
    assert [guard for guard in GUARDS if not guard.source.startswith("DeepSpeed#")] == []


def test_the_tested_deepspeed_has_none_of_them() -> None:
    assert list(guards.of_version(TESTED["deepspeed"])) == []


def test_no_preset_meets_one_with_the_oldest_deepspeed_that_is_taken() -> None:
    for stage in range(4):
        for more in ({}, BF16, FP16, FP32_SUMS):
            config = {**zero_of(stage, offload_optimizer={"device": "cpu"}), **more, "gradient_accumulation_steps": 2}
            config["zero_optimization"]["overlap_comm"] = True
            assert list(guards.met(config, MINIMUM["deepspeed"], has_gpus=True)) == []


@pytest.mark.parametrize(("version", "told"), [("0.18.6", True), ("0.19.5", False)])
def test_a_run_that_would_train_wrong_is_refused_with_the_place_of_its_key(
    monkeypatch: pytest.MonkeyPatch, version: str, told: bool
) -> None:
    monkeypatch.setattr(libraries, "version_of", lambda name: version)
    plan = made("optim_wrapper.accumulative_counts=2", deepspeed="zero2_offload", hardware=machine(A100))

    found = list(deepspeed_config.config(plan))

    refused = [finding for finding in found if isinstance(finding, MachineError)]
    slow = [finding for finding in found if isinstance(finding, str)]
    assert bool(refused) is bool(slow) is told
    if told:
        assert f"with deepspeed {version} ZeRO 1 and 2 with an offloaded optimizer lose the gradients" in str(
            refused[0]
        )
        assert "DeepSpeed#7967" in str(refused[0])
        assert "deepspeed_zero2_offload" in str(refused[0].where)
        assert "pip install 'deepspeed>=0.19.0', or --set accumulative_counts=1." in str(refused[0])
        assert "which makes a step up to 2.5 times as slow" in slow[0]
