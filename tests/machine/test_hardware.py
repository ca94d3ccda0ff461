"""A stand-in for NVML has the GPUs that are not here; on such a machine NVML itself finds no driver."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from tests.machine.gpus import A100, CPU, GIB, H200, T4, V100, machine
from tests.refused import refused
from tuner.errors import MachineError
from tuner.machine import hardware
from tuner.machine.hardware import Gpu, detect, has_compiler, tool_path

FOUR = (
    Gpu("NVIDIA H200", 141 * GIB, (9, 0), "GPU-aaaa1111-0000"),
    Gpu("NVIDIA H200", 141 * GIB, (9, 0), "GPU-bbbb2222-0000"),
    Gpu("Tesla T4", 15 * GIB, (7, 5), "GPU-cccc3333-0000"),
    Gpu("Tesla V100-SXM2-32GB", 32 * GIB, (7, 0), "GPU-cccc4444-0000"),
)


def nvml_has(monkeypatch: pytest.MonkeyPatch, gpus: Iterable[Gpu]) -> None:
    """Let NVML have these GPUs, each with 1 GiB free and one process of 2 GiB and one of unknown size."""
    held = [*gpus]
    processes = [SimpleNamespace(pid=4711, usedGpuMemory=2 * GIB), SimpleNamespace(pid=4712, usedGpuMemory=None)]
    answers = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len(held),
        "nvmlDeviceGetHandleByIndex": held.__getitem__,
        "nvmlDeviceGetName": lambda gpu: gpu.name,
        "nvmlDeviceGetUUID": lambda gpu: gpu.uuid,
        "nvmlDeviceGetCudaComputeCapability": lambda gpu: gpu.compute_capability,
        "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(total=gpu.memory_bytes, free=GIB),
        "nvmlDeviceGetComputeRunningProcesses": lambda gpu: processes,
        "nvmlDeviceGetMigMode": failing(pynvml.NVML_ERROR_NOT_SUPPORTED),
        "nvmlSystemGetCudaDriverVersion": lambda: 12080,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    monkeypatch.setattr(hardware, "has_driver", lambda: True)


def _script(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)


def test_gpus_are_read_through_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml_has(monkeypatch, FOUR)

    found = detect({})

    assert found.gpus == FOUR
    assert found.smallest_gpu_bytes == 15 * GIB
    assert hardware.cuda_driver_version() == (12, 8)
    assert hardware.gpu_use()[FOUR[0].uuid] == hardware.GpuUse(GIB, ((4711, 2 * GIB), (4712, 0)))


VISIBLE = {
    "0": ["aaaa"],
    "1,0": ["bbbb", "aaaa"],
    " 2 , 3 ": ["cccc", "cccc"],
    "GPU-bbbb2222-0000": ["bbbb"],
    "GPU-bbbb,GPU-aaaa": ["bbbb", "aaaa"],
    "": [],
    "-1": [],
    "NoDevFiles": [],
    "0,9,1": ["aaaa"],
    "0,-1,1": ["aaaa"],
    "0,,1": ["aaaa"],
}


@pytest.mark.parametrize("wanted", VISIBLE)
def test_hidden_gpus_do_not_count_and_the_order_is_the_users(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml_has(monkeypatch, FOUR)

    assert [gpu.uuid[4:8] for gpu in detect({"CUDA_VISIBLE_DEVICES": wanted}).gpus] == VISIBLE[wanted]


@pytest.mark.parametrize("wanted", ["9", "GPU-dead", "0,0"])
def test_a_variable_that_names_no_gpu_is_refused(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml_has(monkeypatch, FOUR)

    with refused(MachineError, "CUDA_VISIBLE_DEVICES", wanted):
        detect({"CUDA_VISIBLE_DEVICES": wanted})


def failing(code: int) -> Callable[..., None]:
    def fail(*_: Any) -> None:
        raise pynvml.NVMLError(code)

    return fail


@pytest.mark.parametrize(
    ("call", "code", "message"),
    [
        ("nvmlInit", pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "nvmlInit fails with 'RM has detected"),
        ("nvmlDeviceGetCount", pynvml.NVML_ERROR_UNKNOWN, "nvmlDeviceGetCount fails with 'Unknown Error'"),
        ("nvmlDeviceGetMemoryInfo", pynvml.NVML_ERROR_GPU_IS_LOST, "nvmlDeviceGetMemoryInfo fails with 'GPU is lost'"),
    ],
)
def test_a_driver_that_fails_is_no_reason_to_train_on_the_cpu(
    call: str, code: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml_has(monkeypatch, FOUR)
    monkeypatch.setattr(pynvml, call, failing(code))

    with pytest.raises(MachineError, match=re.escape(message)) as caught:
        detect({})

    assert caught.value.exit_code == 3
    assert detect({"CUDA_VISIBLE_DEVICES": ""}).gpus == () == detect({"DS_ACCELERATOR": "cpu"}).gpus


def test_one_gpu_of_four_that_is_lost_is_named_and_the_others_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml_has(monkeypatch, FOUR)
    name = pynvml.nvmlDeviceGetName
    lost = lambda gpu: failing(pynvml.NVML_ERROR_GPU_IS_LOST)() if gpu == FOUR[1] else name(gpu)  # noqa: E731
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lost)

    with refused(MachineError, "NVIDIA's driver", 1, "CUDA_VISIBLE_DEVICES=0,2,3"):
        detect({})
    assert detect({"CUDA_VISIBLE_DEVICES": "0,2,3"}).gpus == (FOUR[0], *FOUR[2:])


@pytest.mark.parametrize("wanted", [None, "MIG-1111", "MIG-2222", "MIG-2222,MIG-1111"])
def test_an_instance_of_mig_is_a_gpu_with_its_own_memory(wanted: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    instances = [Gpu("NVIDIA H200 MIG 1g.18gb", 18 * GIB, (9, 0), f"MIG-{digit * 4}") for digit in "12"]
    nvml_has(monkeypatch, FOUR[:1])
    missing = failing(pynvml.NVML_ERROR_NOT_FOUND)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMigMode", lambda gpu: [1, 1])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMaxMigDeviceCount", lambda gpu: 7)
    monkeypatch.setattr(
        pynvml, "nvmlDeviceGetMigDeviceHandleByIndex", lambda gpu, at: instances[at] if at < 2 else missing()
    )

    shown = detect({"CUDA_VISIBLE_DEVICES": wanted} if wanted else {}).gpus

    assert shown == (instances[1 if wanted and wanted.startswith("MIG-2") else 0],), "CUDA shows a process one of them"


def test_a_library_without_a_loaded_driver_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml_has(monkeypatch, FOUR)
    monkeypatch.setattr(pynvml, "nvmlInit", failing(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND))

    found = detect({})

    assert found.gpus == ()
    assert not found.has_native_bf16
    assert found.smallest_gpu_bytes == 0
    assert hardware.gpu_use() == {}


def test_without_a_driver_its_version_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "has_driver", lambda: False)

    assert hardware.cuda_driver_version() is None


def test_cores_and_memory_are_this_machines() -> None:
    found = detect({"CUDA_VISIBLE_DEVICES": ""})

    assert found.num_cpus == len(os.sched_getaffinity(0))
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    assert found.host_memory_bytes == pytest.approx(int(total.split()[1]) * 1024, rel=0.01)


# What Hardware says


def test_native_bf16_needs_every_gpu() -> None:
    assert machine(H200, A100).has_native_bf16
    assert not machine(H200, T4).has_native_bf16
    assert not machine(V100).has_native_bf16
    assert not CPU.has_native_bf16


def test_a_machine_is_told_in_one_line() -> None:
    assert machine(A100, A100).describe() == "2 x NVIDIA A100-SXM4-80GB (80 GiB)"
    assert machine(H200, T4).describe() == "1 x NVIDIA H200 (141 GiB), 1 x Tesla T4 (15 GiB)"
    assert CPU.describe() == "CPU, 2 cores, no GPU"


# The compiler


def _tools(folder: Path, *names: str) -> str:
    for name in names:
        _script(folder / name, "exit 0")
    return str(folder)


@pytest.mark.parametrize(
    ("tools", "found"),
    [
        (("ninja", "g++"), True),
        (("ninja", "c++"), True),
        (("ninja",), False),
        (("g++",), False),
        (("ninja", "gcc"), False),
        ((), False),
    ],
)
def test_a_compiler_is_a_cpp_compiler_and_ninja(tmp_path: Path, tools: tuple[str, ...], found: bool) -> None:
    assert has_compiler(_tools(tmp_path, *tools)) is found


def test_the_interpreters_scripts_come_first_and_only_once() -> None:
    scripts = str(Path(sys.executable).parent)

    path = tool_path({"PATH": "/usr/bin"})

    assert path == f"{scripts}{os.pathsep}/usr/bin"
    assert tool_path({"PATH": path}) == path
    assert tool_path({}).startswith(scripts)


def test_beside_gpus_the_compiler_is_nvcc_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    nvml_has(monkeypatch, FOUR)
    toolkit = tmp_path_factory.mktemp("cuda")
    monkeypatch.setattr(hardware, "has_compiler", lambda path: True)

    assert not detect({"CUDA_HOME": str(toolkit)}).has_compiler
    (toolkit / "bin").mkdir()
    (toolkit / "bin" / "nvcc").touch()
    assert detect({"CUDA_HOME": str(toolkit)}).has_compiler


MEMINFO = "MemTotal: 1000 kB\nMemAvailable:   500 kB\n"


def _root(path: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


V2, V1 = "sys/fs/cgroup/job", "sys/fs/cgroup/memory/job"
GROUPS = {
    "no group": ({}, 500 * 1024),
    "no limit": (
        {"proc/self/cgroup": "0::/job\n", f"{V2}/memory.max": "max\n", f"{V2}/memory.current": "1\n"},
        500 * 1024,
    ),
    "a limit": (
        {
            "proc/self/cgroup": "0::/job\n",
            f"{V2}/memory.max": "9000\n",
            f"{V2}/memory.current": "5000\n",
            f"{V2}/memory.stat": "anon 4000\ninactive_file 1000\n",
        },
        5000,
    ),
    "version 1": (
        {
            "proc/self/cgroup": "3:memory:/job\n",
            f"{V1}/memory.limit_in_bytes": "9000\n",
            f"{V1}/memory.usage_in_bytes": "2000\n",
        },
        7000,
    ),
}


@pytest.mark.parametrize("name", GROUPS)
def test_available_memory_is_what_the_control_group_leaves(tmp_path: Path, name: str) -> None:
    files, expected = GROUPS[name]

    assert hardware.available_host_bytes(_root(tmp_path, files)) == expected


def test_available_memory_is_unknown_where_the_kernel_says_nothing(tmp_path: Path) -> None:
    assert hardware.available_host_bytes(tmp_path) is None


def _stub_libaio(folder: Path) -> dict[str, str]:
    """Build a library of that name with the one function that is linked, and return where compilers find it."""
    (folder / "libaio.h").write_text('extern "C" int io_submit(void*, long, void**);\n')
    source = folder / "stub.cpp"
    source.write_text('#include "libaio.h"\nint io_submit(void*, long, void**) { return 0; }\n')
    subprocess.run(["g++", "-shared", "-fPIC", source, "-o", folder / "libaio.so"], check=True)
    return {"PATH": os.environ["PATH"], "CPATH": str(folder), "LIBRARY_PATH": str(folder)}


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_libaio_is_there_where_a_program_with_it_links_and_not_without_its_header(tmp_path: Path) -> None:
    environ = _stub_libaio(tmp_path)
    assert hardware.has_libaio(environ)
    (tmp_path / "libaio.h").write_text("#error stripped\n")

    assert not hardware.has_libaio(environ)


def test_libaio_is_not_there_without_a_compiler(tmp_path: Path) -> None:
    assert not hardware.has_libaio({"PATH": str(tmp_path)})
