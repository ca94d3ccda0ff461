"""Fake `nvidia-smi` scripts stand in for GPUs that are not here; NVML finds no driver on such a machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.machine.gpus import A100, CPU, GIB, H200, T4, V100, machine
from tuner.machine import hardware
from tuner.machine.hardware import Gpu, detect, has_compiler, tool_path

FOUR = """\
NVIDIA H200, 143771, 9.0, GPU-aaaa1111-0000
NVIDIA H200, 143771, 9.0, GPU-bbbb2222-0000
Tesla T4, 15360, 7.5, GPU-cccc3333-0000
Tesla V100-SXM2-32GB, 32768, 7.0, GPU-cccc4444-0000
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put an nvidia-smi script first on PATH and hide a real driver; return the script's path."""
    monkeypatch.setattr(hardware, "_nvml_gpus", list)  # a machine with a GPU would answer here
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path / "nvidia-smi"


def _script(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)


def _prints(path: Path, text: str) -> None:
    (path.parent / "out").write_text(text, encoding="utf-8")
    _script(path, f'cat "{path.parent}/out"')


def _names(environ: dict[str, str]) -> list[str]:
    return [gpu.uuid[4:8] for gpu in detect(environ).gpus]


def test_gpus_are_read_from_nvidia_smi(smi: Path) -> None:
    _prints(smi, FOUR)

    found = detect({})

    assert len(found.gpus) == 4
    assert found.gpus[0] == Gpu("NVIDIA H200", 143771 * 1024**2, (9, 0), "GPU-aaaa1111-0000")
    assert found.gpus[2].compute_capability == (7, 5)
    assert found.smallest_gpu_bytes == 15360 * 1024**2


VISIBLE = {
    "0": ["aaaa"],
    "1,0": ["bbbb", "aaaa"],
    " 2 , 3 ": ["cccc", "cccc"],
    "GPU-bbbb2222-0000": ["bbbb"],
    "GPU-bbbb,GPU-aaaa": ["bbbb", "aaaa"],
    "": [],
    "-1": [],
    "9": [],
    "GPU-dead": [],
    "NoDevFiles": [],
    "0,9,1": ["aaaa"],
    "0,-1,1": ["aaaa"],
    "0,,1": ["aaaa"],
    "0,0": [],
}


@pytest.mark.parametrize("wanted", VISIBLE)
def test_hidden_gpus_do_not_count_and_the_order_is_the_users(smi: Path, wanted: str) -> None:
    _prints(smi, FOUR)

    assert _names({"CUDA_VISIBLE_DEVICES": wanted}) == VISIBLE[wanted]


GARBAGE = [
    "",
    "\n\n",
    "No devices were found",
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
    "a, b, c, d",
    "NVIDIA H200, [N/A], 9.0, GPU-1",
    "NVIDIA H200, 143771, nine, GPU-1",
    "NVIDIA H200, 143771",
]


@pytest.mark.parametrize("text", GARBAGE)
def test_garbage_from_nvidia_smi_is_no_gpu(smi: Path, text: str) -> None:
    _prints(smi, text)

    assert detect({}).gpus == ()


def test_bytes_that_are_no_text_are_no_gpu(smi: Path) -> None:
    _script(smi, r"printf '\377\376\200, 1, 2, 3\n'")

    assert detect({}).gpus == ()


@pytest.mark.parametrize("body", ["exit 9", "kill -9 $$", f"printf '{FOUR}'; exit 1"])
def test_a_failing_nvidia_smi_is_no_gpu(smi: Path, body: str) -> None:
    _script(smi, body)

    assert detect({}).gpus == ()


def test_an_nvidia_smi_that_cannot_be_run_is_no_gpu(smi: Path) -> None:
    smi.write_text("#!/no/such/interpreter\n")
    smi.chmod(0o755)

    assert detect({}).gpus == ()


def test_a_hanging_nvidia_smi_is_given_up(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_NVIDIA_SMI_S", 0.2)
    _script(smi, "exec sleep 60")
    started = time.monotonic()

    assert detect({}).gpus == ()
    assert time.monotonic() - started < 10


def test_without_nvml_and_nvidia_smi_there_is_no_gpu(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(smi.parent))

    found = detect({})

    assert found.gpus == ()
    assert not found.has_native_bf16
    assert found.smallest_gpu_bytes == 0


def test_cores_and_memory_are_this_machines() -> None:
    found = detect({"CUDA_VISIBLE_DEVICES": ""})

    assert found.num_cpus == len(os.sched_getaffinity(0))
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    assert found.host_memory_bytes == pytest.approx(int(total.split()[1]) * 1024, rel=0.01)


def test_detection_imports_no_torch() -> None:
    code = "import sys; from tuner.machine.hardware import detect; detect({}); sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# What Hardware says


def test_native_bf16_needs_every_gpu() -> None:
    assert machine(H200, A100).has_native_bf16
    assert not machine(H200, T4).has_native_bf16
    assert not machine(V100).has_native_bf16
    assert not CPU.has_native_bf16


def test_the_smallest_gpu_decides_what_fits() -> None:
    assert machine(H200, T4, A100).smallest_gpu_bytes == T4.memory_bytes


def test_a_machine_is_told_in_one_line() -> None:
    assert machine(A100, A100).describe() == "2 x NVIDIA A100-SXM4-80GB (80 GiB)"
    assert machine(H200, T4).describe() == "1 x NVIDIA H200 (141 GiB), 1 x Tesla T4 (15 GiB)"
    assert CPU.describe() == "CPU, 2 cores, no GPU"


def test_a_machine_as_json_holds_every_gpu() -> None:
    found = machine(H200).to_json()

    assert found["gpus"][0]["memory_bytes"] == 141 * GIB
    assert found["num_cpus"] == 16


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


def _answers(path: Path, **texts: str) -> None:
    """Let nvidia-smi answer each query with its text; with no query, the text `plain`."""
    cases = "".join(f'*{key.replace("_", "-")}*) printf "{text}";;\n' for key, text in texts.items() if key != "plain")
    _script(path, f'case "$*" in\n{cases}*) printf "{texts.get("plain", "")}";;\nesac')


@pytest.fixture
def no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_with_nvml", lambda ask: None)


@pytest.mark.usefixtures("no_nvml")
def test_free_memory_and_processes_are_read_from_nvidia_smi(smi: Path) -> None:
    _answers(smi, query_compute="GPU-a, 4711, 1024\\nGPU-a, 4712, [N/A]\\n", query_gpu="GPU-a, 2048\\nGPU-b, 4096\\n")

    found = hardware.gpu_use()

    assert found["GPU-a"] == hardware.GpuUse(2048 * 1024**2, ((4711, 1024 * 1024**2),))
    assert found["GPU-b"] == hardware.GpuUse(4096 * 1024**2)


@pytest.mark.usefixtures("no_nvml")
def test_the_drivers_cuda_version_is_read_from_nvidia_smi(smi: Path) -> None:
    _answers(smi, plain="| NVIDIA-SMI 570.1  Driver Version: 570.1  CUDA Version: 12.8 |")

    assert hardware.cuda_driver_version() == (12, 8)


@pytest.mark.usefixtures("no_nvml")
def test_without_a_driver_nothing_is_known_of_its_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    assert hardware.gpu_use() == {}
    assert hardware.cuda_driver_version() is None


def test_beside_gpus_the_compiler_is_nvcc_too(
    smi: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    _prints(smi, FOUR)
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
def test_libaio_is_there_where_a_program_with_it_links(tmp_path: Path) -> None:
    assert hardware.has_libaio(_stub_libaio(tmp_path))


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_libaio_without_its_header_is_not_there(tmp_path: Path) -> None:
    environ = _stub_libaio(tmp_path)
    (tmp_path / "libaio.h").write_text("#error stripped\n")

    assert not hardware.has_libaio(environ)


def test_libaio_is_not_there_without_a_compiler(tmp_path: Path) -> None:
    assert not hardware.has_libaio({"PATH": str(tmp_path)})
