from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path

import pytest

from tests.launch.plans import made
from tests.machine.gpus import A100, CPU, machine
from tuner.errors import MachineError
from tuner.launch import preflight
from tuner.machine import libraries


def test_a_plan_for_this_machine_passes() -> None:
    preflight.check(made(), {})


def test_cuda_and_bitsandbytes_are_asked_for_only_where_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "torch_cuda_version", lambda: None)
    monkeypatch.setitem(libraries.QUANTIZED, "bitsandbytes", "999")

    preflight.check(made(), {})
    with pytest.raises(MachineError, match="CPU build"):
        preflight.check(made(hardware=machine(A100)), {})
    with pytest.raises(MachineError, match="bitsandbytes"):
        preflight.check(made(recipe="tiny_qlora_sample_e1"), {})


@pytest.mark.parametrize("asked", ["tracker", "config"])
def test_a_tracker_without_its_package_is_refused_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    path = tmp_path / "my.json"
    path.write_text('{"wandb": {"enabled": true}}')
    plan = made("log.trackers=['wandb']") if asked == "tracker" else made(deepspeed=str(path))
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else real(name))

    with pytest.raises(MachineError) as caught:
        preflight.check(plan, {})

    assert "wandb is not installed" in str(caught.value)
    assert ("log.trackers" if asked == "tracker" else "wandb.enabled") in str(caught.value)


@pytest.mark.parametrize(("age_s", "refused"), [(10, False), (3600, True)])
def test_an_interrupted_build_is_not_waited_for_and_a_running_one_is(tmp_path: Path, age_s: int, refused: bool) -> None:
    lock = tmp_path / "py311_cpu" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    then = time.time() - age_s
    os.utime(lock, (then, then))
    environ = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}

    if refused:
        with pytest.raises(MachineError, match=f"rm {lock}"):
            preflight.check(made(deepspeed="zero2_offload", hardware=CPU), environ)
    else:
        preflight.check(made(deepspeed="zero2_offload", hardware=CPU), environ)
    preflight.check(made(deepspeed="zero2", hardware=CPU), environ)
