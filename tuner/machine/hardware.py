"""What this machine has: GPUs (through NVML or nvidia-smi), host memory, cores, a compiler. Never imports torch."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MIB = 1024**2
_NVIDIA_SMI_S = 20.0


@dataclass(frozen=True)
class Gpu:
    """One visible GPU; memory as the driver reports it."""

    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]
    uuid: str = ""


@dataclass(frozen=True)
class Hardware:
    """The visible hardware of this machine."""

    gpus: tuple[Gpu, ...] = ()
    num_cpus: int = 1
    host_memory_bytes: int = 0
    has_compiler: bool = False
    """A C++ compiler and ninja, which DeepSpeed's CPU Adam is built with at first use."""

    @property
    def has_native_bf16(self) -> bool:
        """Every visible GPU computes in bf16 without emulation (compute capability 8.0 or more)."""
        return bool(self.gpus) and all(gpu.compute_capability >= (8, 0) for gpu in self.gpus)

    @property
    def smallest_gpu_bytes(self) -> int:
        return min((gpu.memory_bytes for gpu in self.gpus), default=0)

    def describe(self) -> str:
        """Return one line, such as '8 x NVIDIA A100 (80 GiB)' or 'CPU, 2 cores'."""
        if not self.gpus:
            return f"CPU, {self.num_cpus} cores, no GPU"
        kinds: dict[str, int] = {}
        for gpu in self.gpus:
            label = f"{gpu.name} ({gpu.memory_bytes / 1024**3:.0f} GiB)"
            kinds[label] = kinds.get(label, 0) + 1
        return ", ".join(f"{count} x {label}" for label, count in kinds.items())

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def detect(environ: Mapping[str, str]) -> Hardware:
    """Look at this machine; GPUs hidden by CUDA_VISIBLE_DEVICES do not count."""
    gpus = _visible(_nvml_gpus() or _nvidia_smi_gpus(), environ.get("CUDA_VISIBLE_DEVICES"))
    return Hardware(gpus, _num_cpus(), _host_memory_bytes(), has_compiler(tool_path(environ)))


def tool_path(environ: Mapping[str, str]) -> str:
    """Return PATH with this interpreter's scripts first, so that pip's ninja is found without an activated venv."""
    scripts, path = str(Path(sys.executable).parent), environ.get("PATH", os.defpath)
    return path if scripts in path.split(os.pathsep) else f"{scripts}{os.pathsep}{path}"


def has_compiler(path: str) -> bool:
    """Return whether a C++ compiler and ninja are on `path`."""
    return bool(shutil.which("ninja", path=path) and (shutil.which("g++", path=path) or shutil.which("c++", path=path)))


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _host_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _nvml_gpus() -> list[Gpu]:
    try:
        import pynvml  # only this function needs it, and a machine without NVIDIA's driver has no use for it
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [_nvml_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def _nvml_gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle).total
    return Gpu(str(nvml.nvmlDeviceGetName(handle)), memory, (major, minor), str(nvml.nvmlDeviceGetUUID(handle)))


def _nvidia_smi_gpus() -> list[Gpu]:
    command = shutil.which("nvidia-smi")
    if not command:
        return []
    query = [command, "--query-gpu=name,memory.total,compute_cap,uuid", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(query, capture_output=True, timeout=_NVIDIA_SMI_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    gpus = []
    for line in text.decode(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            name, memory, capability, uuid = (part.strip() for part in line.split(","))
            major, minor = capability.split(".")
            gpus.append(Gpu(name, int(memory) * MIB, (int(major), int(minor)), uuid))
    return gpus


def _visible(gpus: list[Gpu], wanted: str | None) -> tuple[Gpu, ...]:
    if wanted is None:
        return tuple(gpus)
    chosen: list[Gpu] = []
    for item in (part.strip() for part in wanted.split(",")):
        found = [gpu for index, gpu in enumerate(gpus) if item and (item == str(index) or gpu.uuid.startswith(item))]
        if not found:
            break  # CUDA ignores everything after the first entry that it does not know
        if found[0] in chosen:
            return ()  # and shows no GPU at all when one is named twice
        chosen.append(found[0])
    return tuple(chosen)
