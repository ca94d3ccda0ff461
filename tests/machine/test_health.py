"""What is told of an ill machine. The GPUs are a fake of NVML: no GPU here is ill, and none was tried that is."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from tests.machine.gpus import H200
from tests.machine.test_hardware import failing, nvml_has
from tuner.machine import health
from tuner.machine.health import Ailment

TWO = (H200._replace(uuid="GPU-a"), H200._replace(uuid="GPU-b"))
BUSES = {"GPU-a": "00000000:1A:00.0", "GPU-b": b"00000000:3B:00.0"}  # some versions of NVML give bytes
WELL = {
    "nvmlDeviceGetRemappedRows": lambda gpu: (0, 0, 0, 0),
    "nvmlDeviceGetTotalEccErrors": lambda gpu, kind, counter: 0,
    "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu: 0x4 | 0x1,  # a power cap, and idle
    "nvmlDeviceGetCurrPcieLinkWidth": lambda gpu: 16,
    "nvmlDeviceGetMaxPcieLinkWidth": lambda gpu: 16,
    "nvmlDeviceGetPciInfo": lambda gpu: SimpleNamespace(busId=BUSES[gpu.uuid]),
    "nvmlDeviceGetNvLinkState": lambda gpu, link: 1,
}  # fmt: skip
Fake = Callable[..., list[Ailment]]


@pytest.fixture
def fake_nvml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fake:
    """Returns what is told of two GPUs if the second one answers a call of NVML with a value; this is a fake."""
    nvml_has(monkeypatch, TWO)

    def told(call: str = "", value: object = None, log: str = "") -> list[Ailment]:
        for name, well in WELL.items():
            answers = lambda gpu, *args, name=name, well=well: (  # noqa: E731
                value if name == call and gpu.uuid == "GPU-b" else well(gpu, *args)
            )
            monkeypatch.setattr(pynvml, name, answers, raising=False)
        (tmp_path / "kmsg").write_text(log)
        return health.gpus(["GPU-a", "GPU-b"], tmp_path / "kmsg")

    return told


def test_of_gpus_that_are_well_nothing_is_told(fake_nvml: Fake) -> None:
    assert fake_nvml() == []


@pytest.mark.parametrize(
    ("call", "value", "word", "is_fatal"),
    [
        ("nvmlDeviceGetRemappedRows", (1, 1, 0, 1), "cannot be replaced", True),
        ("nvmlDeviceGetRemappedRows", (1, 1, 1, 0), "to be replaced", False),
        ("nvmlDeviceGetTotalEccErrors", 3, "3 uncorrectable", False),
        ("nvmlDeviceGetCurrentClocksEventReasons", 0x40, "temperature", False),
        ("nvmlDeviceGetCurrPcieLinkWidth", 8, "8 of 16 lanes", False),
        ("nvmlDeviceGetNvLinkState", 0, "0 of its NVLinks", False),
    ],
)
def test_an_ill_gpu_is_named_with_what_the_driver_tells(
    fake_nvml: Fake, call: str, value: object, word: str, is_fatal: bool
) -> None:
    (ailment,) = fake_nvml(call, value)

    assert ailment.what.startswith("GPU 1: ") and word in ailment.what and ailment.is_fatal is is_fatal


def test_the_hardwares_xids_in_the_kernels_log_are_told_and_those_of_programs_are_not(fake_nvml: Fake) -> None:
    log = (
        "4,1,5000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=7, GPU has fallen off the bus.\n"
        "4,2,5000001,-;NVRM: Xid (PCI:0000:1a:00): 31, pid=7, MMU fault\n"
    )

    (ailment,) = fake_nvml(log=log)

    assert ailment.what.startswith("GPU 1: ") and "XID 79" in ailment.what


def test_what_a_driver_does_not_tell_is_left_out(fake_nvml: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml()
    for name in WELL:
        monkeypatch.setattr(pynvml, name, failing(pynvml.NVML_ERROR_NOT_SUPPORTED))

    assert health.gpus(["GPU-a", "GPU-b"]) == []


def test_other_gpus_than_those_of_the_run_do_not_matter(fake_nvml: Fake) -> None:
    fake_nvml("nvmlDeviceGetTotalEccErrors", 3)

    assert health.gpus(["GPU-a"]) == []


def test_a_folder_that_works_is_well_and_nothing_is_left_there(tmp_path: Path) -> None:
    assert health.folder(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_hangs_is_told_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda _: answers.wait())

    (ailment,) = health.folder(tmp_path, limit_s=0.1)
    answers.set()

    assert ailment.is_fatal and str(tmp_path) in ailment.what


def test_a_clock_that_differs_from_the_folders_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 95)

    (ailment,) = health.folder(tmp_path)

    assert not ailment.is_fatal and "95 s behind" in ailment.what


def test_a_folder_that_cannot_be_written_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        health.folder(tmp_path / "nowhere")


def test_the_fake_has_no_call_that_nvml_lacks() -> None:
    assert [name for name in WELL if not hasattr(pynvml, name)] == []
