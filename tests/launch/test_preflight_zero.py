"""A DeepSpeed config that this machine cannot run is refused with the place of its key, before a rank starts."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launch.plans import made
from tests.machine.gpus import CPU, GIB
from tuner.errors import DiskError, MachineError
from tuner.launch import builds, preflight, supervise
from tuner.launch.checks import Finding, deepspeed_config
from tuner.launch.resolved_run import ResolvedRun
from tuner.machine import disks, hardware
from tuner.runs.directory import RunDirectory

Disk = namedtuple("Disk", "total used free")
BOTH = ("offload_optimizer", "offload_param")


def texts(found: list[Finding]) -> str:
    return "\n".join(map(str, found))


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ResolvedRun]:
    """Return a function that plans a run with a DeepSpeed config, on a machine that has libaio."""
    monkeypatch.setattr(hardware, "has_libaio", lambda environ: True)

    def plan(config: dict[str, Any], *sets: str, **request: Any) -> ResolvedRun:
        path = tmp_path / "my.json"
        path.write_text(json.dumps(config))
        return made(*sets, deepspeed=str(path), **request)

    return plan


def _nvme(path: Path, *blocks: str, stage: int = 3) -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": stage} | {block: {"device": "nvme", "nvme_path": str(path)} for block in blocks}
    }


def _lacks(plan: ResolvedRun) -> list[Finding]:
    return list(deepspeed_config.config(plan))


@pytest.mark.parametrize("blocks", [BOTH, BOTH[:1], BOTH[1:]])
def test_swapping_to_a_disk_with_libaio_and_a_folder_is_right(
    planned: Callable[..., ResolvedRun], tmp_path: Path, blocks: tuple[str, ...]
) -> None:
    plan = planned(_nvme(tmp_path / "new" / "swap", *blocks))

    assert _lacks(plan) == []
    assert list(deepspeed_config.swap_space(plan)) == []
    assert not (tmp_path / "new").exists()


def test_swapping_to_a_disk_needs_libaio_and_names_its_packages(
    planned: Callable[..., ResolvedRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(_nvme(tmp_path, *BOTH))
    monkeypatch.setattr(hardware, "has_libaio", lambda environ: False)

    (error,) = _lacks(plan)

    assert isinstance(error, MachineError)
    assert error.where == f"{tmp_path}/my.json:1:58"
    assert "apt install libaio-dev, or dnf install libaio-devel" in str(error)


def test_swapping_to_a_disk_needs_a_compiler(planned: Callable[..., ResolvedRun], tmp_path: Path) -> None:
    plan = planned(_nvme(tmp_path, "offload_param"), hardware=CPU._replace(has_compiler=False))

    assert "Install g++ and ninja" in texts(_lacks(plan))


def test_an_op_that_came_compiled_needs_neither(
    planned: Callable[..., ResolvedRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(_nvme(tmp_path, *BOTH), hardware=CPU._replace(has_compiler=False))
    monkeypatch.setattr(hardware, "has_libaio", lambda environ: False)
    monkeypatch.setattr(builds, "came_compiled", lambda op: op == "async_io")

    assert _lacks(plan) == []


def test_below_stage_3_nothing_is_swapped_to_a_disk(
    planned: Callable[..., ResolvedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "has_libaio", lambda environ: False)

    assert _lacks(planned(_nvme(Path("/proc/no"), "offload_optimizer", stage=2))) == []


def test_a_folder_that_cannot_be_made_is_refused_with_the_place_of_its_key(
    planned: Callable[..., ResolvedRun], tmp_path: Path
) -> None:
    (error,) = _lacks(planned(_nvme(Path("/proc/no/swap"), "offload_param")))

    assert isinstance(error, DiskError)
    assert "offload_param.nvme_path = '/proc/no/swap': /proc cannot be written into" in str(error)
    assert error.where == f"{tmp_path}/my.json:1:72"


def test_a_file_is_no_folder_to_swap_to(planned: Callable[..., ResolvedRun], tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    assert "Not a directory" in texts(_lacks(planned(_nvme(tmp_path / "file", "offload_param"))))


@pytest.mark.parametrize(
    ("block", "key"),
    [("csv_monitor", "output_path"), ("tensorboard", "output_path"), ("flops_profiler", "output_file")],
)
def test_a_report_that_cannot_be_written_is_refused_where_it_is_on(
    planned: Callable[..., ResolvedRun], block: str, key: str
) -> None:
    on, off = ({block: {key: "/proc/no/report", "enabled": enabled}} for enabled in (True, False))

    assert f"{block}.{key}" in texts(_lacks(planned(on)))
    assert _lacks(planned(off)) == []


def test_a_disk_too_small_for_what_is_swapped_is_refused(
    planned: Callable[..., ResolvedRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(_nvme(tmp_path, *BOTH), recipe="llama2_7b_full_alpaca_e3", ignore_fit=True)
    needed = (2 + 16 if plan.precision.dtype == "bf16" else 4 + 16) * 6_738_415_616
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(0, 0, needed - 1))

    (error,) = deepspeed_config.swap_space(plan)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(0, 0, needed))

    assert isinstance(error, DiskError)
    assert f"this run swaps {needed / GIB:.1f} GiB" in str(error)
    assert list(deepspeed_config.swap_space(plan)) == []


def test_a_disk_that_is_swapped_to_is_told_with_its_speed(planned: Callable[..., ResolvedRun], tmp_path: Path) -> None:
    told = texts(list(deepspeed_config.swap_disks(planned(_nvme(tmp_path / "swap", *BOTH)))))

    assert "GB/s of writes" in told
    assert not (tmp_path / "swap").exists()


@pytest.mark.parametrize(("kind", "told"), [("tmpfs", "is in memory"), ("nfs4", "is on another machine (nfs4)")])
def test_a_disk_that_is_none_is_told(
    planned: Callable[..., ResolvedRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, told: str
) -> None:
    monkeypatch.setattr(disks, "file_system", lambda path: kind)

    assert told in texts(list(deepspeed_config.swap_disks(planned(_nvme(tmp_path, *BOTH)))))


def test_every_start_of_ranks_removes_what_they_swapped(
    planned: Callable[..., ResolvedRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "swap" / "zero_stage_3"
    monkeypatch.setattr(supervise.builds, "build", lambda *_: None)
    monkeypatch.setattr(supervise, "run", lambda *_, **__: 7 if folder.is_dir() else 0)

    assert supervise.run_ranks(planned(_nvme(tmp_path / "swap", *BOTH)), RunDirectory(tmp_path / "run")) == 7
    assert not folder.exists()


def test_a_dry_run_tells_what_is_missing(
    planned: Callable[..., ResolvedRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "has_libaio", lambda environ: False)

    told = preflight.foresee(planned(_nvme(tmp_path, "offload_param")))

    assert [line for line in told if line.startswith("tuner train would refuse this run:") and "libaio" in line]


def test_of_other_machines_is_told_what_they_must_have(planned: Callable[..., ResolvedRun], tmp_path: Path) -> None:
    config = _nvme(tmp_path, "offload_param") | {"wandb": {"enabled": True}}

    told = texts(list(preflight.inspect(planned(config), elsewhere=True)))

    assert "libaio-dev" in told
    assert "wandb.enabled needs wandb on the machine that trains, which cannot be checked from here." in told
